"""``polyattn backends``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ._tables import print_table

__all__ = ["backends"]


def backends(json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the backends: version, devices, state, and why one cannot be used."""
    from ..registry import list_backends

    found = list_backends()
    if json_output:
        typer.echo(json.dumps([asdict(info) for info in found]))
        return
    print_table(
        ("backend", "version", "state", "devices", "distribution"),
        [(b.name, b.version, b.state, ", ".join(b.devices), b.distribution) for b in found],
    )
    for b in found:
        if b.state != "ready":
            typer.echo(f"{b.name}: {b.reason}" + (f"; install it with: {b.install}" if b.install else ""))
