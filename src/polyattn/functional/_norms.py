"""Common parts of layer norm and RMS norm: axes, division by the root and its gradient, checks of arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..backend import Array, Backend
from ..errors import ArgumentError, ShapeError
from ..kernels import cast, widen
from ._checks import expect_one_dtype, expect_rank, expect_shape, is_integer_number, is_number, shown
from ._range import half_power, largest, low, product


def trailing(x: Array, axes: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the leading axes, the last ``axes`` axes, and the number of elements along these, at least 1."""
    lead = x.ndim - axes
    return tuple(range(lead)), tuple(range(-axes, 0)), max(math.prod(x.shape[lead:]), 1)


def by_rows(
    backend: Backend, formula: Callable[..., Any], in_range: Callable[..., Array], *arrays: Array, axes: int
) -> Any:
    """Return the formula's results, computed by rows; those of its scaled form unless ``in_range(*results)`` holds."""
    if backend.state(arrays[0]).readable:
        results = backend.by_rows(formula, *arrays, axes=axes)
        if bool(backend.namespace().all(in_range(*results))):
            return results
    return backend.by_rows(functools.partial(formula, scaled=True), *arrays, axes=axes)


def normalised(
    backend: Backend, x: Array, centred: Callable[[Array], Array], eps: float, last: tuple[int, ...], n: int, *,
    scaled: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return x̂ = c / root and root = √(mean(c²) + eps) of c = ``centred(x)``."""
    xp = backend.namespace()
    if not scaled:
        c = centred(x)
        root = xp.sqrt(xp.sum(c * c, axis=last, keepdims=True) / n + eps)  # (…, 1)
        return c / root, root
    size = largest(xp, x, last)
    least = xp.full_like(size, math.sqrt(eps))
    half = half_power(backend, xp.maximum(size, least))
    scale = half * half
    c = centred(x * scale)
    root = xp.sqrt(xp.sum(c * c, axis=last, keepdims=True) / n + (least * scale) * (least * scale))  # (…, 1)
    limits = xp.finfo(root.dtype)
    # Where c is 0, the root is √eps, which may underflow to 0 after scaling.
    xhat = c / (xp.maximum(root, xp.full_like(root, float(limits.smallest_normal))) if eps > 0 else root)
    # The root of equal numbers close to the largest one may round up to infinity.
    bound = xp.full_like(root, float(limits.max))
    return xhat, xp.minimum(xp.maximum(root / scale, least), bound)


def root_in_range(xp: Any, eps: float, *results: Array) -> Array:
    """Return where no square in the last result, a root √(mean(c²) + eps), has overflowed or underflowed."""
    root = results[-1]
    least = low(xp, root)
    below = xp.less_equal(root, 1 / least)
    return below if eps >= least**2 else xp.logical_and(below, xp.greater_equal(root, least))


def quotient(backend: Backend, x: Array, root: Array, *, scaled: bool) -> Array:
    """Return x / root. ``scaled`` is for libraries that compute x · (1 / root) although 1 / root underflows."""
    if not scaled:
        return x / root
    half = half_power(backend, root)
    return (x * (half * half)) / (root * (half * half))


def norm_gradient(
    backend: Backend, dy: Array, root: Array, weight: Array | None, means: Callable[[Array], tuple[Array, ...]],
    projected: Callable[..., Array], last: tuple[int, ...], *, scaled: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Return ``projected(dx̂, *means(dx̂)) / root`` with dx̂ = dy · weight, and the sum of the means' magnitudes."""
    xp = backend.namespace()
    dxhat, gain = widen(xp, dy), None if weight is None else widen(xp, weight)
    if scaled:
        of_root = factor = half_power(backend, root)
        root = root * (of_root * of_root)
        if backend.state(dy).readable:  # a trace stays linear in dy, since JAX transposes backwards
            half = half_power(backend, largest(xp, dxhat, last))
            dxhat, factor = dxhat * (half * half), factor / half
        if gain is not None:
            of_gain = half_power(backend, largest(xp, gain, tuple(range(gain.ndim))))
            gain, factor = gain * (of_gain * of_gain), factor / of_gain
        factor = xp.minimum(factor, xp.full_like(factor, float(xp.finfo(factor.dtype).max)))  # ∞ · 0 is NaN
    if gain is not None:
        dxhat = dxhat * gain
    found = means(dxhat)
    dx = projected(dxhat, *found) / root
    size = functools.reduce(xp.add, map(xp.abs, found))
    return cast(xp, product(xp, factor, factor, dx) if scaled else dx, dy.dtype), size


def means_in_range(xp: Any, size: Array, root: Array) -> Array:
    """Return where no product in a gradient has overflowed, nor underflowed before the division by a small root."""
    # A size of exactly 0 is fine: no product underflowed, or the quotient is negligible as well.
    enough = xp.logical_or(xp.greater_equal(size, low(xp, size) ** 2), xp.equal(size, 0))
    below = xp.less_equal(size, low(xp, size) ** -2)
    return xp.logical_and(below, xp.logical_and(enough, inverse_in_range(xp, root)))


def inverse_in_range(xp: Any, root: Array) -> Array:
    """Return where a root does not magnify underflowed products, and its inverse is a normal number."""
    return xp.logical_and(xp.greater_equal(root, 2.0**-16), xp.less_equal(root, 2.0**48))


def checked_norm(
    x: Array, eps: float, axes: int, **parameters: Array | None
) -> tuple[dict[str, Array | None], dict[str, Any]]:
    """Check the arguments of a normalisation, and return its arrays by name and its static arguments."""
    expect_one_dtype(x=x, **parameters)
    expect_rank("x", x, 1)
    if not is_integer_number(axes) or not 1 <= axes <= x.ndim:
        raise ShapeError(f"axes: expected a number of last axes of x, from 1 to {x.ndim}, got {shown(axes)}")
    for name, parameter in parameters.items():
        if parameter is not None:
            expect_shape(name, parameter, tuple(x.shape[x.ndim - axes :]))
    return {"x": x, **parameters}, {"eps": checked_eps(eps), "axes": int(axes)}


def checked_eps(eps: float) -> float:
    """Check ``eps``, and return it as a float."""
    if not is_number(eps) or not eps >= 0:
        raise ArgumentError(f"eps: expected a number that is not negative, got {shown(eps)}")
    return float(eps)
