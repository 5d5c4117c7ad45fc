"""The conformance kit: what a backend must get right, as checks that anyone can run.

For the author of a plugin, whose backend is called ``mylib``::

    polyattn check mylib
    pytest -p polyattn.testing.plugin --pyargs polyattn.testing.conformance --polyattn-backend=mylib

and, before there is a plugin, for any library whose arrays have
``__array_namespace__``::

    polyattn check --namespace mylib

What a backend is known to get wrong it says itself, in an attribute
``expected_failures = {check: reason}``. A check is named as the report names it:
``attention.forward[causal]`` for one case, ``attention.forward`` for all of
them. The declaration is strict: where the check passes, the run fails.

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
