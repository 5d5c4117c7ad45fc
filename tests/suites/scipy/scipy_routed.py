"""SciPy's softmax, log_softmax and logsumexp routed through polyattn: a pytest plugin for SciPy's own tests.

Of log-sum-exp polyattn offers what attention gives beside its result: that of real
numbers, over any axes. Weights of either sign, the sign of the sum, and complex
numbers stay SciPy's; so does the answer where a number is +inf, of which attention
makes no weights.
"""

import math

import scipy.special.tests.test_logsumexp as suite
from routing import call, route
from scipy._lib._array_api import array_namespace, xp_promote

import polyattn as pa

pytest_plugins = ["routing"]


def never():
    """Return that no comparison with SciPy's function is needed: its tests have the values."""
    return False


@route(suite, "softmax", comparable=never)
def softmax(x, axis=None):
    return over_axes(pa.functional.softmax, x, axis)


@route(suite, "log_softmax", comparable=never)
def log_softmax(x, axis=None):
    return over_axes(pa.functional.log_softmax, x, axis)


def over_axes(operation, x, axis):
    """Apply an operation over one axis to several axes."""
    xp, x = promoted(x)
    rows, order = in_rows(xp, x, axis)
    y = xp.reshape(call(operation, rows), tuple(x.shape[i] for i in order))
    return scalar(xp.permute_dims(y, tuple(order.index(i) for i in range(x.ndim))))


@route(suite, "logsumexp", comparable=never)
def logsumexp(a, axis=None, b=None, keepdims=False, return_sign=False):
    """Return the log-sum-exp of scores that are a bias alone."""
    xp, a = promoted(a)
    if b is not None or return_sign or xp.isdtype(a.dtype, "complex floating"):
        return NotImplemented
    rows, order = in_rows(xp, a, axis)  # (…, n)
    zeros = xp.zeros_like(rows)[..., None]  # (…, n, 1)
    query = xp.sum(zeros, axis=-2, keepdims=True)  # (…, 1, 1)
    _, cache = call(pa.attention_forward, query, zeros, zeros, bias=rows[..., None, :])
    # A row of +inf has no softmax, and attention says so by NaN.
    infinite = xp.any(xp.equal(rows, math.inf), axis=-1) & ~xp.any(xp.isnan(rows), axis=-1)
    lse = xp.where(infinite[..., None], xp.full_like(cache.lse, math.inf), cache.lse)  # (…, 1)
    lead = order[: rows.ndim - 1]
    shape = (a.shape[i] if i in lead else 1 for i in range(a.ndim) if keepdims or i in lead)
    return scalar(xp.reshape(lse, tuple(shape)))


def promoted(x):
    """Return the namespace of an argument, and its numbers as an array of floating dtype by SciPy's rules."""
    xp = array_namespace(x)
    return xp, xp_promote(xp.asarray(x), force_floating=True, xp=xp)


def in_rows(xp, x, axis):
    """Return x with the given axes (all if None) merged into a last one, and the order of its axes."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = [i % x.ndim for i in axes]
    lead = [i for i in range(x.ndim) if i not in axes]
    shape = (*(x.shape[i] for i in lead), math.prod(x.shape[i] for i in axes))
    return xp.reshape(xp.permute_dims(x, (*lead, *axes)), shape), [*lead, *axes]


def scalar(x):
    """Return a scalar for a 0-d array if the library has scalars, as SciPy does."""
    return x[()] if x.ndim == 0 else x
