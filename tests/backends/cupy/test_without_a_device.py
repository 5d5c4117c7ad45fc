"""CuPy on a machine without a GPU imports, and fails at its first array: it is reported so, and disturbs nobody."""

from pathlib import Path

import pytest

NO_DRIVER = Path(__file__).with_name("no_driver.py").read_text()
STATES = {
    "no driver": (
        NO_DRIVER,
        "no CUDA device (cudaErrorInsufficientDriver: CUDA driver version is insufficient)",
    ),
    "no device": (NO_DRIVER + "runtime.getDeviceCount = lambda: 0", "no CUDA device"),
    "no library": (
        "raise ImportError('libcuda.so.1: cannot open shared object file')",
        "import cupy failed: libcuda.so.1: cannot open shared object file",
    ),
    "odd": (
        NO_DRIVER + "def raises(): raise OSError('driver asleep')\nruntime.getDeviceCount = raises",
        "its status() raised OSError: driver asleep",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_cupy_that_cannot_be_used(site, state):
    source, reason = STATES[state]
    (site.folder / "cupy.py").write_text(source)
    assert site.program("cupy_unusable", reason) == "[0.5 0.5]"


def test_the_others_are_listed_and_usable(site):
    source, reason = STATES["no driver"]
    (site.folder / "cupy.py").write_text(source)
    assert site.program("cupy_beside_others", reason) == "done"


def test_the_variable_that_names_it(site):
    (site.folder / "cupy.py").write_text(STATES["no device"][0])
    said = site.program("variable_refused", POLYATTN_BACKEND="cupy")
    assert said.startswith("POLYATTN_BACKEND=cupy: backend 'cupy' is unavailable: no CUDA device")
