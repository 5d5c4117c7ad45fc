"""docs/mathematics.md names the functions that compute its formulas: each of them exists."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from polyattn import functional

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mathematics.md"
NAMES = re.findall(r"`(polyattn(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8"))
OPERATIONS = [
    module.name
    for module in pkgutil.iter_modules(functional.__path__)
    if {"forward", "backward"} <= set(vars(importlib.import_module(f"{functional.__name__}.{module.name}")))
]


@pytest.mark.parametrize("name", dict.fromkeys(NAMES))
def test_a_named_function_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:  # a method: what precedes it is a class
        module, _, kind = module.rpartition(".")
        found = getattr(getattr(importlib.import_module(module), kind), attribute)
    assert callable(found)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_named(operation: str) -> None:
    assert {f"polyattn.functional.{operation}.{name}" for name in ("forward", "backward")} <= set(NAMES)


def test_there_are_operations_and_names() -> None:
    assert len(OPERATIONS) > 10
    assert len(NAMES) > 2 * len(OPERATIONS)
