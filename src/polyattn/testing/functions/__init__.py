"""Checks of any attention function: of another library, or your own.

On the command line, in Python, and in pytest::

    polyattn check --function torch.nn.functional.scaled_dot_product_attention
    polyattn check --function my_attention.py

    report = polyattn.testing.functions.check_function("my_attention.py")

    pytest -p polyattn.testing.functions.plugin --polyattn-function=my_attention.py --pyargs polyattn.testing.functions

An adapter file says how a function is called. It defines ``attention(q, k, v, *, …)``,
whose keyword-only parameters, some of ``mask``, ``bias``, ``causal``, ``scale``,
``dropout``, ``window``, ``key_lengths``, ``softcap`` and ``sinks``, mean what
:func:`polyattn.attention` documents::

    import my_library

    ARRAYS = "torch"

    def attention(q, k, v, *, mask=None, causal=False, scale=None):
        return my_library.attention(q, k, v, mask=mask, is_causal=causal, softmax_scale=scale)

It may also define

=================================  =====================================================================
``ARRAYS``                         the library of the arrays: ``"numpy"`` (the default), ``"torch"``, ``"jax"``,
                                   or any backend of polyattn; torch and JAX compute gradients
``LAYOUT``                         ``"bhnd"`` (the default) for (batch, heads, n, d), or ``"bnhd"``
``backward(dout, q, k, v, *, …)``  returns the gradients of q, k, v, and of a bias if there is one
``DTYPES``                         the floating dtypes that it documents; by default those of the library
``DECLARED``                       a dict of checks that are known not to hold, with the reason
``VERSION``                        the version to report
``make(x, dtype)``, ``to_numpy``,  for arrays of a library that is no backend: from and to NumPy, and
``vjp(function, arrays, dout)``    gradients; ``vjp`` may be left out
=================================  =====================================================================

The checks run in a process of their own: a crash of the function is a result.
"""

from ._checks import CHECKS, OUTCOMES, CheckRow
from ._function import ARGUMENTS, AttentionFunction, load_function
from ._run import FunctionReport, check_function
from .adapters import ADAPTERS

__all__ = [
    "ADAPTERS",
    "ARGUMENTS",
    "CHECKS",
    "OUTCOMES",
    "AttentionFunction",
    "CheckRow",
    "FunctionReport",
    "check_function",
    "load_function",
]
