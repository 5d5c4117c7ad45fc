"""The layering rules of the design, read from the source, and what importing polyattn imports, from a fresh process."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "polyattn"
PLUGINS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists())
ENGINES = {"polyattn_dask": ["polyattn.distributed.dask"]}  # its library is an engine
NATIVE = "polyattn_native"  # no plugin: the kernels on the CPU that several backends share

# From the top; what stands on one line stands on one floor. Imports run down or stay within their own unit.
# FRONT is polyattn/__init__.py, and any name that is had from it.
FRONT = "__init__"
FLOORS = [
    ("__main__",),
    ("cli",),
    ("training", "testing", "bench"),
    ("plot",),
    (FRONT,),
    ("interop", "distributed"),
    ("layers", "optim"),
    ("kv_cache",),
    ("functional",),
    ("selection",),
    ("conversion",),
    ("account", "_resident"),
    ("checkpoint",),
    ("registry",),
    ("_plugin",),
    ("_generic",),
    ("backend",),
    ("kernels",),
    ("errors", "_scopes"),
    ("_version",),
]
HEIGHT = {unit: -floor for floor, units in enumerate(FLOORS) for unit in units}

FRAMEWORKS = [
    "torch",
    "jax",
    "cupy",
    "array_api_strict",
    "dask",
    "distributed",
    "onnx",
    "onnxruntime",
    "transformers",
    "matplotlib",
    "typer",
    "rich",
    "pytest",
    "hypothesis",
]


def imported_modules(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Yield each import in a file, those within functions too, as (line, absolute dotted name)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a package with the dotted name of the package that it lies in."""
    for path in sorted(folder.rglob("*.py")):
        yield path, ".".join((folder.name, *path.relative_to(folder).parent.parts))


def unit_of(name: str) -> str:
    """Return the part of polyattn that a dotted name belongs to: ``polyattn.layers._mha.X`` is of ``layers``."""
    part = name.split(".")[1:2]
    return part[0] if part and (part[0] in HEIGHT or is_module(part[0])) else FRONT


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def test_the_core_imports_nothing_from_backends() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, package in sources(PACKAGE)
        for line, name in imported_modules(path, package)
        if name.split(".")[0] in PLUGINS
    ]
    assert PLUGINS, "backends/ holds no package"
    assert not faults


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_backend_imports_only_the_contract_and_the_native_kernels(plugin: str) -> None:
    own = {plugin, NATIVE, "polyattn.backend", *ENGINES.get(plugin, ())}
    faults = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, package in sources(ROOT / "backends" / plugin)
        for line, name in imported_modules(path, package)
        if name.split(".")[0] in {"polyattn", *PLUGINS}
        and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in own)
    ]
    assert not faults


def test_every_part_stands_on_a_floor() -> None:
    parts = {unit_of(f"{package}.{path.stem}") for path, package in sources(PACKAGE)}
    assert parts <= set(HEIGHT), "give it a floor in FLOORS"
    assert "kernels" in parts


def test_imports_run_down_only() -> None:
    faults = []
    for path, package in sources(PACKAGE):
        own = unit_of(f"{package}.{path.stem}")
        for line, name in imported_modules(path, package):
            target = unit_of(name) if name.split(".")[0] == "polyattn" else own
            if target != own and HEIGHT.get(target, 1) >= HEIGHT.get(own, 0):
                faults.append(f"{path.relative_to(ROOT)}:{line} ({own}) imports {name}")
    assert not faults


def test_imports_that_break_the_rules_are_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "import polyattn.cli\ndef f():\n    from ..layers import X\n    from . import y\n", encoding="utf-8"
    )
    found = sorted(imported_modules(source, "polyattn.kernels"))
    assert found == [(1, "polyattn.cli"), (3, "polyattn.layers.X"), (4, "polyattn.kernels.y")]


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after running the code."""
    report = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_importing_polyattn_imports_no_framework_and_no_plugin() -> None:
    plugins = {entry.module for entry in metadata.entry_points(group="polyattn.backends")}
    before, after = (
        modules_after(""),
        modules_after("import polyattn\nfor name in polyattn.__all__: getattr(polyattn, name)"),
    )
    assert plugins, "polyattn is not installed with its entry points"
    assert "polyattn.functional" in after
    assert not (after - before) & {*FRAMEWORKS, *plugins, *PLUGINS}


def test_asking_for_the_numpy_backend_imports_no_framework() -> None:
    code = "import numpy, polyattn\nwith polyattn.use_backend('numpy'): polyattn.functional.softmax(numpy.ones(3))"
    before, after = modules_after(""), modules_after(code)
    assert "polyattn_numpy" in after
    assert not (after - before) & set(FRAMEWORKS)
