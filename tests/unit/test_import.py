"""``import polyattn`` imports no array library; every public name is there when it is used."""

from __future__ import annotations

import pytest

import polyattn as pa


def test_the_package_imports_no_library(program):
    """What is loaded with the package is the standard library's; NumPy follows with the first function."""
    program("imported_lazily")


def test_every_public_name_is_found():
    """``__all__`` is what ``dir`` shows and what attribute access finds."""
    for name in pa.__all__:
        assert getattr(pa, name) is not None
        assert name in dir(pa)


@pytest.mark.parametrize("name", ["functional", "layers", "kv_cache", "errors", "registry", "checkpoint"])
def test_modules_are_attributes(name: str):
    """A module of the package needs no import of its own."""
    assert getattr(pa, name).__name__ == f"polyattn.{name}"


@pytest.mark.parametrize("name", ["atention", "_nothing", "nothing"])
def test_unknown_names(name: str):
    """They raise AttributeError or ImportError, as in any module."""
    with pytest.raises(AttributeError, match=rf"module 'polyattn' has no attribute '{name}'"):
        getattr(pa, name)
