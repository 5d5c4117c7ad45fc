"""Functions are found by name or file, and are checked in a process of their own, which may crash."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polyattn as pa
from polyattn.testing.functions import ADAPTERS, check_function, load_function
from polyattn.testing.functions import adapters as folder

CRASHING = """
import os, time
import numpy as np
import polyattn

def attention(q, k, v, *, causal=False, scale=None):
    if scale is not None:
        print("about to fail", flush=True)
        os.abort()
    if causal and q.shape[-2] < k.shape[-2]:
        time.sleep(60)
    if 0 in q.shape:
        raise ValueError("empty")
    return polyattn.attention(q, k, v, causal=causal)
"""


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    path = tmp_path / "crashing.py"
    path.write_text(CRASHING, encoding="utf-8")
    return str(path)


def test_crashes_and_hangs_are_results(adapter: str) -> None:
    shown: list[Any] = []
    report = check_function(
        adapter,
        only=["forward.scale", "causal", "behavior.no_queries", "forward.plain"],
        limit=10,
        progress=shown.append,
    )
    rows = {row.check: row for row in report.rows}
    assert rows["forward.plain"].outcome == rows["causal.square"].outcome == "right"
    assert rows["forward.scale"].outcome == "crashes"
    assert "SIGABRT" in rows["forward.scale"].detail
    assert rows["causal.more_keys"][1:] == ("crashes", "no answer in 10 s")
    assert rows["behavior.no_queries"][1:] == ("refuses", "ValueError: empty")
    assert (shown[-1].done, shown[-1].total) == (len(rows), len(rows))
    assert json.loads(json.dumps(report.to_dict()))["crashes"] == report.counts["crashes"] == 2


def test_every_adapter_has_a_file() -> None:
    here = {path.stem.replace("_", "-") for path in Path(folder.__file__).parent.glob("[!_]*.py")}
    assert here == set(ADAPTERS)


def test_a_dotted_name_without_an_adapter() -> None:
    function = load_function("polyattn.attention")
    assert function.offers == {
        "mask", "bias", "causal", "scale", "dropout", "softcap", "sinks", "window", "key_lengths"
    }  # fmt: skip
    assert function.version == pa.__version__


BAD = {
    "nothing": "expected an adapter (torch-sdpa",
    "polyattn.no_such": "expected a function, got 'polyattn.no_such', which polyattn does not have",
    "missing.py": "'missing.py', which does not exist",
    "numpy.add.reduce_nothing": "cannot be imported here",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_names(name: str) -> None:
    with pytest.raises(pa.errors.PolyattnError, match=r"^function: ") as raised:
        load_function(name)
    assert BAD[name] in str(raised.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "to define attention"),
        ("def attention(q, k, v, *, maske=None): ...", "'maske'; expected some of mask, bias"),
        ("LAYOUT = 'hbnd'\ndef attention(q, k, v): ...", "expected one of bhnd, bnhd, got 'hbnd'"),
        ("ARRAYS = 'numbers'\ndef attention(q, k, v): ...", "numbers"),
    ],
)
def test_bad_adapters(source: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(pa.errors.PolyattnError) as raised:
        check_function(str(path), only=["forward.plain"])
    assert said in str(raised.value)


def test_no_such_check(adapter: str) -> None:
    with pytest.raises(pa.ArgumentError, match="groups: forward, gradients, masks"):
        check_function(adapter, only=["nonsense"])


def test_the_pytest_plugin(adapter: str, tmp_path: Path) -> None:
    options = ("-p", "polyattn.testing.functions.plugin", f"--polyattn-function={adapter}", "-p", "no:cacheprovider")
    what = ("--pyargs", "polyattn.testing.functions", "-q", "-k", "forward.plain or masks.polarity or forward.scale")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *what], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "1 failed, 1 passed, 1 skipped" in done.stdout
    assert "crashes: SIGABRT" in done.stdout
