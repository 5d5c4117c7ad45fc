"""The command line: ``polyattn train``, ``polyattn backends``, ``polyattn check``.

Exit codes: 0, done; 1, the work failed; 2, it was not understood (an unknown
backend, a bad option); 130, interrupted. An error is one line on standard error.
Nothing here imports a framework before a command needs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import training
from .errors import PolyattnError, UnknownBackendError
from .training import Config

__all__ = ["app", "run"]

app = typer.Typer(
    name="polyattn",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact attention for any array library: train with it, list its backends, check a backend.",
)

# What a bad command line raises: click's own in older typer, typer's in newer.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]


class _Interrupted(Exception):
    """An interrupt with something to say; typer keeps only the code of a KeyboardInterrupt."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = app(args=list(arguments) if arguments is not None else None, prog_name="polyattn", standalone_mode=False)
    except _ClickException as error:
        hint = f" See {error.ctx.command_path} --help." if error.ctx is not None else ""
        message = error.format_message()
        return _fail(message + ("" if message.endswith((".", "?")) or not hint else ".") + hint, 2)
    except _Interrupted as error:
        return _fail(str(error), 130)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except (PolyattnError, OSError) as error:
        return _fail(str(error), 2 if isinstance(error, UnknownBackendError) else 1)
    if code == 130:  # what newer typer makes of an interrupt
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def _polyattn(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        from ._version import __version__

        typer.echo(f"polyattn {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        if text := context.get_help():  # typer with rich has printed it already
            typer.echo(text)
        raise typer.Exit(2)


@app.command()
def train(
    context: typer.Context,
    backend: Annotated[
        str | None, typer.Option(help="Where to compute.", show_default="POLYATTN_BACKEND, else numpy")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A device of --backend, cuda:0 for instance.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = Config.dtype,
    steps: Annotated[int, typer.Option(help="Steps in all, those before --resume included.")] = Config.steps,
    batch: Annotated[int, typer.Option(help="Samples a step.")] = Config.batch,
    sequence: Annotated[int, typer.Option(help="Rows a sample.")] = Config.sequence,
    width: Annotated[int, typer.Option(help="Features a row.")] = Config.width,
    heads: Annotated[int, typer.Option(help="Attention heads, a divisor of the width.")] = Config.heads,
    learning_rate: Annotated[float, typer.Option(help="Its peak, after 200 steps.")] = Config.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = Config.weight_decay,
    seed: Annotated[int, typer.Option(help="Of parameters and samples.")] = Config.seed,
    data: Annotated[str | None, typer.Option(help="An npz file with X and Y, (samples, sequence, features).")] = None,
    output: Annotated[
        str | None, typer.Option(help="The folder of the run.", show_default="a new one in runs/")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --output.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 200,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train attention to find the row with the largest first feature and copy it to every position."""
    settings = {
        "dtype": dtype, "steps": steps, "batch": batch, "sequence": sequence, "width": width, "heads": heads,
        "learning_rate": learning_rate, "weight_decay": weight_decay, "seed": seed, "data": data,
    }  # fmt: skip
    try:
        result = training.train(
            {name: value for name, value in settings.items() if _named(context, name)},
            backend=backend,
            device=device,
            output=output,
            resume=resume,
            overwrite=overwrite,
            checkpoint_every=checkpoint_every,
        )
    except training.OptionError as error:
        raise _UsageError(str(error)) from error
    except KeyboardInterrupt as interrupt:
        raise _Interrupted(str(interrupt) or "interrupted") from None
    typer.echo(json.dumps(result) if json_output else _summary(result))


@app.command()
def backends(json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the backends: version, devices, state, and why one cannot be used."""
    from .registry import list_backends

    found = list_backends()
    if json_output:
        typer.echo(json.dumps([asdict(info) for info in found]))
        return
    _print_table(
        ("backend", "version", "state", "devices", "distribution"),
        [(b.name, b.version, b.state, ", ".join(b.devices), b.distribution) for b in found],
    )
    for b in found:
        if b.state != "ready":
            typer.echo(f"{b.name}: {b.reason}" + (f"; install it with: {b.install}" if b.install else ""))


@app.command()
def check(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The backend; with --namespace, the module of an array API namespace."),
    ],
    pytest_args: Annotated[
        list[str] | None, typer.Argument(metavar="PYTEST_ARGS", help="Arguments for pytest, after --.")
    ] = None,
    namespace: Annotated[bool, typer.Option("--namespace", help="NAME is a module; no plugin is needed.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Run every conformance check on a backend, and say what is right and what is not."""
    from .testing.check import run_check

    if pytest_args and not pytest_args[0].startswith("-"):
        raise _UsageError(f"unexpected argument {pytest_args[0]!r}: one backend at a time; pytest's options follow --")
    with Console(stderr=True).status(f"checking {name}"):  # seen on a terminal only
        report = run_check(name, namespace=namespace, pytest_args=pytest_args or ())
    if json_output:
        typer.echo(json.dumps(report.to_dict()))
    else:
        rows = sorted(report.rows, key=lambda row: row.outcome == "failed")  # what is wrong stands last, in sight
        _print_table(("check", "outcome", "detail"), [(row.check, row.outcome, row.detail) for row in rows])
        typer.echo(
            f"{report.backend} {report.library_version}, kit {report.kit_version}: "
            f"{report.passed} passed, {report.failed} failed, {report.declared} failed as declared"
        )
    if report.failed:
        raise typer.Exit(1)


def _named(context: typer.Context, option: str) -> bool:
    """Say whether the user named an option, even if with its default value."""
    source = context.get_parameter_source(option)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _summary(result: dict[str, Any]) -> str:
    def shown(value: float | None, form: str, otherwise: str) -> str:
        return otherwise if value is None else format(value, form)

    ratio = shown(result["loss_ratio"], ".2%", "no part (all targets are equal)")
    return "\n".join([
        f"{result['backend']} on {result['device']}, {result['dtype']}: step {result['steps']} after "
        f"{result['seconds']:.1f} s, {result['steps_per_second']:.0f} steps/s",
        f"loss              {result['loss']:.4g} on {result['evaluated_on']}",
        f"                  {ratio} of {result['baseline_loss']:.4g}, the loss of predicting the mean row",
        f"pointer accuracy  {shown(result['pointer_accuracy'], '.4f', 'none (the targets are not input rows)')}",
        f"output            {result['output']}",
    ])  # fmt: skip


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a file has no width: nothing is folded
        console.width = 1000
    console.print(table)


def _fail(message: str, code: int) -> int:
    """Print an error in one line, after the lines of detail that a message may bring."""
    first, *details = message.strip().splitlines() or [""]
    first = first.removesuffix(":")
    for line in details:
        print(line, file=sys.stderr)
    print(f"polyattn: {'' if code == 130 else 'error: '}{first}", file=sys.stderr)
    return code
