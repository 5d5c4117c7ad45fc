"""Plugins that fail, in every way: each is reported with plugin, distribution and cause, and none disturbs another."""

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry

X = np.arange(6.0).reshape(2, 3)


def row(name):
    return next(info for info in pa.list_backends() if info.name == name)


BROKEN = {
    "missing-module": (None, "No module named 'missing_module'"),
    "missing-object": ("other = 1", "AttributeError"),
    "missing-import": ("import there_is_no_such_library", "No module named 'there_is_no_such_library'"),
    "raises": ("raise RuntimeError('no licence on this machine')", "RuntimeError: no licence on this machine"),
    "exits": ("import sys; sys.exit('needs a display')", "SystemExit: needs a display"),
    "no-syntax": ("def :", "SyntaxError"),
    "not-a-backend": ("backend = object()", "is not an instance of polyattn.backend.Backend but <object"),
    "a-class": ({"after": "backend = Fake"}, "is not an instance of polyattn.backend.Backend"),
    "of-tomorrow": ({"after": "Fake.api_version = 99"}, "version 99 of the backend contract"),
    "of-version-1": (
        {"after": "Fake.viewable = lambda self, x: True\nFake.on_host = lambda self, x: True"},
        "version 1 of the backend contract, this polyattn has version 2; install matching versions of acme-arrays and "
        "polyattn, or replace viewable by shares(x); on_host by state(x).readable",
    ),
    "misnamed": ({"called": "something-else"}, "its backend is 'something-else', that of its entry point 'misnamed'"),
    "nameless": ({"after": "del Fake.name"}, "AttributeError"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin(site, name):
    """Selecting it raises with plugin, distribution and cause; everything else works."""
    source, cause = BROKEN[name]
    if isinstance(source, dict):
        site.add_backend(name, **source, distribution="acme-arrays")
    else:
        site.add(name, source, distribution="acme-arrays")
    registry.refresh()
    for attempt in (
        lambda: registry.ready(name),
        lambda: pa.set_backend(name),
        lambda: pa.attention(X, X, X, backend=name),
        lambda: pa.Projection(2, 2, backend=name),
        lambda: pa.to_backend(X, name),
    ):
        with pytest.raises(pa.BackendUnavailableError) as caught:
            attempt()
        for part in (repr(name), f"{name.replace('-', '_')}:backend", "acme-arrays", cause):
            assert part in str(caught.value)
        assert caught.value.__cause__ is not None
    info = row(name)
    assert info.state == "broken"
    assert info.distribution == "acme-arrays"
    assert cause in info.reason
    assert row("numpy").state == "ready"
    assert type(pa.functional.softmax(X, axis=0)) is np.ndarray
    assert pa.get_backend() is None


def test_an_entry_point_that_is_no_reference(site):
    site.add("nonsense", None, value="not a reference!")
    registry.refresh()
    with pytest.raises(pa.BackendUnavailableError, match=r"not a reference! .* nonsense-plugin\) is broken"):
        registry.ready("nonsense")
    assert row("numpy").state == "ready"


def test_a_broken_plugin_owns_no_array(site):
    """An array that nobody knows asks every plugin, broken ones too, and gets its own error."""
    site.add("raises", "raise RuntimeError")
    registry.refresh()

    class Unknown:
        dtype = shape = None

    with pytest.raises(pa.BackendMismatchError, match="Unknown"):
        registry.owner(Unknown())


def test_arrays_of_a_broken_plugin_say_so(site):
    """Not that the array is of no known library: its plugin is there, and it is broken."""
    site.add("mylib")
    registry.refresh()
    import mylib

    mylib.backend.api_version = 3  # it was imported by the user, but polyattn has not loaded it yet
    with pytest.raises(pa.BackendUnavailableError, match="mylib-plugin"):
        pa.functional.softmax(X.view(mylib.Array))


def test_two_distributions_with_one_name(site):
    """Neither is taken silently; the message names both, and a spelling does not hide it."""
    site.add("twice", distribution="first-arrays")
    site.add("TWICE", distribution="second-arrays")
    site.add("fine")
    registry.refresh()
    with pytest.raises(pa.BackendUnavailableError, match="more than one distribution") as caught:
        registry.ready("twice")
    assert "first-arrays" in str(caught.value)
    assert "second-arrays" in str(caught.value)
    assert row("fine").state == "ready"


def test_one_distribution_seen_twice_is_one_plugin(site, tmp_path_factory, monkeypatch):
    """An editable install beside a built one shows the same distribution again."""
    site.add("mylib")
    copy = tmp_path_factory.mktemp("copy")
    for info in site.folder.glob("*.dist-info"):
        (copy / info.name).mkdir()
        for file in info.iterdir():
            (copy / info.name / file.name).write_text(file.read_text())
    monkeypatch.syspath_prepend(copy)
    registry.refresh()
    assert registry.ready("mylib").name == "mylib"


@pytest.mark.parametrize("text", ["[polyattn.backends]\nno equals sign\n", "\udcff\udcfe"], ids=["lines", "bytes"])
def test_a_damaged_distribution_hides_no_other(site, text, caplog):
    site.add("mylib")
    info = site.folder / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(text, errors="surrogateescape")
    registry.refresh()
    assert {"mylib", "numpy"} <= set(registry.names())
    assert "left out" in caplog.text


def test_a_distribution_without_metadata(site):
    site.add("mylib")
    next(site.folder.glob("*.dist-info/METADATA")).unlink()
    registry.refresh()
    assert registry.ready("mylib").name == "mylib"


NOT_READY = {
    "absent": ("return Status('not installed', reason='R', install='pip install absent-lib')", "not installed"),
    "unusable": ("return Status('unavailable', reason='R', install='pip install absent-lib')", "unavailable"),
    "raising": ("raise OSError('R, pip install absent-lib')", "unavailable"),
}


@pytest.mark.parametrize("name", NOT_READY)
def test_a_backend_that_is_not_ready(site, name):
    """It is listed with its reason; selecting it raises with the reason and the install command."""
    status, state = NOT_READY[name]
    site.add_backend(name, status=status, devices="raise AssertionError('asked for devices')")
    registry.refresh()
    info = row(name)
    assert (info.state, info.devices) == (state, ())
    assert "R" in info.reason
    with pytest.raises(pa.BackendUnavailableError, match=r"R.*pip install absent-lib"):
        pa.set_backend(name)
    assert pa.get_backend() is None
    assert registry.load(name).name == name  # the plugin itself is in order


def test_a_backend_that_becomes_ready_is_ready(site):
    """The refusal is not remembered: the user may install what was missing and go on."""
    site.add_backend("coming", status="return status", after="status = Status('not installed', reason='R')")
    registry.refresh()
    with pytest.raises(pa.BackendUnavailableError):
        registry.ready("coming")
    import coming

    coming.status = coming.Status("ready")
    assert registry.ready("coming") is coming.backend


def test_devices_that_raise(site):
    site.add_backend("odd", devices="raise OSError('driver gone')")
    registry.refresh()
    assert (row("odd").state, row("odd").reason) == ("unavailable", "its devices() raised OSError: driver gone")
