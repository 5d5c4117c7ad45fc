"""Functions of another library replaced by polyattn's: counted, and compared with that library's own.

Imported in the process that runs that library's tests, as a pytest plugin.
"""

import contextlib
import functools
import sys
from collections import Counter

import array_api_compat
import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.testing import TOLERANCES, assert_close

CALLS = Counter()
NESTED = []
"""Not empty while results are compared."""


@pytest.fixture(scope="module", autouse=True)
def _counted(request, record_testsuite_property):
    """Report the number of calls of polyattn by the module's tests."""
    CALLS.clear()
    yield
    for name, count in CALLS.items():
        record_testsuite_property(f"{request.module.__name__.rpartition('.')[2]}: {name}", count)


def route(owner, name, *, comparable=lambda: True, differentiated=0, reference=None):
    """Replace ``owner.name`` by the decorated function, except where that returns NotImplemented.

    Where there are values, they and the gradients of the first arguments are compared with those of the replaced
    function (or ``reference``): the tests themselves often look at shapes only.
    """

    def decorate(ours):
        own = getattr(owner, name)
        theirs = reference or own

        @functools.wraps(own)
        def replacement(*args, **kwargs):
            result = NotImplemented if NESTED else ours(*args, **kwargs)
            if result is NotImplemented:
                return own(*args, **kwargs)
            if comparable() and not any(map(is_traced, (*args, *leaves(result)))):
                with nested(name):
                    compare(leaves(result), leaves(theirs(*args, **kwargs)), name)
                    pair = (functools.partial(function, **kwargs) for function in (ours, theirs))
                    dours, dtheirs = (gradients(function, args, differentiated) for function in pair)
                    compare(dours, dtheirs, f"gradients of {name}", sizes(args) if dtheirs else ())
            return result

        setattr(owner, name, replacement)
        return replacement

    return decorate


@contextlib.contextmanager
def nested(name):
    """Disable routing and counting during the comparison."""
    NESTED.append(name)
    try:
        yield
    finally:
        NESTED.pop()


def call(operation, *arrays, **arguments):
    """Call an operation of polyattn on the device of its arrays, and count the call, also if it raises."""
    try:
        with pa.transfers("forbid"):
            result = operation(*arrays, **arguments)
    except Exception as error:
        CALLS[f"refused, {type(error).__name__}: {error}"] += 1
        raise
    CALLS[operation.__name__] += not NESTED
    return result


def with_weights(q, k, v, **arguments):
    """Return the result and the weights."""
    return call(pa.attention, q, k, v, **arguments), call(pa.attention_weights, q, k, **arguments)


def fused(query, key, value, bias=None, mask=None, *, causal=False, scale=None, added=None):
    """Attention of (…, length, heads, features), with causal alignment at the upper left, as in JAX and Keras."""
    q, k, v = map(swap, (query, key, value))
    q, bias, mask, causal = means_for_empty_rows(q, bias, mask, causal, k.shape[-2], added)
    return swap(call(pa.attention, q, k, v, mask=mask, bias=bias, causal=causal, q_offset=0, scale=scale))


def swap(x):
    """Exchange the axes of length and heads."""
    return array_api_compat.array_namespace(x).moveaxis(x, -3, -2)


def means_for_empty_rows(q, bias, mask, causal, n_k, added=None):
    """Return the mean of all values for a query that may attend to no key, as these libraries do, not zeros.

    They put a large negative number in the place of what is excluded: all scores of such a row are equal, and do not
    depend on the query. Or they add it: the sum is that number too, but its derivative goes on to the query.
    """
    if mask is None:
        return q, bias, mask, causal
    xp = array_api_compat.array_namespace(mask)
    if causal:
        mask = xp.tril(xp.broadcast_to(mask, (*mask.shape[:-2], q.shape[-2], n_k)))
    some = xp.any(mask, axis=-1, keepdims=True)
    if added is not None:
        bias = xp.where(some, xp.zeros_like(added), added)
    else:
        q, bias = (None if x is None else xp.where(some, x, xp.zeros_like(x)) for x in (q, bias))
    return q, bias, xp.logical_or(mask, xp.logical_not(some)), False


# ---- the comparison ------------------------------------------------------------------------------------------------


def leaves(result):
    """Return a result's arrays."""
    return result if isinstance(result, tuple) else (result,)


def is_traced(x):
    """Say whether JAX is tracing it."""
    return "jax" in sys.modules and isinstance(x, sys.modules["jax"].core.Tracer)


def compare(ours, theirs, what, least=(1.0, 1.0)):
    """Require equal dtypes, shapes and values; mathematical zeros are compared with the tolerance ``least``.

    In 16 bits the other library rounds scores, weights and their gradients too, hence five times our own tolerance.
    """
    for x, y, size in zip(ours, theirs, least[: len(theirs)], strict=True):
        assert dtype_name(x.dtype) == dtype_name(y.dtype), what
        want, dtype = host(y), dtype_name(x.dtype)
        scale = max(size, float(np.max(np.abs(want), initial=0))) * (5 if dtype.endswith("float16") else 1)
        assert_close(host(x), want, dtype, scale=scale, what=what)


def sizes(arguments):
    """Return the magnitude of terms that cancel in the gradients of query, key and value: dq is a sum of (dout · v) k.

    polyattn's backward takes the weights from log-sum-exp, and so they are as exact as that is: to 2⁻²⁴ of the scores.
    """
    q, k, v = (float(np.max(np.abs(host(x)), initial=1.0)) for x in arguments[:3])
    rounding = 1 + q * k * arguments[0].shape[-1] * 2**-24 / TOLERANCES["float32"]
    return k * v * rounding, q * v * rounding, rounding


def host(x):
    """Return a NumPy array of float64."""
    return x.detach().cpu().double().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)


def gradients(function, arguments, count):
    """Return the gradients of the first arguments for cosines as the upstream gradient; none on NumPy."""
    arrays, rest = arguments[:count], arguments[count:]
    if any(hasattr(x, "detach") for x in arrays):
        import torch

        with torch.enable_grad():
            points = [torch.as_tensor(x).detach().clone().requires_grad_() for x in arrays]
            y = function(*points, *rest)
            return torch.autograd.grad(y, points, torch.as_tensor(cosines(y)).to(y))
    if any(type(x).__module__.startswith("jax") for x in arrays):
        import jax

        y, pull = jax.vjp(lambda *points: function(*points, *rest), *map(jax.numpy.asarray, arrays))
        return pull(jax.numpy.asarray(cosines(y), y.dtype))
    return ()


def cosines(y):
    """Return numbers in the shape of an array."""
    return np.cos(np.arange(np.prod(y.shape))).reshape(y.shape)
