"""A second backend for an environment that has NumPy alone."""

import pytest

import polyattn as pa
from polyattn import registry


@pytest.fixture
def other(site, monkeypatch):
    """Install the backend "other-one"; nothing is selected before or after."""
    site.add("other-one")
    registry.refresh()
    yield
    pa.set_backend(None)
    monkeypatch.undo()
    assert pa.get_backend() is None, "a scope leaked"
