"""Rotary position embedding and its backward, the rotation by the negative angles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import cast, wide, widen
from ..kernels._static import concrete, constant_result
from . import _embedding
from ._arguments import expect_broadcastable, static_integer
from ._checks import expect_floating, expect_one_dtype, expect_rank, expect_shape, is_integer, is_number, shown
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._embedding import checked_indices
from ._range import apply_linear
from ._rotary_angles import consecutive, rotary_angles, signed
from ._rotary_scaling import RotaryScaling

__all__ = [
    "RotaryEmbeddingGrads", "rotary_embedding", "rotary_embedding_backward", "rotary_embedding_forward",
]  # fmt: skip

DEFAULT_BASE = 10000.0


class RotaryEmbeddingGrads(NamedTuple):
    """The gradient of :func:`rotary_embedding`; None for positions, offset and tables."""

    x: Array
    positions: None
    offset: None
    cos: None
    sin: None


class Rotation(NamedTuple):
    """The static arguments of a rotation: the angle between neighbouring positions for each pair of features."""

    frequencies: bytes
    """float64 numbers as bytes, which torch.compile treats as a constant; it would make floats symbolic."""
    magnitude: float
    interleaved: bool


class Saved(NamedTuple):
    """What the backward needs."""

    cos: Array
    sin: Array
    interleaved: bool
    bounded: bool
    """Whether no cosine or sine is more than 1."""


def forward(
    backend: Backend, x: Array, positions: Array | None, offset: Array | None, cos: Array | None = None,
    sin: Array | None = None, *, start: int, rotation: Rotation, in_range: bool = False,
) -> tuple[Array, Saved]:  # fmt: skip
    """Return each pair (x₁, x₂) rotated by its angle: (x₁ cos − x₂ sin, x₂ cos + x₁ sin)."""
    xp, device = backend.namespace(), backend.native_device(backend.device_of(x))
    magnitude = concrete(rotation.magnitude)
    bounded = cos is None and magnitude <= 1
    if cos is None or sin is None:
        if positions is None:
            positions = consecutive(xp, x.shape[-2], start if offset is None else signed(xp, offset), device)
        angles = rotary_angles(xp, signed(xp, positions), rotation.frequencies, wide(xp, x.dtype), device)
        cos, sin = xp.cos(angles), xp.sin(angles)  # (…, n, dim / 2)
    else:
        if positions is not None:
            options: dict[str, Any] = {"count": cos.shape[0], "in_range": in_range}
            cos, sin = (_embedding.forward(backend, positions, t, **options)[0] for t in (cos, sin))
        cos, sin = widen(xp, cos), widen(xp, sin)  # (…, n, dim / 2)
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    if x.ndim > 2:
        cos, sin = cos[..., None, :, :], sin[..., None, :, :]  # (…, 1, n, dim / 2): the same for every head
    saved = Saved(cos, sin, rotation.interleaved, bounded)
    return _rotated(backend, x, saved), saved


def backward(backend: Backend, dy: Array, saved: Saved) -> RotaryEmbeddingGrads:
    """Return dy rotated by the negative angles."""
    return RotaryEmbeddingGrads(_rotated(backend, dy, saved._replace(sin=-saved.sin)), None, None, None, None)


def _rotated(backend: Backend, x: Array, angles: Saved) -> Array:
    """Rotate the pairs of the first ``dim`` features; the other features do not change."""
    xp, (cos, sin, interleaved, bounded) = backend.namespace(), angles
    if bounded:
        y = backend.operation("rotary", x, cos, sin, interleaved=interleaved)
        if y is not None:
            return y
    half = cos.shape[-1]
    dim = 2 * half
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, half), slice(half, dim))

    def rotated(x: Array) -> Array:
        x1, x2 = x[..., first], x[..., second]  # (…, H, n, dim / 2)
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        return xp.reshape(xp.stack([y1, y2], axis=-1), x.shape) if interleaved else xp.concat([y1, y2], axis=-1)

    pairs = widen(xp, x[..., :dim])
    y = rotated(pairs) if bounded else apply_linear(backend, rotated, pairs)
    y = cast(xp, y, x.dtype)
    return y if dim == x.shape[-1] else xp.concat([y, x[..., dim:]], axis=-1)


OPERATION = Operation("rotary_embedding", forward, backward)


def rotary_embedding(
    x: Array,
    *,
    positions: Array | None = None,
    offset: int | Array = 0,
    base: float = DEFAULT_BASE,
    dim: int | None = None,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
    tables: tuple[Array, Array] | None = None,
) -> Array:
    r"""Rotate pairs of features by angles proportional to the position, so that q·k depends on the distance alone.

    .. math::
        \begin{pmatrix} y_1 \\ y_2 \end{pmatrix} = m
        \begin{pmatrix} \cos p\,\theta_i & -\sin p\,\theta_i \\ \sin p\,\theta_i & \cos p\,\theta_i \end{pmatrix}
        \begin{pmatrix} x_1 \\ x_2 \end{pmatrix}, \qquad \theta_i = \mathrm{base}^{-2i/\mathrm{dim}}

    Parameters
    ----------
    x : array (…, H, n, d)
        Queries or keys, floating; two axes are one head.
    positions : integers (…, n), optional
        The position p of each row; the leading axes broadcast to those before the heads. The default counts
        from ``offset``.
    offset : int or integers
        The position of the first row, for each batch entry if an array.
    base : float
        More than 1; the longest wavelength is about 2π · base positions.
    dim : int, optional
        The number of rotated features, even; the others do not change. The default is d.
    interleaved : bool
        False pairs feature i with i + dim / 2 (GPT-NeoX, Llama), True 2i with 2i + 1 (RoFormer, GPT-J).
    scaling : RotaryScaling, optional
        :class:`LinearScaling`, :class:`NTKScaling`, :class:`YaRNScaling` or :class:`Llama3Scaling`: other
        frequencies for contexts longer than the trained one; YaRN's also has a magnitude m, else 1.
    tables : (array, array), optional
        The cosines and sines, floating, in place of offset, base and scaling; they have no gradient. With
        ``positions`` they are (m, dim / 2), with row p for position p (a position out of range raises if it is
        readable on the host, else it gives zeros); without, they are (…, n, dim / 2), with a row for each row of x.

    Returns
    -------
    array
        Of the shape and dtype of ``x``. Angles are reduced exactly for positions below 2²⁴ and the rest is
        computed in float32 at least: in float32 the error is about 10⁻⁷ at every position.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit, ``dim`` is odd or more than d, ``x`` is not floating or the positions not
        integers, ``positions`` and ``offset`` are both given, ``tables`` are given with offset, base or scaling, or
        a number is out of its range.

    Notes
    -----
    Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.rotary_embedding(np.array([[1.0, 0.0], [1.0, 0.0]])).round(3)  # by 0 and by 1 radian
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """
    return run(OPERATION, *_check(x, positions, offset, base, dim, interleaved, scaling, tables))


def rotary_embedding_forward(
    x: Array,
    *,
    positions: Array | None = None,
    offset: int | Array = 0,
    base: float = DEFAULT_BASE,
    dim: int | None = None,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
    tables: tuple[Array, Array] | None = None,
) -> tuple[Array, Cache]:
    """Return ``(rotary_embedding(x, …), cache)``; the cache holds the cosines and sines, not ``x``."""
    return run_with_cache(OPERATION, *_check(x, positions, offset, base, dim, interleaved, scaling, tables))


def rotary_embedding_backward(dy: Array, cache: Cache) -> RotaryEmbeddingGrads:
    """Return the gradient of x: dy rotated by the negative angles, with the same magnitude."""
    return run_backward(OPERATION, dy, cache, RotaryEmbeddingGrads)


def _check(
    x: Array, positions: Any, offset: Any, base: float, dim: int | None, interleaved: bool,
    scaling: RotaryScaling | None, tables: Any,
) -> tuple[dict[str, Array | None], dict[str, Any]]:  # fmt: skip
    expect_floating(x=x)
    expect_rank("x", x, 2)
    batch, n = tuple(x.shape[:-3]), x.shape[-2]
    start = static_integer("offset", offset, batch)
    if offset is None:
        raise DTypeError("offset: expected an integer or integers, got None")
    expect_start("offset", start, n)
    if positions is not None:
        expect_positions("positions", positions, batch, n)
        if start != 0:
            raise ArgumentError("offset: expected none where positions are given")
    if tables is not None:
        dim = _checked_tables(tables, positions, (*batch, n), dim)
        if start != 0 or scaling is not None or base != DEFAULT_BASE:
            raise ArgumentError("tables: expected no offset, base or scaling with tables, which replace them")
    rotation = checked_rotation(x, base, dim, interleaved, scaling)
    cos, sin = (None, None) if tables is None else tables
    in_range = cos is not None and positions is not None and checked_indices(positions, cos.shape[0], "positions")
    arrays = {
        "x": x, "positions": positions, "offset": offset if start is None else None, "cos": cos, "sin": sin,
    }  # fmt: skip
    return arrays, {"start": start or 0, "rotation": rotation, "in_range": in_range}


def checked_rotation(x: Array, base: Any, dim: Any, interleaved: Any, scaling: Any) -> Rotation:
    """Check the arguments, and return the rotation of the features of x."""
    dim = _checked_dim(dim, x)
    if not (is_number(base) and 1 < base < math.inf):
        raise ArgumentError(f"base: expected a finite number above 1, got {shown(base)}")
    if not isinstance(interleaved, bool | np.bool):
        raise ArgumentError(f"interleaved: expected True or False, got {shown(interleaved)}")
    scaling = RotaryScaling() if scaling is None else scaling
    if not isinstance(scaling, RotaryScaling):
        raise ArgumentError(f"scaling: expected a RotaryScaling such as YaRNScaling(…) or None, got {shown(scaling)}")
    fields = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)} | vars(scaling)
    state = tuple([(name, concrete(value)) for name, value in fields.items()])
    return Rotation(*_scaled(type(scaling), state, concrete(dim), concrete(float(base))), bool(interleaved))


@constant_result
def _scaled(kind: type[RotaryScaling], state: Any, dim: int, base: float) -> tuple[bytes, float]:
    """Return the frequencies and the magnitude of a scaling of this type with these fields.

    The scaling is created again, because an object that is created under torch.compile exists only in the trace.
    """
    scaling = object.__new__(kind)
    for name, value in state:
        object.__setattr__(scaling, name, value)
    return np.asarray(scaling.frequencies(dim, base), dtype=np.float64).tobytes(), float(scaling.magnitude)


def _checked_tables(tables: Any, positions: Array | None, rows: tuple[int, ...], dim: int | None) -> int:
    """Check the tables against each other and the rows of x, and return the number of features that they rotate."""
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        raise ArgumentError(f"tables: expected a pair (cosines, sines), got {shown(tables)}")
    expect_one_dtype(**dict(zip(("cos", "sin"), tables, strict=True)))
    cos, sin = tables
    expect_rank("cos", cos, 2)
    expect_shape("sin", sin, tuple(cos.shape))
    half = int(cos.shape[-1])
    if dim is not None and dim != 2 * half:
        raise ShapeError(f"tables: expected (…, {shown(dim)} / 2) cosines for dim={shown(dim)}, got {tuple(cos.shape)}")
    if positions is None and cos.shape[-2] != rows[-1]:
        raise ShapeError(f"tables: expected one row for each of the {rows[-1]} of x, got {tuple(cos.shape)}")
    if positions is None:
        expect_broadcastable("tables", cos, (*rows, half), "the axes before the heads, n and dim / 2")
    elif cos.ndim != 2 or cos.shape[0] == 0:
        raise ShapeError(f"tables: expected (m, dim / 2) where positions are given, got {tuple(cos.shape)}")
    return 2 * half


def expect_start(name: str, start: int | None, n: int) -> None:
    """Require that n positions from ``start`` on, if it is static, are 32-bit integers."""
    if start is not None and not -(2**31) <= start <= 2**31 - n:
        raise ArgumentError(f"{name}: expected positions of 32 bits, got {n} from {start} on")


def expect_positions(name: str, positions: Any, batch: tuple[int, ...], n: int) -> None:
    """Require integers (…, n) that broadcast to the axes before the heads."""
    if not hasattr(positions, "dtype") or not is_integer(positions):
        raise DTypeError(f"{name}: expected integers (…, {n}), got {getattr(positions, 'dtype', shown(positions))}")
    expect_rank(name, positions, 1)
    if positions.shape[-1] != n:
        raise ShapeError(f"{name}: expected one for each of the {n} rows, got shape {tuple(positions.shape)}")
    expect_broadcastable(name, positions, (*batch, n), "the axes before the heads, and n")


def _checked_dim(dim: Any, x: Array) -> int:
    d = x.shape[-1]
    if dim is None:
        if d < 2 or d % 2:
            raise ShapeError(f"x: expected an even number of features, got shape {tuple(x.shape)}; or give dim")
        return int(d)
    dim = static_integer("dim", dim, ())
    if dim is None or not 2 <= dim <= d or dim % 2:
        raise ShapeError(f"dim: expected an even number from 2 to x's {d} features, got {shown(dim)}")
    return int(dim)
