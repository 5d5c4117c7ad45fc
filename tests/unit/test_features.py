"""The table of features: how a feature is found, and that the kit checks what a plugin declares."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from polyattn import registry
from polyattn.backend import FEATURES, DTypeError, feature_of, features_of
from polyattn.testing.conformance import test_features as kit
from polyattn.testing.features import lacking
from polyattn.testing.target import open_namespace

NUMPY: Any = type(registry.ready("numpy"))


class Modest(NUMPY):
    """A backend that writes in place but declares that it cannot."""

    lacks: ClassVar[Mapping[str, str]] = {"in_place": "it would not dare", "bfloat16": "too short"}

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            raise DTypeError("it has none")
        return super().dtype(name)


class Boastful(NUMPY):
    """A backend with hooks that do nothing."""

    def jit(self, function: Any) -> Any:
        return function

    def update_slice(self, x: Any, value: Any, start: Any, axis: Any) -> Any:
        return super().update_slice(x.copy(), value, start, axis)


def test_what_is_there_may_not_be_declared_lacking() -> None:
    assert feature_of(Modest(), "in_place") == (False, "it would not dare")
    with pytest.raises(AssertionError, match="has in_place, and declares in lacks: it would not dare"):
        kit.test_what_is_said_is_so(Modest(), "in_place")
    kit.test_what_is_said_is_so(Modest(), "bfloat16")


@pytest.mark.parametrize("name", ["jit", "in_place"])
def test_what_is_lacking_must_be_declared(name: str) -> None:
    lacks = {other: reason for other, reason in NUMPY.lacks.items() if other != name}
    with pytest.raises(AssertionError, match=f"lacks {name} without declaring it"):
        kit.test_what_is_said_is_so(type("Boastful", (Boastful,), {"lacks": lacks})(), name)


def test_an_unknown_feature_is_told() -> None:
    with pytest.raises(AssertionError):
        kit.test_what_is_lacking_has_a_name_and_a_reason(type("Odd", (NUMPY,), {"lacks": {"flying": "heavy"}})())


def test_without_a_declaration_hooks_and_library_are_asked() -> None:
    backend = type("Silent", (NUMPY,), {"lacks": {}})()
    assert feature_of(backend, "autograd") == (False, "its plugin does not override Backend.differentiable")
    assert feature_of(backend, "in_place") == (True, "")
    assert feature_of(backend, "float16") == (True, "")
    assert feature_of(backend, "float16", ready=False).present is None
    assert feature_of(backend, "in_place", ready=False).present is True  # the plugin is there to be asked


def test_what_goes_wrong_when_a_library_is_asked_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Modest()
    monkeypatch.setattr(Modest, "state", lambda self, x: 1 / 0)
    found = features_of(backend)
    assert found.keys() == FEATURES.keys()
    assert found["values"] == (None, "the test for it raised ZeroDivisionError: division by zero")
    assert found["float16"].present


def test_a_namespace_without_a_plugin_is_asked_too() -> None:
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed: no other namespace")
    target = open_namespace("array_api_strict")
    assert lacking(target, "float64", "values") is None
    assert lacking(target, "float64", "bfloat16") == (
        "array_api_strict lacks bfloat16: array_api_strict has no dtype 'bfloat16'"
    )
