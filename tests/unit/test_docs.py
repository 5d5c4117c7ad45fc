"""The Python in the pages of docs/ runs, page by page; their links between each other lead somewhere."""

import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NEEDS = ("torch", "jax", "dask", "matplotlib")


def python_of(page: Path) -> str:
    """Return a page's programs as one: later ones go on from earlier ones."""
    blocks = re.findall(r"^```python *(notest)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return "\n".join(code for skipped, code in blocks if not skipped)


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.stem)
def test_the_python_runs(page: Path, tmp_path: Path) -> None:
    code = python_of(page)
    needed = [name for name in NEEDS if name in code or (name == "matplotlib" and "import plot" in code)]
    if missing := [name for name in needed if util.find_spec(name) is None]:
        pytest.skip(f"this page is about {', '.join(missing)}, which is not installed")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("POLYATTN_")}
    command = [sys.executable, "-W", "error", "-c", code]
    environment = {**inherited, "MPLBACKEND": "agg", "JAX_ENABLE_X64": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_table_of_features_is_what_the_backends_say() -> None:
    libraries = ("torch", "jax", "array_api_strict", "dask", "ml_dtypes")
    if missing := [name for name in libraries if util.find_spec(name) is None]:
        pytest.skip(f"the table is about {', '.join(missing)} too, which is not installed")
    code = "import features as f; assert f.parts(f.PAGE.read_text())[1] == f.written(), 'run python docs/features.py'"
    environment = {**os.environ, "PYTHONPATH": str(DOCS), "JAX_ENABLE_X64": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)#:]+)[^)]*\)", page.read_text(encoding="utf-8")):
        drawn = target.startswith("_pictures/")  # by docs/pictures.py, when the pages are built
        assert drawn or (page.parent / target).is_file(), target
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`(?:functional/|optim/|layers/|kernels/)_?\w+\.py`", text):
        assert (DOCS.parent / "src" / "polyattn" / name.strip("`")).is_file(), name
