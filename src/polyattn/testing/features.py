"""Skipping tests by the features that a backend lacks. The table is :data:`polyattn.backend.FEATURES`."""

from __future__ import annotations

import pytest

from .._generic import GenericBackend
from ..backend import feature_of
from .target import Target

__all__ = ["lacking", "need"]


def lacking(target: Target, *names: str) -> str | None:
    """Return which of these features the library under test lacks, and why; None if it has them all."""
    backend = GenericBackend(target.xp) if target.contract is None else target.contract
    for name in names:
        found = feature_of(backend, name)
        if not found.present:
            return f"{target.name} lacks {name}: {found.reason}"
    return None


def need(target: Target, *names: str) -> None:
    """Skip the test if the library under test lacks one of these features."""
    reason = lacking(target, *names)
    if reason is not None:
        pytest.skip(reason)
