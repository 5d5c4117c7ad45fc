"""A second backend for an environment that has NumPy alone."""

import sys

import pytest

import polyattn as pa
from polyattn import registry
from polyattn.selection import BACKEND_VARIABLE, DEVICE_VARIABLE

# NumPy's arrays under another type.
OTHER = """
import numpy as np
from polyattn.backend import Backend, Status
class Array(np.ndarray): pass
class Other(Backend):
    name, array_modules = "other-one", ("other_one",)
    def status(self): return Status("ready")
    def devices(self): return ("cpu", "north:0", "north:1")
    def namespace(self):
        import array_api_compat.numpy as xp
        return xp
    def owns(self, x): return isinstance(x, Array)
    def asarray(self, x, device=None, copy=None): return np.asarray(x, copy=copy).view(Array)
    def to_numpy(self, x): return np.asarray(x)
backend = Other()
"""


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Install the backend "other-one"; nothing is selected before or after."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.delenv(DEVICE_VARIABLE, raising=False)
    (tmp_path / "other_one.py").write_text(OTHER)
    info = tmp_path / "other_one-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-one\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[polyattn.backends]\nother-one = other_one:backend\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.refresh()
    yield
    pa.set_backend(None)
    monkeypatch.undo()
    assert pa.get_backend() is None, "a scope leaked"
    sys.modules.pop("other_one", None)
    registry.refresh()
