"""The pages name what the code has: mathematics.md the functions of its formulas, plugins.md the whole contract."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from polyattn import functional
from polyattn.backend import ArrayState, Backend

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = re.findall(r"`(polyattn(?:\.\w+)+)`", (DOCS / "mathematics.md").read_text(encoding="utf-8"))
CONTRACT = {*vars(Backend), *Backend.__annotations__, *ArrayState._fields}
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


@pytest.mark.parametrize("member", sorted(name for name in CONTRACT if not name.startswith("_")))
def test_the_guide_describes_every_member_of_the_contract(member: str) -> None:
    page = (DOCS / "plugins.md").read_text(encoding="utf-8")
    contract = page.split("## The contract\n")[1].split("\n## ")[0]
    described = {name for code in re.findall(r"`([^`]+)`", contract) for name in re.findall(r"\w+", code)}
    assert member in described
