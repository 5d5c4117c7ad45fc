"""The conformance kit: the checks that every backend must pass.

For the author of a plugin, whose backend is called ``mylib``::

    polyattn check mylib
    pytest -p polyattn.testing.plugin --pyargs polyattn.testing.conformance --polyattn-backend=mylib

and, before there is a plugin, for any library whose arrays have
``__array_namespace__``::

    polyattn check --namespace mylib

A backend declares its known failures in the attribute
``expected_failures = {check: reason}``. Names of checks are those of the report:
``attention.forward[causal]`` for one case, ``attention.forward`` for all of
them. The declaration is strict: if the check passes, the run fails.

Requires ``polyattn[test]``. The parts: :mod:`~polyattn.testing.plugin` (the
pytest plugin and its fixtures), :mod:`~polyattn.testing.references` (float64
formulas), :mod:`~polyattn.testing.cases` (the attention problems), and the
functions below.
"""

from . import references
from .check import Progress, Report, Row, run_check
from .compare import TOLERANCES, assert_close, slopes_agree
from .version import KIT_VERSION

__all__ = [
    "KIT_VERSION",
    "TOLERANCES",
    "Progress",
    "Report",
    "Row",
    "assert_close",
    "references",
    "run_check",
    "slopes_agree",
]
