"""The suite runs on the backend that ``--polyattn-backend`` names (numpy by default), with the fixtures of the kit.

Which tests are in a backend's run is a matter of folders and fixtures: ``backends/NAME`` is in NAME's run alone,
``dispatch`` and ``xp`` in every run, and of the other folders what takes the backend under test; the rest of these is
in numpy's run, which has every library beside it.
``@pytest.mark.needs("autograd")`` leaves a test out where the library lacks a feature, and says why; which features
there are, and who lacks one, stands in ``polyattn.backend.FEATURES`` and in the plugins.
"""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from polyattn import registry, selection

pytest_plugins = ["polyattn.testing.plugin"]

# The same examples in every run; ``--hypothesis-profile=explore`` looks for new ones, and ``thorough`` for more.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, database=None, max_examples=100, **COMMON)
settings.register_profile("compiling", settings.get_profile("fixed"), max_examples=8)
settings.register_profile("explore", max_examples=1000, **COMMON)
settings.register_profile("thorough", settings.get_profile("explore"), max_examples=10_000)

HERE = Path(__file__).parent
NUMPY_ALONE = ("cli", "examples", "functions", "interop", "plugins", "unit")
PROGRAMS, SHARED = HERE / "programs", HERE / "shared"
LIBRARY, BACKEND = ((HERE / "stand_ins" / f"{name}.py").read_text() for name in ("library", "backend"))


def run_python(*arguments, folder="", timeout=240, **variables):
    """Run Python in a process of its own, with a folder and tests/shared on its import path; return what it prints.

    Of polyattn's and JAX's variables it has only those that are given.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("POLYATTN_", "JAX_"))}
    path = os.pathsep.join(filter(None, (str(folder), str(SHARED), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment, "PYTHONPATH": path, **variables}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def program():
    """Return what runs ``tests/programs/NAME.py`` in a process of its own, and returns what it prints."""
    return lambda name, *arguments, **variables: run_python(PROGRAMS / f"{name}.py", *arguments, **variables)


@pytest.fixture
def tiles(monkeypatch, contract):
    """Return ``tiles(n_q, n_k)``, which limits the queries and keys of the generic kernel's tiles."""
    # Not above: ``polyattn check``, which tests run in this folder, loads this file without tests/shared on the path.
    from small_tiles import in_tiles

    def limit(n_q, n_k):
        monkeypatch.setattr(type(contract), "kernels", in_tiles(contract, n_q, n_k))

    return limit


@pytest.fixture
def outlive():
    """Return ``outlive(function)``: which of the arrays that it returns live on, until the garbage collector runs."""

    def numbers(function):
        function()  # what is kept once for all, such as compiled programs
        gc.collect()
        gc.disable()
        try:
            alive = [weakref.ref(x) for x in function() if x is not None]
            return [i for i, x in enumerate(alive) if x() is not None]
        finally:
            gc.enable()

    return numbers


class Site:
    """A folder of distributions with plugins, each of one module and entry points, found as installed ones are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, source: str | None = LIBRARY, *, distribution: str = "", value: str = "") -> None:
        """Add a distribution with a plugin of that name; without source its module is missing."""
        module = name.replace("-", "_")
        distribution = distribution or f"{name}-plugin"
        if source is not None:
            (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        entries = f"[polyattn.backends]\n{name} = {value or f'{module}:backend'}\n"
        (info / "entry_points.txt").write_text(entries)

    def add_backend(
        self, name: str, *, called: str = "", before: str = "", after: str = "", distribution: str = "", **methods: str
    ) -> None:
        """Add a distribution with a backend that has no library; bodies of methods and further lines may be given."""
        changed = [f"def {key}(self, *given): {body}\nFake.{key} = {key}" for key, body in methods.items()]
        lines = (before, BACKEND, f"Fake.name = {called or name!r}", *changed, after)
        self.add(name, "\n".join(lines), distribution=distribution)

    def run(self, code: str) -> str:
        """Run a line of code in a fresh interpreter that has these distributions, and return what it prints."""
        return run_python("-c", code, folder=self.folder)

    def program(self, name: str, *arguments: str, **variables: str) -> str:
        """Run ``tests/programs/NAME.py`` likewise."""
        return run_python(PROGRAMS / f"{name}.py", *arguments, folder=self.folder, **variables)


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


def pytest_ignore_collect(collection_path, config):
    # These need packages or processes of their own: they run where they are named, as ``nox -s suites scale`` does.
    if collection_path in (HERE / "suites", HERE / "scale", HERE / "faults"):
        return True
    chosen = config.getoption("--polyattn-backend") or "numpy"
    # CuPy's tests need no device: NumPy stands in for it. Those of the native kernels use NumPy, and torch beside it.
    here = (chosen, "cupy", "native") if chosen == "numpy" else (chosen,)
    return True if collection_path.parent == HERE / "backends" and collection_path.name not in here else None


def pytest_collection_modifyitems(config, items):
    """Leave what does not take the backend under test to numpy's run."""
    if (config.getoption("--polyattn-backend") or "numpy") == "numpy":
        return
    ours = [item for item in items if item.path.is_relative_to(HERE) and "target" not in item.fixturenames]
    once = {item for item in ours if item.path.relative_to(HERE).parts[0] in NUMPY_ALONE}
    config.hook.pytest_deselected(items=[*once])
    items[:] = [item for item in items if item not in once]


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "needs(feature, ...): leave out where the backend lacks a feature")
    from polyattn.testing.features import lacking  # not before pytest has loaded the plugin, whose asserts it rewrites
    from polyattn.testing.plugin import TARGET

    if config.getoption("--hypothesis-profile", None) is None:
        # A library that compiles each operation for each shape takes seconds an example.
        settings.load_profile("compiling" if lacking(config.stash[TARGET], "any_shape") else "fixed")


def pytest_runtest_setup(item):
    from polyattn.testing.features import need
    from polyattn.testing.plugin import TARGET

    for mark in item.iter_markers("needs"):
        need(item.config.stash[TARGET], *mark.args)
