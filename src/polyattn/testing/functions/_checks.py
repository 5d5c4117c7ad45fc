"""All checks by name, and how one is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

from . import _checks_behavior, _checks_extremes, _checks_values
from ._subject import Declared, Subject, Wrong

__all__ = ["CHECKS", "OUTCOMES", "CheckRow", "run_one"]

CHECKS: dict[str, Callable[[Subject], str]] = {
    **_checks_values.CHECKS, **_checks_extremes.CHECKS, **_checks_behavior.CHECKS,
}  # fmt: skip
"""Each check by its name, ``group.what``."""

OUTCOMES = ("right", "wrong", "refuses", "crashes", "declared")


class CheckRow(NamedTuple):
    """The result of one check.

    ``outcome`` is ``"right"``; ``"wrong"``, where ``detail`` has the smallest input that was found; ``"refuses"``, with
    the exception that the function raised; ``"crashes"``, if the process ended or did not answer; or ``"declared"``,
    where the function does not offer what is checked, or its adapter declares that it does not hold.
    """

    check: str
    outcome: str
    detail: str


def run_one(name: str, subject: Subject) -> CheckRow:
    """Run one check in this process."""
    reason = subject.function.declared.get(name)
    outcome, detail = _outcome(CHECKS[name], subject)
    if reason is not None and outcome in ("wrong", "refuses"):
        return CheckRow(name, "declared", reason)
    return CheckRow(name, outcome, detail)


def _outcome(check: Callable[[Subject], str], subject: Subject) -> tuple[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "right", check(subject)
        except Wrong as difference:
            return "wrong", str(difference)
        except Declared as reason:
            return "declared", str(reason)
        except Exception as error:  # whatever the function under test raises
            first = (str(error).strip().splitlines() or [""])[0]
            return "refuses", f"{type(error).__name__}: {first}"
