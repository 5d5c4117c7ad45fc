"""Check every attention function that polyattn has an adapter for, and write docs/differences.md.

``python benchmarks/differences.py [ADAPTER…] [--folder FOLDER]``. The reports are kept in the folder as JSON; with
names, only these functions are checked again. The text of the page above the first table is kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

from polyattn.errors import BackendUnavailableError
from polyattn.testing.functions import ADAPTERS, CHECKS, check_function

PAGE = Path(__file__).resolve().parents[1] / "docs" / "differences.md"
MARK = "<!-- From here on written by benchmarks/differences.py -->\n"
SIGNS = {"right": "✓", "wrong": "**wrong**", "refuses": "refuses", "crashes": "**crash**", "declared": "–"}
SHORT = {
    "torch-sdpa": "torch SDPA", "torch-sdpa-math": "torch SDPA, math", "torch-sdpa-flash": "torch SDPA, flash",
    "flex-attention": "Flex­Attention", "torch-mha": "nn.Multihead­Attention", "jax-nn": "jax.nn",
    "keras-ops": "Keras ops", "flax-nnx": "Flax nnx", "mlx-fast": "MLX fast", "onnxruntime-attention": "ORT Attention",
    "onnxruntime-mha": "ORT MHA", "onnx-reference": "ONNX reference", "polyattn-numpy": "polyattn NumPy",
    "polyattn-torch": "polyattn torch", "polyattn-jax": "polyattn JAX", "polyattn-strict": "polyattn strict",
}  # fmt: skip


def checked(name: str, folder: Path) -> dict[str, Any] | None:
    """Check a function, and keep its report; return None if its library is not installed."""
    try:
        report = check_function(name)
    except BackendUnavailableError as missing:
        print(f"{name}: {missing}", file=sys.stderr)
        return None
    found = report.to_dict() | {"date": date.today().isoformat()}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items() if count)
    print(f"{name} {report.version}: {counts}, in {report.seconds:.0f} s", flush=True)
    return found


def table(reports: dict[str, dict[str, Any]], names: list[str]) -> list[str]:
    """Return the lines of one table: a row for each check, a column for each function."""
    lines = ["| check | " + " | ".join(SHORT[name] for name in names) + " |", "| --- |" + " --- |" * len(names)]
    outcomes = {name: {row["check"]: row["outcome"] for row in reports[name]["rows"]} for name in names}
    for check in CHECKS:
        cells = (SIGNS.get(outcomes[name].get(check, ""), "") for name in names)
        lines.append(f"| {check} | " + " | ".join(cells) + " |")
    counts = (str(reports[name]["wrong"] + reports[name]["crashes"]) for name in names)
    return [*lines, "| wrong or crashed | " + " | ".join(counts) + " |", ""]


def faults(report: dict[str, Any]) -> list[str]:
    """Return a list of what one function gets wrong, with the smallest input that was found."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in report["rows"]:
        if row["outcome"] not in ("right", "declared"):
            key = (row["outcome"], row["detail"] if row["outcome"] == "refuses" else row["check"])
            alike.setdefault(key, []).append(row["check"])
    details = {row["check"]: row["detail"].replace("|", "\\|") for row in report["rows"]}
    return [
        f"- {', '.join(f'`{check}`' for check in checks)}: {outcome}. `{details[checks[0]][:300]}`"
        for (outcome, _), checks in alike.items()
    ]


def page(reports: dict[str, dict[str, Any]]) -> str:
    """Return what is below the mark."""
    days = sorted({report["date"] for report in reports.values()})
    one = next(iter(reports.values()))
    lines = [
        f"Measured on {' to '.join(dict.fromkeys((days[0], days[-1])))} with Python {one['python']} on "
        f"{platform.machine()}, on the CPU, and:\n",
        *(f"- {SHORT[name]} {report['version']}" for name, report in reports.items()),
        "",
        "✓ right; **wrong**; refuses: an exception; **crash**: the process ended or did not answer; – : not offered, "
        "or declared by the adapter. `polyattn check --function NAME` repeats a column.\n",
        "Whether a row without a key is zero, whether an excluded NaN may reach a result, and the alignment of "
        "causality are conventions; the table holds all to those of polyattn.\n",
    ]
    others = [name for name in reports if not name.startswith("polyattn")]
    ours = [name for name in reports if name.startswith("polyattn")]
    half = (len(others) + 1) // 2
    for names in (others[:half], others[half:], ours):
        lines += table(reports, names) if names else []
    lines += ["## What each gets wrong, with the smallest input found\n"]
    for name, report in reports.items():
        found = faults(report)
        lines += [f"### {SHORT[name]} {report['version']}\n", *(found or ["Nothing."]), ""]
    return "\n".join(lines)


def main() -> None:
    """Check the functions, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ADAPTER", help=f"any of: {', '.join(ADAPTERS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/differences"), help="where the reports are kept")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.names or ADAPTERS:
        checked(name, chosen.folder)
    kept = {name: chosen.folder / f"{name}.json" for name in ADAPTERS}
    reports = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in kept.items() if path.exists()}
    above = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(above + MARK + "\n" + page(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
