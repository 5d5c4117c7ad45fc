"""``polyattn bench``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import ArgumentError
from ._app import UsageError
from ._tables import print_table

if TYPE_CHECKING:
    from ..bench import Report, Row

__all__ = ["bench"]

Task = StrEnum("Task", ["attention", "layer", "train"])
What = StrEnum("What", ["forward", "both"])

# A long sequence, one decoding step, and a problem so small that the overhead of the call dominates.
DEFAULT = {"attention": ("1,8,2048,64", "1,8,1:4096,64", "1,1,4,8"), "layer": ("4,8,512,64",), "train": ("4,8,512,64",)}
TO_DRAW = ("1,8,256,64", "1,8,512,64", "1,8,1024,64", "1,8,2048,64", "1,8,4096,64")


def bench(
    task: Annotated[Task, typer.Argument(help="One operation, one layer, or one training step of it.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="B,H,N,D", help="Batch, heads, length (or N_Q:N_K), features of a head. Repeatable."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="No query attends to a later key.")] = False,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    what: Annotated[
        What | None, typer.Option(help="Forward, or forward and backward.", show_default="forward, then both")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="The backend that computes.", show_default="POLYATTN_BACKEND, else numpy")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A device of --backend, cuda:0 for instance.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A library to compare with. Repeatable.", show_default="all installed"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=7, help="Rounds, whose median is reported.")] = 7,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each library.", show_default="all cores")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also measure memory, each in its own process.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw time and memory against n; implies --memory.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time polyattn and other libraries in interleaved rounds, on equal inputs, after a check that results agree."""
    from .. import bench as engine

    try:
        texts = shape or (TO_DRAW if plot else DEFAULT[task.value])
        shapes = [engine.parse_shape(text) for text in texts]
        whats = engine.TASKS[task.value] if what is None else (what.value,)
        # Of the default shapes, those that cannot be causal are left out.
        shapes = [s for s in shapes if shape or not causal or s.n_q == s.n_k]
        cases = [engine.Case(task.value, what, s, causal, dtype) for s in shapes for what in whats]
        if plot is not None:
            engine.writable(plot, shapes)
        with _progress() as show:
            report = engine.compare(
                cases, backend=backend, device=device, peers=peer or None, rounds=rounds, threads=threads,
                memory=memory or plot is not None, progress=show,
            )  # fmt: skip
    except ArgumentError as error:
        raise UsageError(f"--{error}") from error
    typer.echo(json.dumps(report.to_dict())) if json_output else _print(report)
    if plot is not None:  # after the figures are printed: the file may fail to be written
        engine.draw(report, plot)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows progress on standard error, if it is a terminal; called only between measurements."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task("", total=1.0)

        def show(doing: str, done: float) -> None:
            bar.update(line, description=doing, completed=done, refresh=True)

        yield show


def _print(report: Report) -> None:
    """Print a table with a section for each case, then the machine and the versions."""
    weighed = any(row.memory_mib is not None for row in report.rows)
    columns = ("shape", "what", "peer", "ms", "ratio", "error", *(("MiB",) if weighed else ()))
    cases = [(row.shape, row.what) for row in report.rows]
    last = [index for index, case in enumerate(cases[:-1]) if case != cases[index + 1]]
    rows = [_cells(row, first=index == 0 or index - 1 in last)[: len(columns)] for index, row in enumerate(report.rows)]
    print_table(columns, rows, numbers=("ms", "ratio", "error", "MiB"), sections=last)
    for row in report.rows:
        if row.note:
            typer.echo(f"{row.peer} on {row.shape} {row.what}: {row.note}")
    for name, reason in report.absent.items():
        typer.echo(f"{name}: {reason}")
    causal = ", causal" if report.rows[0].causal else ""
    typer.echo(f"polyattn on {report.backend} ({report.device}), {report.rows[0].dtype}{causal}; ", nl=False)
    typer.echo(f"medians of {report.rounds} rounds; ratio = time / polyattn's")
    typer.echo(", ".join(f"{report.machine[name]}" for name in ("processor", "architecture")), nl=False)
    typer.echo(
        f", {report.machine['cores']} cores, {report.machine['memory_gib']} GiB, {report.machine['system']}", nl=False
    )
    busy = report.machine["others"]
    typer.echo("" if busy is None else f"; other processes used {busy:.0%} of the cores meanwhile")
    typer.echo(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    typer.echo("threads: " + "; ".join(f"{name} {how}" for name, how in report.threads.items()))


def _cells(row: Row, *, first: bool) -> Sequence[str]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    milliseconds = row.milliseconds
    digits = ".2f" if milliseconds is not None and milliseconds >= 1 else ".4f"
    return (
        row.shape if first else "", row.what if first else "", row.peer, shown(milliseconds, digits),
        shown(row.ratio, ".2f"), shown(row.error or None, ".0e"), shown(row.memory_mib, ".1f"),
    )  # fmt: skip
