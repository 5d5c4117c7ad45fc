"""``polyattn check``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ._app import UsageError
from ._check_function import check_any
from ._progress import progress_of
from ._tables import named, print_outcomes, print_table

if TYPE_CHECKING:
    from ..testing import check as engine

__all__ = ["check"]

OUTCOMES = ("passed", "failed", "declared", "skipped")


def check(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The backend; with --namespace, the module of an array API namespace; with --function, a function.",
        ),
    ] = None,
    pytest_args: Annotated[
        list[str] | None, typer.Argument(metavar="PYTEST_ARGS", help="Arguments for pytest, after --.")
    ] = None,
    namespace: Annotated[bool, typer.Option("--namespace", help="NAME is a module; no plugin is needed.")] = False,
    function: Annotated[
        bool, typer.Option("--function", help="NAME is an attention function, an adapter or an adapter file (.py).")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="WORD", help="With --function: only checks whose names contain a word."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every check, and print pytest's output with tracebacks.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    """Run every conformance check on a backend or an attention function, and list what passes and what fails."""
    if name is None:
        from ..testing.functions.adapters import ADAPTERS

        adapters = ", ".join(ADAPTERS)
        raise UsageError(
            f"Missing argument NAME: a backend; or with --function, a function, a file or one of: {adapters}"
        )
    if function:
        if namespace or pytest_args:
            raise UsageError("--function goes with --only, --json and --verbose; it runs without pytest")
        check_any(name, only or [], json_output, verbose)
        return
    if only:
        raise UsageError("--only goes with --function; to select checks of a backend, pass -k to pytest after --")
    if pytest_args and not pytest_args[0].startswith("-"):
        raise UsageError(f"unexpected argument {pytest_args[0]!r}: one backend at a time; pytest's options follow --")
    from ..testing.check import run_check

    with progress_of(name) as show:
        report = run_check(name, namespace=namespace, pytest_args=pytest_args or (), progress=show)
    if json_output:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print(report, verbose)
    if report.failed:
        raise typer.Exit(1)


def _print(report: engine.Report, verbose: bool) -> None:
    """Print a line for each group of checks, then a line for each reason why checks did not pass, failures last."""
    if verbose:
        typer.echo(report.output)
    print_outcomes(((row.check, row.outcome) for row in report.rows), OUTCOMES)
    alike: dict[tuple[str, str], list[engine.Row]] = {}
    for row in sorted(report.rows, key=lambda row: row.outcome == "failed"):
        if verbose or row.outcome != "passed":
            # Group reasons that differ only in numbers, such as the size of an error or an index.
            reason = row.check if verbose else "".join(letter for letter in row.detail if letter.isalpha())
            alike.setdefault((row.outcome, reason), []).append(row)
    if alike:
        rows = [(named([row.check for row in group]), group[0].outcome, group[0].detail) for group in alike.values()]
        print_table(("check", "outcome", "detail"), rows)
    for line in _summary(report):
        typer.echo(line)


def _summary(report: engine.Report) -> Iterator[str]:
    """Yield the totals, and the next command to run."""
    skipped = f", {report.skipped} skipped" if report.skipped else ""
    yield (
        f"{report.backend} {report.library_version}, kit {report.kit_version}: {report.passed} passed, "
        f"{report.failed} failed, {report.declared} failed as declared{skipped}, in {report.seconds:.0f} s"
    )
    if report.owner:
        yield f"the backend {report.owner} owns these arrays and computed with them: polyattn check {report.owner}"
    elif report.left_out:
        yield f"{report.left_out} more checks need a plugin; polyattn new-backend writes one"
    failed = [row.check for row in report.rows if row.outcome == "failed"]
    if failed:
        module, _, function = failed[0].partition("[")[0].partition(".")
        named = f"--namespace {report.backend}" if report.namespace else report.backend
        yield f'with tracebacks: polyattn check {named} -v -- -k "test_{module} and test_{function}"'
