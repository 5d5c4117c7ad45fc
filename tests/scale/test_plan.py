"""The plan of attention over many devices, in Python and by ``polyattn explain --devices``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn as pa
from polyattn.distributed import Machine, Shape, plan

SHAPE = Shape(2, 8, 4, 4096, 4096, 64, 32, itemsize=2, causal=True)
MACHINE = Machine(devices=4, speed=1e12, link=1e9, latency=1e-5)


def test_the_times_are_the_sums_of_their_steps():
    ring, exchange, tree = plan(SHAPE, MACHINE)
    flops = 2 * 2 * 8 * (4096**2 // 2) * (64 + 32)
    keys = 2 * 4 * 1024 * (64 + 32)  # numbers of one shard
    compute, transfer = flops / 16 / 1e12, 1e-5 + 2 * keys / 1e9
    assert ring.forward.compute == pytest.approx(compute)
    assert ring.forward.transfer == pytest.approx(transfer)
    assert ring.forward.seconds == pytest.approx(3 * max(compute, transfer) + compute)
    back, home = 2e-5 + (2 + 4) * keys / 1e9, 1e-5 + 4 * keys / 1e9
    assert ring.backward.seconds == pytest.approx(3 * max(2.5 * compute, back) + 2.5 * compute + home)
    local = 2 * 8 * 1024 * (64 + 32) + keys  # q, k, v and out of a device
    sent = 2 * local * 3 // 4
    assert exchange.forward.seconds == pytest.approx(flops / 4 / 1e12 + 6e-5 + sent / 1e9)
    rows = 4 * 2 * 8 * 4096 * (32 + 2)
    assert tree.forward.seconds == pytest.approx(flops / 4 / 1e12 + 2 * (1e-5 + rows / 1e9))
    for each in (ring, exchange, tree):
        assert each.efficiency == pytest.approx(3.5 * flops / 4 / 1e12 / each.seconds)


def test_one_device_has_no_transfer():
    for each in plan(SHAPE, MACHINE._replace(devices=1)):
        assert each.forward.transfer == 0
        assert each.efficiency == pytest.approx(1)


def test_where_transfers_hide():
    """From that length on they do, and below it they do not."""
    (ring, *_) = plan(SHAPE, MACHINE)
    for factor, hidden in ((0.9, False), (1.1, True)):
        n = int(ring.hidden_from * factor)
        assert plan(SHAPE._replace(n_q=n, n_k=n), MACHINE)[0].hidden is hidden


def test_memory_of_a_ring_shrinks_with_the_devices():
    one, many = (plan(SHAPE, MACHINE._replace(devices=count)) for count in (4, 16))
    assert many[0].bytes == pytest.approx(one[0].bytes / 4)
    assert many[2].bytes > one[2].bytes / 2  # a tree has all queries on each device


def test_heads_that_cannot_be_shared():
    assert plan(SHAPE, MACHINE)[1].refused is None
    assert (
        "8 devices do not divide 8 query heads and 4 key heads" in plan(SHAPE, MACHINE._replace(devices=8))[1].refused
    )


@pytest.mark.parametrize(("name", "value"), [("devices", 0), ("speed", -1.0), ("link", 0.0), ("latency", -1.0)])
def test_bad_machines(name, value):
    with pytest.raises(pa.ArgumentError, match=f"{name}: expected a positive number, got {value}"):
        plan(SHAPE, MACHINE._replace(**{name: value}))


def explained(*more):
    arguments = ("--q", "2,8,4096,64", "--k", "2,4,4096,64", "--v", "2,4,4096,32", "--dtype", "float16", "--causal")
    machine = ("--devices", "4", "--link", "1", "--latency", "10")
    command = [sys.executable, "-m", "polyattn", "explain", *arguments, *machine, *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_command_line_says_the_same():
    found = json.loads(explained("--speed", "1", "--json"))["plan"]
    for said, each in zip(found, plan(SHAPE, MACHINE), strict=True):
        assert said["method"] == each.method
        assert said["efficiency"] == pytest.approx(each.efficiency)
        assert said["forward"]["seconds"] == pytest.approx(each.forward.seconds)


def test_without_a_speed_it_is_measured_here():
    lines = explained().splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["ring", "all-to-all", "tree"]
    assert all("efficiency" in line and "GiB a device" in line for line in lines)


def test_the_page_is_written_from_what_was_measured(tmp_path):
    """With made-up times: the errors of the plan and the ratios are computed from them."""
    times = {"one process, two threads": [2.0, 4.0], "ring": [3.0, 5.0], "all-to-all": [4.0, 4.0], "block": [1.0, 1.0]}
    found = {
        "seconds": times, "latency": 1e-4, "link": 1e9, "n": 4096, "rounds": 2, "others": 0.0,
        "machine": {"processor": "a processor", "cores": 2},
    }  # fmt: skip
    (tmp_path / "images").mkdir()
    (tmp_path / "found.json").write_text(json.dumps(found))
    dask = {"n": 4096, "chunk": 512, "rounds": 2}
    dask["seconds"] = {"one process, forward": [1.0], "one process": [3.0, 4.0], "two workers": [4.5, 5.0]}
    (tmp_path / "dask.json").write_text(json.dumps(dask))
    page = tmp_path / "scale.md"
    page.write_text(
        "before\n<!-- written by benchmarks/scale.py -->\nold\n<!-- end of what benchmarks/scale.py writes -->\nafter\n"
    )
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "scale.py"
    files = (str(tmp_path / name) for name in ("found.json", "dask.json"))
    command = [sys.executable, str(script), "page", *files, "--page", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    block = 3.5 * 2 * 8 * 2048**2 * 128  # operations of the block, which took a second
    compute, shard = 3.5 * 2 * 8 * (4096**2 // 2) * 128 / 2 / block, 8 * 2048 * 128 * 4
    home = 1e-4 + shard / 1e9
    assert f"| ring | 3 s | 1.38 | {compute + home:.3g} s | {(compute + home) / 3 - 1:+.0%} |" in text
    assert "| two workers | 4.5 s | 1.50 |" in text
    assert text.count("| 10⁹, 4096 |") == 3
    assert (tmp_path / "images" / "scale.png").stat().st_size > 10_000
