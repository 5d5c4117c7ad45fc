"""The pytest plugin for an attention function: each check is a test.

Opt in with ``-p polyattn.testing.functions.plugin``; ``--polyattn-function=NAME``
says which function, as :func:`~polyattn.testing.functions.load_function` takes it.
All checks run in one process of their own when the first test starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ...errors import PolyattnError
from ._checks import CHECKS, CheckRow
from ._function import load_function
from ._run import check_function

ROWS = pytest.StashKey[Mapping[str, CheckRow]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("polyattn", "polyattn conformance kit")
    group.addoption("--polyattn-function", metavar="NAME", help="an attention function, an adapter or an adapter file")


def pytest_configure(config: pytest.Config) -> None:
    """Load the function, or stop the run with the reason."""
    name = config.getoption("--polyattn-function")
    try:
        load_function(name or "")
    except PolyattnError as error:
        raise pytest.UsageError(f"polyattn: --polyattn-function: {error}") from error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check."""
    if "attention_check" in metafunc.fixturenames:
        metafunc.parametrize("attention_check", CHECKS, ids=list(CHECKS))


@pytest.fixture(scope="session")
def attention_rows(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Mapping[str, CheckRow]:
    """Return the result of each selected check."""
    chosen = [item.callspec.params["attention_check"] for item in request.session.items if hasattr(item, "callspec")]
    report = check_function(pytestconfig.getoption("--polyattn-function"), only=chosen)
    return {row.check: row for row in report.rows}
