"""Write the table of features.md from what the backends declare: ``python docs/features.py``.

Every library but CuPy must be installed.

A test compares the page with what this would write.
"""

from __future__ import annotations

from pathlib import Path

from polyattn import registry
from polyattn.backend import FEATURES, features_of

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- written by features.py -->\n", "<!-- to here -->\n"
BACKENDS = ("numpy", "torch", "jax", "cupy", "array-api-strict", "dask")
MARKS = {True: "yes", False: "no", None: "?"}


def written() -> str:
    """Return the table, and the reasons below it."""
    ready = {info.name for info in registry.list_backends() if info.state == "ready"}
    # The column of CuPy is what its plugin declares, even on a machine where CuPy can be used.
    found = {name: features_of(registry.load(name), ready=name in ready - {"cupy"}) for name in BACKENDS}
    lines = [f"| feature | what it is | {' | '.join(BACKENDS)} |", f"| --- | --- |{' --- |' * len(BACKENDS)}"]
    for name, feature in FEATURES.items():
        marks = " | ".join(MARKS[found[backend][name].present] for backend in BACKENDS)
        lines.append(f"| `{name}` | {feature.meaning} | {marks} |")
    for backend in BACKENDS:
        lines += ["", f"What {backend} lacks, and why:", ""]
        reasons: dict[str, list[str]] = {}
        for name, finding in found[backend].items():
            if finding.present is not True:
                reasons.setdefault(finding.reason, []).append(f"`{name}`")
        lines += [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def parts(page: str) -> tuple[str, str, str]:
    """Return the text before the table, the table, and the text after it."""
    before, rest = page.split(BEGIN)
    table, behind = rest.split(END)
    return before, table, behind


if __name__ == "__main__":
    before, _, behind = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}{written()}{END}{behind}", encoding="utf-8")
