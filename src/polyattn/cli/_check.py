"""``polyattn check``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from ._app import UsageError
from ._tables import print_table

__all__ = ["check"]


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
    from ..testing.check import run_check

    if pytest_args and not pytest_args[0].startswith("-"):
        raise UsageError(f"unexpected argument {pytest_args[0]!r}: one backend at a time; pytest's options follow --")
    with Console(stderr=True).status(f"checking {name}"):  # seen on a terminal only
        report = run_check(name, namespace=namespace, pytest_args=pytest_args or ())
    if json_output:
        typer.echo(json.dumps(report.to_dict()))
    else:
        rows = sorted(report.rows, key=lambda row: row.outcome == "failed")  # what is wrong stands last, in sight
        print_table(("check", "outcome", "detail"), [(row.check, row.outcome, row.detail) for row in rows])
        typer.echo(
            f"{report.backend} {report.library_version}, kit {report.kit_version}: "
            f"{report.passed} passed, {report.failed} failed, {report.declared} failed as declared"
        )
    if report.failed:
        raise typer.Exit(1)
