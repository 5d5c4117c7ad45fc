"""Write what a run of tests/faults counted into docs/reliability.md.

``python tests/faults/page.py COUNTS.json``, with the file that ``nox -s faults -- --long --counts COUNTS.json`` wrote.
"""

import datetime
import itertools
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- written by tests/faults/page.py -->\n", "<!-- end of what tests/faults/page.py writes -->\n"
LIBRARIES = ("numpy", "torch", "jax", "array-api-strict")


def main(counts: Path) -> None:
    """Replace the tables of the page."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    measured = f"Counted on {datetime.date.today()}, Python {platform.python_version()}, {versions}.\n"
    parts = [measured]
    for section, rows in itertools.groupby(json.loads(counts.read_text()), key=lambda row: row[0]):
        parts += [f"\n### {section.removesuffix('.')}\n\n", "| tried | times | outcome |\n| --- | --- | --- |\n"]
        parts += [f"| {what} | {times:,} | {outcome} |\n" for _, what, times, outcome in rows]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + "".join(parts) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
