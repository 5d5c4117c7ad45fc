"""``polyattn check --function``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from ._progress import progress_of
from ._tables import named, print_outcomes, print_table

if TYPE_CHECKING:
    from ..testing.functions import FunctionReport

__all__ = ["check_any"]


def check_any(name: str, only: Sequence[str], json_output: bool, verbose: bool) -> None:
    """Check an attention function of any library, and print what is right, wrong, refused, crashes or declared."""
    from ..testing.functions import check_function

    with progress_of(name) as show:
        report = check_function(name, only=only, progress=show)
    if json_output:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print(report, verbose)
    if report.faults:
        raise typer.Exit(1)


def _print(report: FunctionReport, verbose: bool) -> None:
    """Print a line for each group of checks, then a line for each check that is not right, and the totals."""
    print_outcomes(((row.check, row.outcome) for row in report.rows), tuple(report.counts))
    shown = [row for row in report.rows if verbose or row.outcome != "right"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for check, outcome, detail in sorted(shown, key=lambda row: row.outcome != "declared"):
        alike.setdefault((outcome, detail, check if verbose else ""), []).append(check)
    if alike:
        print_table(("check", "outcome", "detail"), [(named(names), *key[:2]) for key, names in alike.items()])
    for line in _summary(report):
        typer.echo(line)


def _summary(report: FunctionReport) -> Iterator[str]:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items() if count)
    yield f"{report.function} {report.version}: {counts}, in {report.seconds:.0f} s"
    if not report.faults:
        return
    yield f"one check again: polyattn check --function {report.function} --only {report.faults[0].check}"
