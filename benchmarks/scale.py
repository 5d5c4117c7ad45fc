"""Measure attention in two processes of this machine, and plan it for many devices; write both into docs/scale.md.

    python benchmarks/scale.py measure --output scale.json    # two gloo processes; a few minutes
    python benchmarks/scale_dask.py --output dask.json        # Dask on this machine; three minutes
    python benchmarks/scale.py page scale.json dask.json      # the tables of docs/scale.md, and images/scale.png

The measured calls are interleaved. Each process has one thread, and the process to compare with has two.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import parser
from page import table

from polyattn.bench._machine import Others, machine
from polyattn.distributed import Machine, Plan, Shape, plan
from polyattn.distributed._plan import BACKWARD, short

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- written by benchmarks/scale.py -->\n", "<!-- end of what benchmarks/scale.py writes -->\n"
DEVICES, LENGTHS = (8, 64, 512, 4096), (10**6, 10**7, 10**8, 10**9)
# A GPU with 400 TFLOP/s in bfloat16 and a link of 400 Gbit/s; a model with 32 query heads and 8 key heads of 128.
GPU = {"speed": 4e14, "link": 5e10, "latency": 5e-6}
MODEL = Shape(1, 32, 8, 0, 0, 128, 128, itemsize=2, causal=True)


# ---- two processes ---------------------------------------------------------------------------------------------------


def measure(options: Any) -> dict[str, Any]:
    """Return the times of each call in seconds, and the three numbers of this machine for the plan."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        result, others = Path(folder) / "found.json", Others()
        torch.multiprocessing.spawn(_work, (f"{folder}/meeting", str(result), options.positions, options.rounds), 2)
        found = json.loads(result.read_text())
    shape = {"n": options.positions, "rounds": options.rounds}
    return {**found, **shape, "machine": machine("cpu"), "others": others.share()}


def _work(rank: int, meeting: str, result: str, n: int, rounds: int) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    found: dict[str, list[float]] = {}
    calls = _calls(torch, n)
    link = _link(torch, distributed, rank)
    for _ in range(rounds + 1):  # the first round warms up
        for name, (threads, alone, call) in calls.items():
            torch.set_num_threads(threads)
            distributed.barrier()
            began = time.perf_counter()
            if rank == 0 or not alone:
                call()
            if not alone:
                distributed.barrier()
            found.setdefault(name, []).append(time.perf_counter() - began)
    if rank == 0:
        Path(result).write_text(json.dumps({"seconds": {k: x[1:] for k, x in found.items()}, **link}))
    distributed.destroy_process_group()


def _calls(torch: Any, n: int) -> dict[str, tuple[int, bool, Callable[[], Any]]]:
    """Return, by name, the threads of a process, whether only one process runs, and a forward and backward."""
    import polyattn as pa
    from polyattn.distributed.torch import attention, shard

    whole = [torch.randn(1, 8, n, 64) for _ in range(4)]

    def both(function: Callable[..., Any], arrays: list[Any], **arguments: Any) -> Callable[[], None]:
        q, k, v = (x.clone().requires_grad_() for x in arrays[:3])
        return lambda: torch.autograd.grad(function(q, k, v, causal=True, **arguments), (q, k, v), arrays[3])

    zigzag = {"layout": "zigzag"}
    shards = [shard(x, **zigzag) for x in whole]
    block = [x[:, :, : n // 2] for x in whole]  # one step of the ring: the speed of a process with one thread

    def full(q: Any, k: Any, v: Any, causal: bool) -> Any:
        return pa.attention(q, k, v)

    return {
        "one process, two threads": (2, True, both(pa.attention, whole)),
        "ring": (1, False, both(attention, shards, **zigzag)),
        "all-to-all": (1, False, both(attention, shards, **zigzag, method="all-to-all")),
        "block": (1, False, both(full, block)),
    }


def _link(torch: Any, distributed: Any, rank: int) -> dict[str, float]:
    """Return the latency of a message, and the bandwidth while both processes send."""

    def exchange(numbers: int, times: int) -> float:
        there, back = torch.ones(numbers), torch.empty(numbers)
        seconds = []
        for _ in range(times):
            distributed.barrier()
            began = time.perf_counter()
            works = [distributed.isend(there, 1 - rank), distributed.irecv(back, 1 - rank)]
            for work in works:
                work.wait()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    latency, large = exchange(2, 100), 2**23
    return {"latency": latency, "link": 4 * large / max(exchange(large, 7) - latency, 1e-9)}


# ---- the page --------------------------------------------------------------------------------------------------------


def measured(found: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the measured times beside the planned ones."""
    n, best = found["n"], {name: min(x) for name, x in found["seconds"].items()}
    half = Shape(1, 8, 8, n // 2, n // 2, 64, 64)
    speed = (1 + BACKWARD) * half.flops / best["block"]
    here = Machine(2, speed, found["link"], found["latency"])
    plans = {each.method: each for each in plan(Shape(1, 8, 8, n, n, 64, 64, causal=True), here)}
    yield f"Attention on (1, 8, {n}, 64), float32, causal, forward and backward; {found['machine']['processor']},"
    yield f"{found['machine']['cores']} cores; the fastest of {found['rounds']} interleaved rounds. A process with one"
    yield f"thread computes {speed / 1e9:.0f} GFLOP/s, gloo's link has {found['link'] / 1e9:.2g} GB/s and"
    yield f"{found['latency'] * 1e6:.0f} µs. Other programs used {found['others']:.0%} of the cores' time meanwhile."
    yield ""
    alone = best["one process, two threads"]
    rows = [["one process, two threads", f"{alone:.3g} s", "1.00", "–", "–"]]
    for name in ("ring", "all-to-all"):
        planned = plans[name].seconds
        error = planned / best[name] - 1
        ratio = statistics.median(
            a / b for a, b in zip(found["seconds"][name], found["seconds"]["one process, two threads"], strict=True)
        )
        rows.append([name, f"{best[name]:.3g} s", f"{ratio:.2f}", f"{planned:.3g} s", f"{error:+.0%}"])
    yield from table(["two processes, one thread each", "time", "median ratio", "planned", "error"], rows)


def measured_on_dask(found: dict[str, Any]) -> Iterator[str]:
    """Yield the table of Dask's times."""
    yield f"On Dask, forward and backward on (1, 8, {found['n']}, 64), float32, causal, in chunks of {found['chunk']}"
    yield f"positions; the fastest of {found['rounds']} interleaved rounds. The formula of all scores has no backward,"
    yield "because Dask does not differentiate."
    yield ""
    best = {name: min(x) for name, x in found["seconds"].items()}
    rows = []
    for name, seconds in best.items():
        alone = best["one process, forward" if "forward" in name else "one process"]
        rows.append([name, f"{seconds:.3g} s", f"{seconds / alone:.2f}"])
    yield from table(["two threads, or two worker processes of one thread", "time", "of one process"], rows)


def planned(method: int) -> Iterator[str]:
    """Yield the table of one method for all numbers of devices and lengths."""
    rows = []
    for n in LENGTHS:
        for count in DEVICES:
            each = of(n, count)[method]
            hides = "yes" if each.hidden else f"from {each.hidden_from:.1g}" if each.hidden_from else "no"
            time_of_step = f"{short(each.forward.compute)} / {short(each.forward.transfer)}"
            memory = f"{each.bytes / 2**30:.3g} GiB"
            effect = f"{each.efficiency:.0%}" + ("" if each.refused is None else " ¹")
            rows.append(
                [f"10{'⁶⁷⁸⁹'[len(str(n)) - 7]}, {count}", time_of_step, hides, short(each.seconds), memory, effect]
            )
    yield from table(["keys, devices", "compute / transfer", "hidden", "in all", "memory", "efficiency"], rows)


def of(n: int, count: int) -> tuple[Plan, ...]:
    """Return the plans for a length and a number of GPUs."""
    return plan(MODEL._replace(n_q=n, n_k=n), Machine(count, **GPU))


def written(found: dict[str, Any], dask: dict[str, Any]) -> str:
    """Return what stands between the marks."""
    lines = ["\n### Measured here\n", *measured(found), "", *measured_on_dask(dask), "\n### Planned for many devices\n"]
    lines += [
        "For 32 query heads and 8 key heads of 128 in bfloat16, causal, forward and backward; a device computes "
        "400 TFLOP/s and",
        "its link has 50 GB/s and 5 µs. Compute and transfer are of one step of the forward.",
        "\n![Efficiency and memory of a device for ring, all-to-all and tree](images/scale.png)",
    ]
    for method, name in enumerate(("Ring", "All-to-all", "Tree")):
        lines += [f"\n**{name}**\n", *planned(method)]
    lines += ["\n¹ Not possible: the devices do not divide the heads.\n"]
    return "\n".join(lines)


def picture(path: Path) -> None:
    """Draw efficiency and memory against the number of devices: a row of panels for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.4), layout="constrained")
    counts, colours = [2**i for i in range(1, 13)], ("#E69F00", "#0072B2", "#009E73", "#D55E00")
    panels = figure.subplots(2, 3, sharex=True, sharey="row")
    for method, name in enumerate(("ring", "all-to-all (grey: too few key heads)", "tree")):
        for n, colour in zip(LENGTHS, colours, strict=True):
            plans = [of(n, count)[method] for count in counts]
            label = f"$10^{len(str(n)) - 1}$ keys"
            panels[0][method].plot(counts, [each.efficiency for each in plans], color=colour, label=label)
            panels[1][method].plot(counts, [each.bytes / 2**30 for each in plans], color=colour)
        if method == 1:
            for panel in (panels[0][1], panels[1][1]):
                panel.axvspan(8, counts[-1], color="0.9", zorder=0)
        panels[0][method].set_title(name, fontsize=10)
        panels[1][method].axhline(80, color="0.4", linestyle=":", linewidth=1)
        panels[1][method].set(xscale="log", yscale="log", xlabel="devices", xticks=DEVICES, xticklabels=DEVICES)
        panels[1][method].minorticks_off()
    panels[0][0].set_ylabel("efficiency")
    panels[0][0].set_ylim(0, 1.05)
    panels[1][0].set_ylabel("memory of a device (GiB; dotted: 80)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or write the page."""
    options = parser(__doc__)
    commands = options.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure")
    run.add_argument("--output", type=Path, default=Path("scale.json"))
    run.add_argument("--positions", type=int, default=16384)
    run.add_argument("--rounds", type=int, default=5)
    page = commands.add_parser("page")
    page.add_argument("found", type=Path)
    page.add_argument("dask", type=Path)
    page.add_argument("--page", type=Path, default=PAGE)
    chosen = options.parse_args(arguments)
    if chosen.command == "measure":
        chosen.output.write_text(json.dumps(measure(chosen), indent=1) + "\n", encoding="utf-8")
        return 0
    before, _, rest = chosen.page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = written(*(json.loads(path.read_text(encoding="utf-8")) for path in (chosen.found, chosen.dask)))
    chosen.page.write_text(before + BEGIN + text + END + after, encoding="utf-8")
    picture(chosen.page.parent / "images" / "scale.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
