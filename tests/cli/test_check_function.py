"""``polyattn check --function``: the table, JSON, exit codes and bad arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import numpy as np

def attention(q, k, v, *, causal=False):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True) @ v
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


def test_the_table(command: Any, mine: str) -> None:
    code, out, err = command("check", "--function", mine, "--only", "forward", "--only", "nan_in_value_causal")
    assert (code, err) == (1, "")
    assert "forward.scale" in out
    assert "no argument scale" in out
    assert "excluded.nan_in_value_causal │ wrong" in out
    assert out.splitlines()[-1] == f"one check again: polyattn check --function {mine} --only forward.grouped_heads"


def test_json(command: Any, mine: str) -> None:
    code, out, _ = command("check", "--function", mine, "--only", "causal.square", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["function"], report["right"], report["wrong"]) == (mine, 1, 0)
    assert report["rows"] == [{"check": "causal.square", "outcome": "right", "detail": report["rows"][0]["detail"]}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument NAME: a backend; or with --function, a function"),
        (("--function", "x", "--namespace"), "--function goes with --only"),
        (("--function", "x", "--", "-k", "y"), "--function goes with --only"),
        (("numpy", "--only", "x"), "--only goes with --function"),
    ],
)
def test_bad_arguments(command: Any, arguments: tuple[str, ...], said: str) -> None:
    code, _, err = command("check", *arguments)
    assert code == 2
    assert said in err
