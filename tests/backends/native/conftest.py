"""Fixtures of the tests of the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import polyattn_numpy
from polyattn_native import _kernel, operation


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


class Spy:
    """Whether the native library computed each call since the last look."""

    def __init__(self) -> None:
        self.answers: list[bool] = []
        self.off = False

    def __call__(self, name: str, *arrays: Any, **options: Any) -> Any:
        results = None if self.off else operation(name, *arrays, **options)
        self.answers.append(results is not None)
        return results

    def native(self) -> bool:
        """Return whether all calls were native, or none; a mixture fails."""
        answers, self.answers = set(self.answers), []
        assert len(answers) == 1
        return answers.pop()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    found = Spy()
    monkeypatch.setattr(polyattn_numpy.NumpyBackend, "operation", found)
    return found


@pytest.fixture
def formula(spy: Spy) -> Callable[[Callable[[], Any]], Any]:
    """Return ``formula(function)``, which calls a function without the native library."""

    def call(function: Callable[[], Any]) -> Any:
        spy.off = True
        try:
            return function()
        finally:
            spy.off, spy.answers = False, []

    return call
