"""Write the results of benchmarks/figures.py into docs/benchmarks.md, between its two marks.

python benchmarks/page.py figures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import parts

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: written by benchmarks/page.py -->\n", "<!-- end of the figures -->\n"
TITLES = {
    "attention": "Attention",
    "small": "One query, and a tiny problem",
    "layer": "MultiHeadAttention",
    "train": "A training step",
}
WHATS = {"forward": "forward", "both": "forward + backward", "step": "forward, backward and AdamW"}
Report = dict[str, Any]
DISTURBED = 0.05


def table(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; all columns but the first are aligned right."""
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * (len(columns) - 1)
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def cell(row: dict[str, Any] | None) -> str:
    """Return a time and, for a peer, its ratio; in bold if the peer is faster."""
    if row is None or row["milliseconds"] is None:
        return "–" if row is None or not row["note"] else row["note"].partition(":")[0]
    time = f"{row['milliseconds']:.3g}" if row["milliseconds"] < 100 else f"{row['milliseconds']:.0f}"
    if row["peer"] == "polyattn":
        return time
    ratio = f"{row['ratio']:.2f}"
    return f"{time} (**{ratio}**)" if float(ratio) < 1 else f"{time} ({ratio})"


def times(report: Report, what: str) -> Iterator[str]:
    """Yield a report's table, with a row for each shape and a column for each contestant."""
    rows = [row for row in report["rows"] if row["what"] == what]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    found = {(row["shape"], row["peer"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    yield from table(["shape", *peers], [[f"`{s}`", *(cell(found.get((s, p))) for p in peers)] for s in shapes])


def wins(report: Report, name: str) -> Iterator[str]:
    """Yield a line for each peer that is faster on some shape."""
    for peer in dict.fromkeys(row["peer"] for row in report["rows"]):
        timed = [row for row in report["rows"] if row["peer"] == peer and row["ratio"] is not None]
        faster = [row for row in timed if row["ratio"] < 1]
        if faster and not peer.startswith("polyattn"):  # polyattn-jit is the same call, compiled as a whole
            most = min(faster, key=lambda row: row["ratio"])
            causal = ", causal" if most["causal"] else ""
            yield (
                f"- {peer} on {len(faster)} of {len(timed)} in *{name}*, by at most {1 / most['ratio']:.2f} times "
                f"(`{most['shape']}` {WHATS[most['what']]}{causal})"
            )


def section(name: str, report: Report) -> Iterator[str]:
    """Yield the heading and the tables of a part."""
    part, backend = name.split("-")[:2]
    for what in dict.fromkeys(row["what"] for row in report["rows"]):
        causal = ", causal" if report["rows"][0]["causal"] else ""
        yield from (f"### {TITLES[part]}, {backend} arrays, {WHATS[what]}{causal}", "")
        yield from times(report, what)
        yield ""


def memory(ours: Report | None, everyone: Report | None) -> Iterator[str]:
    """Yield the tables of memory."""
    if ours:
        yield from ("### Memory at n = 16384, 8 heads, d = 64", "")
        rows = [
            [row["backend"], WHATS[row["what"]], f"{row['beyond_mib']:.0f}", f"{row['growth']:.2f}"]
            for row in ours["rows"]
        ]
        yield from table(["polyattn on", "what", "MiB beyond inputs and results", "growth of the peak from n/2"], rows)
        yield ""
    if everyone:
        yield from (f"### Peak memory of a call, results included, `{everyone['shape']}`", "")
        rows = [
            [row["peer"] + (f" on {row['backend']}" if row["peer"] == "polyattn" else ""), WHATS[row["what"]],
             f"{row['peak_mib']:.0f}"]
            for row in everyone["rows"]
        ]  # fmt: skip
        yield from table(["who", "what", "MiB"], rows)
        yield ""


def disturbance(reports: dict[str, Report]) -> float:
    """Return the largest fraction of the cores' time that other processes used during a comparison."""
    return max((r["machine"]["others"] or 0.0 for r in reports.values() if "machine" in r), default=0.0)


def lines(reports: dict[str, Report]) -> Iterator[str]:
    """Yield everything between the marks."""
    timed = {name: report for name, report in reports.items() if "machine" in report}
    machine = next(iter(timed.values()))["machine"]
    versions = {name: version for report in timed.values() for name, version in report["versions"].items()}
    threads = {name: how for report in timed.values() for name, how in report["threads"].items()}
    yield (
        f"Machine: {machine['processor']} ({machine['architecture']}), {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}."
    )
    yield f"Other processes used at most {disturbance(reports):.0%} of the cores during a part."
    yield f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}."
    yield f"Threads: {'; '.join(f'{name} {how}' for name, how in threads.items())}."
    yield from ("", "### Where a peer is faster", "")
    yield from [line for name, report in timed.items() for line in wins(report, name)] or ["Nowhere."]
    yield ""
    for name, report in timed.items():
        yield from section(name, report)
    yield from memory(reports.get("memory-ours"), reports.get("memory-all"))


def main(arguments: list[str] | None = None) -> int:
    """Replace the text between the marks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output folder of benchmarks/figures.py")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page (default: docs/benchmarks.md)")
    options = parser.parse_args(arguments)
    paths = [path for name in parts() if (path := options.folder / f"{name}.json").exists()]
    if not any(path.stem.startswith(tuple(TITLES)) for path in paths):
        parser.error(f"expected the files of benchmarks/figures.py, found none in {options.folder}")
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    if (busy := disturbance(reports)) >= DISTURBED:
        print(f"page.py: other processes used {busy:.0%} of the cores during a part; measure again", file=sys.stderr)
    text = options.page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    figures = "\n".join(lines(reports)).rstrip("\n") + "\n"
    options.page.write_text(f"{before}{BEGIN}{figures}{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
