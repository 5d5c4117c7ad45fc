"""A backend without a library, of which ``Site.add_backend`` replaces what a test says."""

from polyattn.backend import Backend, Status


class Fake(Backend):
    name = ""
    array_modules = ()

    def status(self):
        return Status("ready")

    def devices(self):
        return ("cpu",)


backend = Fake()
