"""Plugins as they are found, asked about arrays, and loaded: once, when first used, and no other for it."""

import threading
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.backend import Backend, Status

X = np.arange(6.0).reshape(2, 3)


def row(name):
    return next(info for info in pa.list_backends() if info.name == name)


def test_a_plugin_installed_later_is_found_after_refresh(site):
    with pytest.raises(pa.UnknownBackendError):
        registry.ready("later")
    site.add("later")
    registry.refresh()
    with pa.use_backend("later"):
        y, cache = pa.functional.softmax_forward(X)
    assert cache.place.backend.name == "later"
    assert type(y) is np.ndarray
    np.testing.assert_allclose(y, pa.functional.softmax(X), 1e-15)
    info = row("later")
    assert (info.state, info.distribution, info.version) == ("ready", "later-plugin", "1.2")
    assert info.devices == ("cpu", "north:0", "north:1", "west")


def test_a_removed_plugin_is_gone_after_refresh(site):
    site.add("gone")
    registry.refresh()
    assert "gone" in registry.names()
    next(site.folder.glob("*.dist-info/entry_points.txt")).unlink()
    registry.refresh()
    with pytest.raises(pa.UnknownBackendError):
        registry.ready("gone")


def test_arrays_of_a_plugin_compute_there(site):
    site.add("mylib")
    registry.refresh()
    import mylib

    x = X.view(mylib.Array)
    with pa.transfers("forbid"):
        cache = pa.functional.softmax_forward(x)[1]
    assert cache.place == cache.home
    assert cache.place.backend is mylib.backend
    # A subclass of NumPy's array is NumPy's only where no plugin of its own package claims it.
    assert registry.owner(X).name == "numpy"


def test_a_device_of_a_plugin(site):
    site.add("mylib")
    registry.refresh()
    with pa.use_backend("mylib", device="WEST") as selection:
        assert selection.device == "west"
        assert str(pa.functional.relu_forward(X)[1].place) == "mylib on west"


def test_owns_that_raises_disturbs_nobody(site):
    site.add_backend("rude", owns="raise RuntimeError", after="Fake.array_modules = ('numpy',)")
    registry.refresh()
    registry.load("rude")

    class Mine(np.ndarray):
        pass

    assert registry.owner(X.view(Mine)).name == "numpy"


def test_numpy_stays_numpys(site):
    """A plugin that claims every array does not get NumPy's."""
    site.add_backend("rude", owns="return True", after="Fake.array_modules = ('numpy',)")
    registry.refresh()
    registry.load("rude")
    assert registry.owner(X).name == "numpy"


def test_a_plugin_is_loaded_once_by_sixteen_threads(site):
    """Slow to import, asked for by sixteen threads at once: imported once, and all get the same object."""
    before = "import builtins, time\nbuiltins.loads = getattr(builtins, 'loads', 0) + 1\ntime.sleep(0.3)\n"
    site.add_backend("slow", before=before)
    assert site.program("loaded_once") == "16 1 1"


def test_a_slow_plugin_holds_up_nobody_else(site):
    (site.folder / "gate.py").write_text("import threading\nstarted, opened = threading.Event(), threading.Event()")
    site.add_backend("slow", before="import gate\ngate.started.set()\ngate.opened.wait(30)\n")
    registry.refresh()
    import gate

    thread = threading.Thread(target=registry.load, args=("slow",))
    thread.start()
    try:
        assert gate.started.wait(30)
        with pa.use_backend("numpy"):
            np.testing.assert_allclose(pa.functional.softmax(X, axis=0).sum(axis=0), np.ones(3))
        assert thread.is_alive()
    finally:
        gate.opened.set()
        thread.join()


@pytest.mark.parametrize(
    "use",
    [
        "import polyattn",
        "import polyattn, numpy; polyattn.attention(*[numpy.ones((2, 4))] * 3)",
        "import polyattn, numpy; polyattn.functional.softmax(numpy.memmap('M', numpy.float64, 'w+', shape=(3,)))",
        "import polyattn, numpy\nclass Mine(numpy.ndarray): pass\npolyattn.functional.relu(numpy.ones(3).view(Mine))",
        "import polyattn\nwith polyattn.use_backend('numpy'): polyattn.Projection(2, 2)",
        "import polyattn\ntry: polyattn.functional.softmax([1.0])\nexcept polyattn.BackendMismatchError: pass",
        "import polyattn\ntry: polyattn.to_backend([1.0], 'numpy')\nexcept polyattn.BackendMismatchError: pass",
        "import polyattn.registry\npolyattn.registry.names()",
        "import polyattn\ntry: polyattn.set_backend('nunpy')\nexcept polyattn.UnknownBackendError: pass",
    ],
)
def test_what_loads_no_foreign_plugin(site, use):
    """Discovery, NumPy's arrays and subclasses, another selection, a list, a misspelt name."""
    site.add("aardvark", "print('aardvark was imported')")
    assert site.run(use.replace("'M'", repr(str(site.folder / "M")))) == ""


def test_an_array_of_a_related_package(site):
    """An array whose package bears another name than its plugin, as jaxlib's: others are not loaded for it."""
    site.add("aardvark", "print('aardvark was imported')")
    array = "class Array: dtype = shape = None\n"
    owns = "Fake.array_modules, Fake.owns = ('mylib_core',), lambda self, x: isinstance(x, Array)"
    site.add_backend("mylib", before=array, after=owns)
    (site.folder / "mylib.py").rename(site.folder / "mylib_core.py")
    (site.folder / "mylib.py").write_text("from mylib_core import Array, backend")
    assert site.run("import mylib, polyattn.registry as r; print(r.owner(mylib.Array()).name)") == "mylib"


class Part(Backend):
    """A backend whose namespace is a part of a package, as dask.array and mlx.core are."""

    array_modules = ("json.decoder", "json")


def test_the_version_of_a_part_of_a_package_is_the_package_s():
    import json

    assert not hasattr(json.decoder, "__version__")
    assert Part().status() == Status("ready", version=json.__version__)


def test_a_part_of_a_package_that_is_not_installed():
    class Missing(Part):
        array_modules = ("no_such_arrays.core", "no_such_arrays")

    assert Missing().status() == Status("not installed", reason="the package no_such_arrays is missing")


def test_a_part_that_its_package_lacks():
    class Lacking(Part):
        array_modules = ("json.no_such_part", "json")

    status = Lacking().status()
    assert status.state == "unavailable"
    assert "import json.no_such_part failed: No module named 'json.no_such_part'" in status.reason


def test_an_optimiser_takes_arrays_that_name_no_device(monkeypatch):
    """As MLX's arrays: the standard asks for the attribute, and one of two libraries leaves it out."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "stand_ins")
    import foreign_arrays

    monkeypatch.delattr(foreign_arrays.Array, "device")
    adamw = pa.optim.AdamW(lr=pa.optim.linear_warmup(0.1, warmup_steps=2))
    params, grads = {"weight": X, "scale": np.asarray(2.0)}, {"weight": X - 1.0, "scale": np.asarray(1.0)}
    found = []
    for make in (np.asarray, foreign_arrays.asarray):
        theirs = {name: make(x) for name, x in params.items()}
        clipped, _ = pa.optim.clip_by_global_norm({name: make(x) for name, x in grads.items()}, 1.0)
        new, state = adamw.update(clipped, adamw.init(theirs), theirs)
        found.append([np.from_dlpack(x) for x in (*new.values(), *state.values())])
    for ours, foreign in zip(*found, strict=True):
        np.testing.assert_array_equal(foreign, ours)
