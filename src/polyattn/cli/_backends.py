"""``polyattn backends``."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from .. import registry
from ..backend import FEATURES, Finding, features_of
from ..errors import BackendUnavailableError
from ._tables import print_table

__all__ = ["backends"]

MARKS = {True: "yes", False: "no", None: "?"}


def backends(
    features: Annotated[
        bool, typer.Option("--features", help="List the features of each library, and why one is lacking.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the backends: version, devices, state, why one cannot be used, and its native kernels."""
    found = registry.list_backends()
    answers = {b.name: _features(b) for b in found} if features else {}
    if json_output:
        entries = [asdict(b) for b in found]
        for entry in entries if features else ():
            entry["features"] = {name: finding._asdict() for name, finding in answers[entry["name"]].items()}
        typer.echo(json.dumps(entries))
        return
    if features:
        _print_features(answers)
    else:
        print_table(
            ("backend", "version", "state", "devices", "distribution"),
            [(b.name, b.version, b.state, ", ".join(b.devices), b.distribution) for b in found],
        )
    for b in found:
        if b.state != "ready":
            typer.echo(f"{b.name}: {b.reason}" + (f"; install it with: {b.install}" if b.install else ""))
        for note in b.notes:
            typer.echo(f"{b.name}: {note}")


def _features(info: registry.BackendInfo) -> dict[str, Finding]:
    """Return whether a backend has each feature; unknown for a broken plugin."""
    try:
        return features_of(registry.load(info.name), ready=info.state == "ready")
    except BackendUnavailableError:
        return {name: Finding(None, "its plugin is broken") for name in FEATURES}


def _print_features(answers: dict[str, dict[str, Finding]]) -> None:
    """Print the table, then the meaning of each feature and the reasons where it is lacking."""
    rows = [(name, *(MARKS[found[name].present] for found in answers.values())) for name in FEATURES]
    print_table(("feature", *answers), rows)
    unasked: dict[str, list[str]] = {}
    for name, feature in FEATURES.items():
        _print(f"{name}: {feature.meaning}", "")
        for backend, found in answers.items():
            if found[name].present is False:
                _print(f"no on {backend}: {found[name].reason}", "  ")
            elif found[name].present is None:
                unasked.setdefault(f"? on {backend}: {found[name].reason}", []).append(name)
    for reason, names in unasked.items():
        _print(f"{reason} ({', '.join(names)})", "")


def _print(text: str, indent: str) -> None:
    width = shutil.get_terminal_size().columns
    typer.echo(textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "    "))
