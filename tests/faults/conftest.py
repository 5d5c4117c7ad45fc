"""What polyattn survives, tried often: in a short form that takes a minute, or in a long one, with ``--long``.

Random numbers come from ``--seed``. Each test says how often it tried what, by ``tried``; ``--counts FILE`` keeps that
as JSON, and ``page.py`` writes it into docs/reliability.md.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

# Most of JAX's time is the compilation of programs that run once or twice; this must be set before it is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="try everything as often as docs/reliability.md says")
    parser.addoption("--seed", type=int, default=0, help="the seed of all random numbers of tests/faults")
    parser.addoption("--counts", type=Path, help="a JSON file to which what was tried is added")


def pytest_report_header(config):
    return f"faults: {'long' if config.getoption('--long') else 'short'} form, --seed {config.getoption('--seed')}"


@pytest.fixture
def amount(request):
    """Return ``amount(short, long)``, which chooses by the form of the run."""
    return lambda short, long: long if request.config.getoption("--long") else short


@pytest.fixture
def rng(request):
    """Return a generator of random numbers of this test's own, so that each test can be run again alone."""
    return np.random.default_rng([request.config.getoption("--seed"), *request.node.name.encode()])


@pytest.fixture
def tried(request, record_property):
    """Return ``tried(what, times, outcome)``, which counts a row of docs/reliability.md if the test passes."""
    section = request.module.__doc__.partition("\n")[0]
    return lambda what, times, outcome: record_property("tried", (section, what, times, outcome))


def rows(report):
    return [value for name, value in report.user_properties if name == "tried"]


def pytest_terminal_summary(terminalreporter, config):
    passed = [row for report in terminalreporter.stats.get("passed", ()) for row in rows(report)]
    terminalreporter.section("tried")
    for section, what, times, outcome in sorted(map(tuple, passed)):
        terminalreporter.line(f"{section} {times:,} {what}: {outcome}")
    path = config.getoption("--counts")
    if path:
        before = json.loads(path.read_text()) if path.exists() else []
        known = {tuple(row[:2]): list(row) for row in (*before, *passed)}
        path.write_text(json.dumps(sorted(known.values()), indent=1))
