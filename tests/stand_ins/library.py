"""A library of arrays and its backend, named after the module they are installed as. The devices' names are made up."""

import numpy as np

from polyattn.backend import Backend, Status


class Array(np.ndarray):
    pass


class Fake(Backend):
    name = __name__.replace("_", "-")
    array_modules = (__name__,)

    def status(self):
        return Status("ready", version="1.2")

    def devices(self):
        return ("cpu", "north:0", "north:1", "west")

    def namespace(self):
        import array_api_compat.numpy as xp

        return xp

    def owns(self, x):
        return isinstance(x, Array)

    def asarray(self, x, device=None, copy=None):
        return np.asarray(x, copy=copy).view(Array)

    def to_numpy(self, x):
        return np.asarray(x)


backend = Fake()
