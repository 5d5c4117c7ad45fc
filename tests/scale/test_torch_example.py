"""``examples/ring.py``: processes that share a sequence learn, and compute what one process does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason='torch shares the sequence: pip install "polyattn[torch]"')

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ring.py"


def test_it_learns_what_one_process_computes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--positions", "256", "--steps", "60"], capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((processes, first, last),) = re.findall(r"(\d) processes, .* loss (\S+) → (\S+)", done.stdout)
    assert processes == "2"
    assert float(last) < 0.7 * float(first)
    (error,) = re.findall(r"differs from that of one process by (\S+)", done.stdout)
    assert float(error) < 1e-5
