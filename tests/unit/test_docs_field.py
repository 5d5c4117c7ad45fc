"""docs/field.md: every report has a link and a test that exists, and every test of tests/field has its report."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "field.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[([^\]]+)\]\((https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+)\) \|.*\| `([^`]+)` \|$")
LEAST = 60


def rows() -> list[tuple[str, str, str, str]]:
    """Return the file, report, link and test of each row."""
    found, file = [], ""
    for line in PAGE.splitlines():
        if named := re.fullmatch(r"In `(tests/field/\w+\.py)`\.", line):
            file = named[1]
        elif line.startswith("| ["):
            row = ROW.match(line)
            assert row is not None, f"no report, link and test: {line}"
            found.append((file, *row.groups()))
    return found


def test_there_are_reports_with_links() -> None:
    links = [link for _, _, link, _ in rows()]
    assert len(links) >= LEAST
    assert len({*links}) == len(links), "a report has two rows"
    for _, report, link, _ in rows():
        assert report.rpartition(" ")[2] == link.rpartition("/")[2], f"{report} leads to {link}"


def test_the_tests_are_those_of_the_page() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("POLYATTN_")}
    command = [
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "--polyattn-backend=numpy",
        "tests/field",
    ]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    collected = set(re.findall(r"^(tests/field/\S+?::.+)$", ran.stdout, re.MULTILINE))
    whole = {test.partition("[")[0] for test in collected}
    named = {f"{file}::{test}" for file, _, _, test in rows()}
    assert named <= collected | whole, "the page names tests that do not exist"
    kept = {test for test in collected if not {test, test.partition("[")[0]} & named}
    assert not kept, "tests without a report on the page"


def test_the_test_bears_the_number_of_its_report() -> None:
    for _, report, link, test in rows():
        number = link.rpartition("/")[2]
        assert re.search(rf"[-_]{number}(?:_|\]|$)", test), f"{report}: {test}"
