"""Every installed library with every other; JAX with 64 bits, so that float64 can be converted to it."""

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry

BACKENDS = pa.list_backends()
READY = [info.name for info in BACKENDS if info.state == "ready" and info.name != "dask"]  # tests/scale has Dask


def pytest_generate_tests(metafunc):
    """Repeat a test for each library in each of these roles."""
    for role in ("source", "target", "home", "place"):
        if role in metafunc.fixturenames:
            metafunc.parametrize(role, READY)
    if "info" in metafunc.fixturenames:
        metafunc.parametrize("info", BACKENDS, ids=lambda info: info.name)


@pytest.fixture(scope="package", autouse=True)
def _sixty_four_bits():
    if "jax" not in READY:
        yield
        return
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="session")
def native():
    """Return ``native(name, host)``: an array that the library creates, with its own memory."""

    def make(name, host):
        xp = registry.load(name).namespace()
        return xp.asarray(np.array(host)) if name != "torch" else __import__("torch").tensor(np.array(host))

    return make


@pytest.fixture(scope="session")
def host():
    """Return ``host(x)``: the values as a NumPy array, by the library's own conversion."""

    def read(x):
        if hasattr(x, "detach"):
            x = x.detach().cpu()
        if hasattr(x, "tolist"):
            return np.array(x.tolist()).reshape(tuple(x.shape))
        return np.array(np.from_dlpack(x))

    return read


@pytest.fixture(scope="session")
def write():
    """Return ``write(x, value)``: fill an array in place; False if its library does not allow it."""

    def fill(x, value):
        if type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
            return False
        if not getattr(getattr(x, "flags", None), "writeable", True):
            return False
        x[...] = value
        return True

    return fill
