"""Checks of the arguments of attention, and their division into arrays and static arguments."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, dtype_name
from ..conversion import expect_usable
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import Problem, Sizes, StructuredBias, StructuredMask
from ..kernels._arrays import broadcast_shapes, broadcasts
from ..registry import owner
from ._checks import expect_arrays, expect_floating, expect_one_dtype, expect_rank, is_integer, is_number, shown

FAR = 2**32
"""A distance beyond which no key is."""


class Arguments(NamedTuple):
    """The checked arguments of an attention call; the keys of both parts are fields of :class:`Problem`."""

    arrays: dict[str, Array]
    """The arrays that are not None, with q, k and v. ``bias`` is the table of a structured bias that has one."""
    options: dict[str, Any]
    """The static arguments."""


def checked_call(q: Array, k: Array, v: Array, **arguments: Any) -> Arguments:
    """Check the arguments of a call, and return its arrays and static arguments by name."""
    if v is None:
        expect_arrays(v=v)
    try:
        arrays, options = checked_options(checked_sizes(q, k, v), **arguments)
    except ShapeError:
        expect_usable(q=q, k=k, v=v, **arguments)  # the shape of an array that is not usable may have no numbers
        raise
    return Arguments({"q": q, "k": k, "v": v, **arrays}, options)


def checked_options(
    sizes: Sizes, *, mask: Any = None, bias: Any = None, causal: bool = False,
    q_offset: Any = None, window: Any = None, key_lengths: Any = None, segment_ids: Any = None,
    scale: float | None = None, softcap: float | None = None, sinks: Any = None, dropout: float = 0.0,
    seed: Any = None, kernel: str | None = None,
) -> Arguments:  # fmt: skip
    """Check the arguments other than q, k and v for these sizes, and return arrays and static arguments."""
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {
        "sizes": sizes, "causal": _checked_causal(causal), "scale": _checked_scale(scale, sizes.d_k), "kernel": kernel,
    }  # fmt: skip
    if mask is not None or bias is not None or sinks is not None:
        _expect_pairs(mask, bias, sinks, sizes)
        if isinstance(bias, StructuredBias):
            options["bias_structure"], bias = bias.without_table(), bias.table
        if isinstance(mask, StructuredMask):
            options["mask"], mask = mask, None
        arrays |= {name: x for name, x in (("mask", mask), ("bias", bias), ("sinks", sinks)) if x is not None}
    if segment_ids is not None:
        arrays["q_segments"], arrays["k_segments"] = _checked_segments(segment_ids, sizes)
    q_offset = sizes.n_k - sizes.n_q if q_offset is None else q_offset
    for name, x in (("q_offset", q_offset), ("key_lengths", key_lengths), ("seed", seed)):
        if x is not None:
            static = static_integer(name, x, () if name == "seed" else sizes.batch)
            (arrays if static is None else options)[name] = x if static is None else static
    if key_lengths is not None:
        _expect_lengths(key_lengths, options.get("key_lengths"), sizes.n_k)
    if window is not None:
        options["window"] = checked_window(window)
    if not -FAR <= options.get("q_offset", 0) <= FAR:
        options["q_offset"], options["window"] = _nearer(options["q_offset"], options.get("window", (None, None)))
    if softcap is not None:
        options["softcap"] = _checked_softcap(softcap)
    if seed is not None or not (type(dropout) is float and dropout == 0):
        options["dropout"] = _checked_dropout(dropout, seed)
    return Arguments(arrays, options)


def make_problem(
    backend: Backend, q: Array, device: str | None, *, bias: Array | None = None,
    bias_structure: StructuredBias | None = None, **arguments: Any,
) -> Problem:  # fmt: skip
    """Return the attention problem of native arrays and static arguments."""
    if bias_structure is not None:
        arguments |= {"bias": bias_structure, "table": bias}
    elif bias is not None:
        arguments["bias"] = bias
    return Problem(backend, dtype=dtype_name(q.dtype), device=device, **arguments)


def expect_keywords(layer: str, arguments: dict[str, Any], *own: str) -> None:
    """Require that a layer's call has only attention's keyword arguments, without ``own``, which the layer sets."""
    for name in arguments:
        if name not in KEYWORDS or name in own:
            taken = ", ".join(keyword for keyword in KEYWORDS if keyword not in own)
            raise TypeError(f"{layer}: a call takes no argument {name!r}; it takes {taken}")


KEYWORDS = tuple(inspect.signature(checked_options).parameters)[1:]


def checked_sizes(q: Array, k: Array, v: Array | None) -> Sizes:
    """Check that q, k and v fit together, and return their axis lengths; d_v is 0 without v."""
    named = {"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v}
    expect_one_dtype(**named)
    for name, x in named.items():
        expect_rank(name, x, 2)
    (*q_batch, n_q, d_k), (*k_batch, n_k, width) = q.shape, k.shape
    if width != d_k:
        raise ShapeError(f"k: expected (…, n_k, {d_k}) to match q's d_k={d_k}, got {tuple(k.shape)}")
    v_batch, d_v = k_batch, 0
    if v is not None:
        *v_batch, v_length, d_v = v.shape
        if v_length != n_k:
            raise ShapeError(f"v: expected (…, {n_k}, d_v) to match k's n_k={n_k}, got {tuple(v.shape)}")
    # An array of two axes is one head.
    (*q_lead, heads), (*k_lead, kv_heads), (*v_lead, v_heads) = q_batch or [1], k_batch or [1], v_batch or [1]
    if v_heads != kv_heads:
        raise ShapeError(f"v: expected {kv_heads} heads like k, got {v_heads}")
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ShapeError(f"q: expected a number of heads that is a multiple of k's {kv_heads}, got {heads}")
    return Sizes(broadcast_lead(named, q_lead, k_lead, v_lead), heads, kv_heads, n_q, n_k, d_k, d_v)


def broadcast_lead(named: Mapping[str, Array], q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> tuple[int, ...]:
    """Return the broadcast shape of the leading axes of q, k and v; ``named`` holds the arrays for the message."""
    if q == k == v:
        return tuple(q)
    try:
        return broadcast_shapes(tuple(q), tuple(k), tuple(v))
    except ValueError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ShapeError(f"expected leading axes that broadcast, got {shapes}") from None


def expect_broadcastable(name: str, x: Array, shape: tuple[int, ...], meaning: str) -> None:
    if not broadcasts(tuple(x.shape), shape):
        raise ShapeError(f"{name}: expected a shape that broadcasts to {meaning} = {shape}, got {tuple(x.shape)}")


def _expect_pairs(mask: Any, bias: Any, sinks: Any, sizes: Sizes) -> None:
    if isinstance(mask, StructuredMask):
        mask.expect_fit(sizes)
    elif mask is not None:
        kind = dtype_name(getattr(mask, "dtype", type(mask)))
        if not hasattr(mask, "shape") or kind not in ("bool", "bool_"):
            raise DTypeError(
                f"mask: expected booleans in an array, True = may attend, got {kind}; "
                "what is added to the scores goes into bias="
            )
        expect_broadcastable("mask", mask, sizes.scores, "(…, H, n_q, n_k)")
    if isinstance(bias, StructuredBias):
        bias.expect_fit(sizes)
    elif isinstance(bias, StructuredMask):
        raise DTypeError(
            f"bias: expected what is added to the scores, got {type(bias).__name__}, which goes into mask="
        )
    elif bias is not None:
        expect_floating(bias=bias)
        expect_broadcastable("bias", bias, sizes.scores, "(…, H, n_q, n_k)")
    if sinks is not None:
        expect_floating(sinks=sinks)
        if tuple(sinks.shape) != (sizes.heads,):
            raise ShapeError(f"sinks: expected one logit for each of the {sizes.heads} heads, got {tuple(sinks.shape)}")


def _checked_segments(segment_ids: Any, sizes: Sizes) -> tuple[Array, Array]:
    if not isinstance(segment_ids, tuple | list) or len(segment_ids) != 2:
        raise ShapeError(
            f"segment_ids: expected a pair (query ids (…, n_q), key ids (…, n_k)), got {type(segment_ids).__name__}"
        )
    for what, ids, length in zip(("query", "key"), segment_ids, (sizes.n_q, sizes.n_k), strict=True):
        if not hasattr(ids, "dtype") or not is_integer(ids):
            raise DTypeError(f"segment_ids: expected integer {what} ids, got {getattr(ids, 'dtype', type(ids))}")
        expect_rank("segment_ids", ids, 1)
        if ids.shape[-1] != length:
            raise ShapeError(f"segment_ids: expected {length} {what} ids, got shape {tuple(ids.shape)}")
        expect_broadcastable("segment_ids", ids, (*sizes.batch, length), f"the batch and {what} axes")
    q_ids, k_ids = segment_ids
    if dtype_name(q_ids.dtype) != dtype_name(k_ids.dtype):
        raise DTypeError(f"segment_ids: expected one dtype, got {dtype_name(q_ids.dtype)}, {dtype_name(k_ids.dtype)}")
    return q_ids, k_ids


def static_integer(name: str, x: Any, shape: tuple[int, ...]) -> int | None:
    """Return an argument as a Python integer, or None for None and for an integer array that fits ``shape``."""
    if x is None or type(x) is int:
        return x
    if hasattr(x, "dtype") and hasattr(x, "shape") and not _is_scalar(x):
        if not is_integer(x):
            raise DTypeError(f"{name}: expected an integer or integers, got an array of {dtype_name(x.dtype)}")
        expect_broadcastable(name, x, shape, "the axes before the heads")
        return None
    if isinstance(x, bool):
        raise DTypeError(f"{name}: expected an integer or integers, got {x}")
    try:
        return operator.index(x)
    except TypeError:
        raise DTypeError(f"{name}: expected an integer or integers, got {shown(x)}") from None


def _is_scalar(x: Any) -> bool:
    return isinstance(x, np.generic)


def _expect_lengths(key_lengths: Any, static: int | None, n_k: int) -> None:
    """Check lengths that are readable on the host; otherwise a length beyond n_k has the effect of n_k."""
    if static is not None:
        low = high = static
    else:
        backend = owner(key_lengths, "key_lengths")
        if not backend.state(key_lengths).readable or 0 in key_lengths.shape:
            return
        values = backend.to_numpy(key_lengths)
        low, high = int(values.min()), int(values.max())
    if low < 0 or high > n_k:
        raise ArgumentError(f"key_lengths: expected lengths from 0 to n_k={n_k}, got {low if low < 0 else high}")


def _checked_causal(causal: Any) -> bool:
    # An array given as causal may be meant as a mask.
    if not isinstance(causal, int) and not _is_scalar(causal):
        raise ArgumentError(
            f"causal: expected True or False, got {shown(causal)}; pass an array of allowed pairs as mask="
        )
    return bool(causal)


def checked_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(f"window: expected a pair (left, right), None for unbounded, got {shown(window)}")
    if any(not isinstance(x, int) and hasattr(x, "dtype") and not _is_scalar(x) for x in window):
        raise DTypeError("window: expected Python integers, got an array; limits of each row go into mask=")
    left, right = (None if side is None else static_integer("window", side, ()) for side in window)
    if any(side is not None and side < 0 for side in (left, right)):
        raise ArgumentError(f"window: expected distances that are not negative, got {shown(window)}")
    return left, right


def _nearer(q_offset: int, window: tuple[int | None, int | None]) -> tuple[int, tuple[int | None, int | None]]:
    """Return an offset within ±FAR, and the window moved with it: for the keys that exist, the effect is the same."""
    near = max(-FAR, min(q_offset, FAR))
    left, right = window
    return near, (
        None if left is None else max(left - (q_offset - near), 0),
        None if right is None else max(right + (q_offset - near), 0),
    )


def _checked_scale(scale: float | None, d_k: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d_k) if d_k else 1.0
    if not (is_number(scale) and -math.inf < scale < math.inf):
        raise ArgumentError(f"scale: expected a finite number, got {shown(scale)}")
    return float(scale)


def _checked_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if not (is_number(softcap) and 0 < softcap < math.inf):
        raise ArgumentError(f"softcap: expected a positive number, got {shown(softcap)}")
    return float(softcap)


def _checked_dropout(dropout: float, seed: Any) -> float:
    if not (is_number(dropout) and 0 <= dropout <= 1):
        raise ArgumentError(f"dropout: expected a probability from 0 to 1, got {shown(dropout)}")
    if 0 < dropout < 1 and seed is None:
        raise ArgumentError("seed: expected an integer with dropout, which determines the dropped weights; got None")
    if isinstance(seed, int) and not -(2**63) <= seed < 2**64:
        raise ArgumentError(f"seed: expected an integer of at most 64 bits, got {seed}")
    return float(dropout)
