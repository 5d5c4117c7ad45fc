"""``polyattn new-backend``: what it writes works as it is, and it writes all of it or nothing."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from polyattn.cli import run
from polyattn.cli._new_backend import render

ROOT = Path(__file__).resolve().parents[2]
# The contract, conversion and selection, and of the mathematics a part: the rest is the same code on the same arrays.
PART = "contract or conversion or features or selection or layers and dtype or attention and everything"
FILES = ["README.md", "pyproject.toml", "src/polyattn_my_lib/__init__.py", "tests/test_kit.py"]


@pytest.fixture
def new(tmp_path, monkeypatch, capsys):
    """Run ``polyattn new-backend ARGUMENTS`` in an empty folder; return its code and what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        code = run(["new-backend", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def strange_arrays(folder):
    """Copy array-api-strict under another name, so that no plugin knows its arrays."""
    spec = importlib.util.find_spec("array_api_strict")
    if spec is None:
        pytest.skip("the library of these arrays is made from array-api-strict, which is not installed")
    for source in Path(spec.origin).parent.glob("*.py"):
        (folder / "strange_arrays").mkdir(exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("array_api_strict", "strange_arrays")
        (folder / "strange_arrays" / source.name).write_text(text, encoding="utf-8")


def installed(distribution, folder):
    """Do what an editable install does, for processes whose import path has both folders; return their environment."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = project["entry-points"]["polyattn.backends"]
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines]))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(distribution / "src"), str(folder)])}


def test_the_skeleton_passes_the_kit_at_once(new, tmp_path, monkeypatch):
    """Over a library that has the standard and nothing else."""
    strange_arrays(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = new("My-Lib", "--namespace", "strange_arrays")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "next: pip install -e polyattn-my-lib && polyattn check My-Lib"
    assert "note" not in out
    environment = installed(tmp_path / "polyattn-my-lib", tmp_path)
    command = [sys.executable, "-m", "polyattn", "check", "my_lib", "--json", "--", "-k", PART]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == "My-Lib"
    assert report["passed"] > 100
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "polyattn-my-lib/tests",
        "-k",
        "selected",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_library_that_is_not_here(new, tmp_path):
    code, out, _ = new("my_lib", "--namespace", "no_such_arrays.standard", "--output", "deep/below")
    assert code == 0
    assert "note: no_such_arrays.standard is no namespace here (No module named 'no_such_arrays')" in out
    assert files(tmp_path / "deep" / "below") == FILES
    plugin = (tmp_path / "deep" / "below" / FILES[2]).read_text(encoding="utf-8")
    assert 'array_modules = ("no_such_arrays.standard", "no_such_arrays")' in plugin
    assert "import no_such_arrays.standard as xp" in plugin
    assert 'dependencies = ["polyattn", "no-such-arrays"]' in (tmp_path / "deep/below/pyproject.toml").read_text()


def test_without_a_namespace_the_name_is_the_module(new):
    code, out, _ = new("no-such-arrays")
    assert code == 0
    assert "no_such_arrays is no namespace here" in out
    assert (
        "import no_such_arrays as xp"
        in Path("polyattn-no-such-arrays/src/polyattn_no_such_arrays/__init__.py").read_text()
    )


def test_arrays_that_another_backend_owns(new):
    code, out, _ = new("mine", "--namespace", "array_api_compat.numpy")
    assert code == 0
    assert "note: the backend 'numpy' owns the arrays of array_api_compat.numpy" in out
    plugin = Path("polyattn-mine/src/polyattn_mine/__init__.py").read_text(encoding="utf-8")
    assert 'array_modules = ("numpy",)' in plugin
    assert "import array_api_compat.numpy as xp" in plugin


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Missing argument 'NAME'"),
        (("3d",), "NAME: expected letters, digits, - and _, the first a letter and the last no sign, got '3d'"),
        (("my lib",), "got 'my lib'"),
        (("../up",), "got '../up'"),
        (("my-",), "got 'my-'"),
        (("ärray",), "got 'ärray'"),
        (("NumPy",), "there is a backend called 'NumPy' already"),
        (("array_api-strict",), "there is a backend called 'array_api-strict' already"),
        (("lib", "--namespace", "a b"), "--namespace: expected a module like mylib or mylib.numpy, got 'a b'"),
        (("lib", "--namespace", "a.class"), "got 'a.class'"),
        (("lib", "--namespace", ""), "got ''"),
        (("class",), "--namespace: expected a module like mylib or mylib.numpy, got 'class'"),
        (("lib", "--output", "."), "--output: . exists already; name another folder"),
    ],
)
def test_bad_input_writes_nothing(new, tmp_path, arguments, told):
    code, out, err = new(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("polyattn: error: ")
    assert told in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(new, tmp_path):
    (tmp_path / "polyattn-lib").mkdir()
    (tmp_path / "polyattn-lib" / "mine").write_text("mine")
    code, _, err = new("lib")
    assert code == 2
    assert "--output: polyattn-lib exists already" in err
    assert files(tmp_path) == ["polyattn-lib/mine"]


def test_nothing_is_half_written(new, tmp_path, monkeypatch):
    """A disk that is full at the third file."""
    written = []
    whole = Path.write_text

    def write_text(path, *arguments, **options):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return whole(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    code, out, err = new("lib")
    assert (code, out) == (1, "")
    told = "polyattn-lib: cannot be written: No space left on device; name another --output, or make room"
    assert err == f"polyattn: error: {told}\n"
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_plain_python():
    for path, text in render("a-b", "no_such_arrays").items():
        assert "$" not in text, path
        assert text.endswith("\n")
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 120
    tomllib.loads(render("a-b", "no_such_arrays")["pyproject.toml"])


def members(source):
    (backend,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    assigned = {target.id for node in backend.body if isinstance(node, ast.Assign) for target in node.targets}
    annotated = {node.target.id for node in backend.body if isinstance(node, ast.AnnAssign)}
    return assigned | annotated | {node.name for node in backend.body if isinstance(node, ast.FunctionDef)}


def test_the_example_is_the_skeleton_and_what_its_library_needs():
    """``examples/plugin`` began as ``polyattn new-backend mlx --namespace mlx.core``."""
    skeleton, example = render("mlx", "mlx.core"), ROOT / "examples" / "plugin"
    assert set(skeleton) <= set(files(example))
    assert (example / "tests/test_kit.py").read_text(encoding="utf-8") == skeleton["tests/test_kit.py"]
    ours, theirs = (tomllib.loads(text) for text in (
        skeleton["pyproject.toml"], (example / "pyproject.toml").read_text(encoding="utf-8"),
    ))  # fmt: skip
    for part in ("name", "version", "readme", "requires-python", "entry-points", "optional-dependencies"):
        assert theirs["project"][part] == ours["project"][part]
    assert (theirs["build-system"], theirs["tool"]) == (ours["build-system"], ours["tool"])
    plugin = "src/polyattn_mlx/__init__.py"
    # MLX raises no warnings, and an array that DLPack shows is its own: there the contract's own words will do.
    left_out = members(skeleton[plugin]) - members((example / plugin).read_text(encoding="utf-8"))
    assert left_out == {"scope", "shares"}


def imports(source, *, everywhere):
    tree = ast.parse(source)
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {*named, *(node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)}


def test_plugins_import_the_contract_alone_and_their_library_late():
    """What a plugin must keep to: of polyattn the one module, and the array library only once it is asked for."""
    example = ROOT / "examples" / "plugin" / "src" / "polyattn_mlx"
    (skeleton,) = (text for path, text in render("lib", "some_arrays").items() if path.endswith("__init__.py"))
    first = (example / "__init__.py").read_text(encoding="utf-8")
    for source in (skeleton, *(path.read_text(encoding="utf-8") for path in example.glob("*.py"))):
        assert {name for name in imports(source, everywhere=True) if "polyattn" in name} <= {"polyattn.backend"}
    for source, library in ((skeleton, "some_arrays"), (first, "mlx.core")):
        assert library in imports(source, everywhere=True)
        known = {"__future__", "collections.abc", "contextlib", "typing", "numpy", "polyattn.backend"}
        assert imports(source, everywhere=False) <= known
