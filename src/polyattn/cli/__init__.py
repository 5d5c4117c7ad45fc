"""The command line, one file a command: ``train``, ``backends``, ``check``, ``new-backend``, ``bench``, ``explain``.

Exit codes: 0, done; 1, the work failed; 2, it was not understood (an unknown
backend, a bad option); 130, interrupted. An error is one line on standard error.
Nothing here imports a framework before a command needs it.
"""

from ._app import app, run
from ._backends import backends
from ._bench import bench
from ._check import check
from ._explain import explain
from ._new_backend import new_backend
from ._train import train

__all__ = ["app", "run"]

for command in (train, backends, check, new_backend, bench, explain):  # in the order of the help
    app.command()(command)
