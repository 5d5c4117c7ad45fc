"""The application: its help, its version, and the output of errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..errors import PolyattnError, UnknownBackendError

__all__ = ["Interrupted", "UsageError", "app", "run"]

app = typer.Typer(
    name="polyattn",
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Exact attention for any array library: train a model; list, check and time the backends.",
)

# The errors of a bad command line: click's in older typer, typer's own in newer.
UsageError: Any = typer.BadParameter.__mro__[1]
_ClickException: Any = typer.BadParameter.__mro__[2]


class Interrupted(Exception):
    """An interrupt with a message; typer keeps only the exit code of a KeyboardInterrupt."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = app(args=list(arguments) if arguments is not None else None, prog_name="polyattn", standalone_mode=False)
    except _ClickException as error:
        hint = f" See {error.ctx.command_path} --help." if error.ctx is not None else ""
        message = error.format_message()
        return _fail(message + ("" if message.endswith((".", "?")) or not hint else ".") + hint, 2)
    except Interrupted as error:
        return _fail(str(error), 130)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except PolyattnError as error:
        return _fail(str(error), 2 if isinstance(error, UnknownBackendError) else 1)
    except OSError as error:
        return _fail(str(error) if error.filename else f"the output cannot be written: {error.strerror or error}", 1)
    if code == 130:  # newer typer returns this code for an interrupt
        return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def _polyattn(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        from .._version import __version__

        typer.echo(f"polyattn {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        if text := context.get_help():  # empty if typer with rich has already printed it
            typer.echo(text)
        raise typer.Exit(2)


def _fail(message: str, code: int) -> int:
    """Print the first line of an error last, after the other lines of its message."""
    first, *details = message.strip().splitlines() or [""]
    first = first.removesuffix(":")
    for line in details:
        print(line, file=sys.stderr)
    print(f"polyattn: {'' if code == 130 else 'error: '}{first}", file=sys.stderr)
    return code
