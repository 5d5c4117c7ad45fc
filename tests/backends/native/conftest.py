"""Fixtures of the tests of the native kernel of attention."""

from typing import Any

import pytest

from polyattn_native import _kernel


@pytest.fixture
def generic() -> None:
    """The generic kernel may compute what the native one leaves to it."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Fail where the native kernel leaves a problem to the generic one, unless the test asks for both.

    The module's ``DIRECTION`` is the method that may not be called, ``forward`` or ``backward``.
    """
    direction = request.module.DIRECTION
    if "generic" not in request.fixturenames:

        def refuse(*arguments: Any) -> None:
            pytest.fail(f"the generic kernel computed the {direction}")

        monkeypatch.setattr(_kernel.TILED, direction, refuse)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of threads, however few processors and however small the problem."""
    monkeypatch.setattr(_kernel, "threads_of", lambda problem: request.param)
    return int(request.param)
