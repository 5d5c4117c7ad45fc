"""Distributions with plugins, made up in a folder on the import path: the registry meets them as installed ones."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from polyattn import registry, selection

# A library of arrays and its backend in one module. Its devices have made-up names.
LIBRARY = """
    import numpy as np
    from polyattn.backend import Backend, Status

    class Array(np.ndarray):
        pass

    class Fake(Backend):
        name = "{name}"
        array_modules = ("{name}",)
        def status(self): return Status("ready", version="1.2")
        def devices(self): return ("cpu", "north")
        def namespace(self):
            import array_api_compat.numpy as xp
            return xp
        def owns(self, x): return isinstance(x, Array)
        def asarray(self, x, device=None, copy=None): return np.asarray(x, copy=copy).view(Array)
        def to_numpy(self, x): return np.asarray(x)

    backend = Fake()
"""


# A backend without a library.
BACKEND = """
    from polyattn.backend import Backend, Status

    class Fake(Backend):
        name = {called!r}
        array_modules = ()
        def status(self): {status}
        def devices(self): {devices}

    backend = Fake()
"""


class Site:
    """A folder of distributions, each with one module and entry points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, source: str | None = LIBRARY, *, distribution: str = "", value: str = "") -> None:
        """Add a distribution with a plugin of that name; without source its module is missing."""
        module = name.replace("-", "_")
        distribution = distribution or f"{name}-plugin"
        if source is not None:
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source).replace("{name}", module))
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        entries = f"[polyattn.backends]\n{name} = {value or f'{module}:backend'}\n"
        (info / "entry_points.txt").write_text(entries)

    def add_backend(
        self, name: str, *, called: str = "", status: str = "return Status('ready')", devices: str = "return ('cpu',)",
        before: str = "", after: str = "", distribution: str = "",
    ) -> None:  # fmt: skip
        """Add a distribution with a backend that has no library; its methods and further lines may be given."""
        body = textwrap.dedent(BACKEND).format(called=called or name, status=status, devices=devices)
        self.add(name, "\n".join((before, body, after)), distribution=distribution)

    def run(self, code: str, **environment: str) -> str:
        """Run code in a fresh interpreter that has these distributions, and return what it prints."""
        return self._run("-c", textwrap.dedent(code), **environment)

    def program(self, name: str, *arguments: str) -> str:
        """Run ``tests/programs/NAME.py`` likewise."""
        return self._run(str(Path(__file__).parents[1] / "programs" / f"{name}.py"), *arguments)

    def _run(self, *command: str, **environment: str) -> str:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("POLYATTN_")}
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *command],
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of distributions on the import path of this process too; ``registry.refresh()`` shows them."""
    for variable in (selection.BACKEND_VARIABLE, selection.DEVICE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    monkeypatch.undo()
    registry.refresh()
