"""CuPy on a machine without a GPU imports, and fails at its first array: it is reported so, and disturbs nobody."""

import textwrap

import pytest

# As CuPy without a driver or a device behaves: importing works, counting devices raises or gives none.
CUPY = """
    import types

    __version__ = "13.6.0"

    class ndarray:
        pass

    class CUDARuntimeError(RuntimeError):
        pass

    def getDeviceCount():
        {count}

    runtime = types.SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=getDeviceCount)
    cuda = types.SimpleNamespace(runtime=runtime)
"""
STATES = {
    "no driver": (
        CUPY.format(count="raise CUDARuntimeError('cudaErrorInsufficientDriver: CUDA driver version is insufficient')"),
        "no CUDA device (cudaErrorInsufficientDriver: CUDA driver version is insufficient)",
    ),
    "no device": (CUPY.format(count="return 0"), "no CUDA device"),
    "no library": (
        "raise ImportError('libcuda.so.1: cannot open shared object file')",
        "import cupy failed: libcuda.so.1: cannot open shared object file",
    ),
    "odd": (CUPY.format(count="raise OSError('driver asleep')"), "its status() raised OSError: driver asleep"),
}


@pytest.mark.parametrize("state", STATES)
def test_cupy_that_cannot_be_used(site, state):
    source, reason = STATES[state]
    (site.folder / "cupy.py").write_text(textwrap.dedent(source))
    code = f"""
        import numpy as np, polyattn as pa
        for attempt in (
            lambda: pa.set_backend("cupy"),
            lambda: pa.attention(*[np.ones((2, 3))] * 3, backend="cupy"),
            lambda: pa.to_backend(np.ones(2), "cupy", device="cuda:0"),
            lambda: pa.Projection(2, 2, backend="cupy"),
            lambda: pa.Projection(2, 2).to("cupy"),
        ):
            try: attempt()
            except pa.BackendUnavailableError as error: assert "is unavailable: " + {reason!r} in str(error), error
            else: raise AssertionError
        assert pa.get_backend() is None
        with pa.use_backend("numpy"):
            print(pa.functional.softmax(np.zeros(2)))
    """
    assert site.run(code) == "[0.5 0.5]"


def test_the_others_are_listed_and_usable(site):
    source, reason = STATES["no driver"]
    (site.folder / "cupy.py").write_text(textwrap.dedent(source))
    code = f"""
        import numpy as np, polyattn as pa
        infos = {{info.name: info for info in pa.list_backends()}}
        cupy = infos.pop("cupy")
        assert (cupy.state, cupy.version, cupy.reason, cupy.devices) == ("unavailable", "13.6.0", {reason!r}, ()), cupy
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        for info in infos.values():
            if info.state == "ready":
                with pa.use_backend(info.name):
                    assert np.allclose(pa.functional.softmax(x).sum(axis=-1), 1)
        class Unknown: dtype = shape = None
        try: pa.to_backend(Unknown(), "numpy")  # every plugin is asked
        except pa.BackendMismatchError: print("done")
    """
    assert site.run(code) == "done"


def test_the_variable_that_names_it(site):
    (site.folder / "cupy.py").write_text(textwrap.dedent(STATES["no device"][0]))
    code = """
        import numpy as np, polyattn as pa
        try: pa.functional.softmax(np.ones(3))
        except pa.BackendUnavailableError as error: print(error)
    """
    said = site.run(code, POLYATTN_BACKEND="cupy")
    assert said.startswith("POLYATTN_BACKEND=cupy: backend 'cupy' is unavailable: no CUDA device")
