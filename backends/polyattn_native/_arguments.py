"""An attention problem as the library's structure, and what the library does not support of one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from polyattn.backend import (
    AlibiBias,
    Array,
    BlockMask,
    BothMasks,
    PrefixMask,
    Problem,
    RelativePositionBias,
    Sizes,
    StructuredBias,
    StructuredMask,
    concrete,
    constant_result,
)

from ._library import status
from ._structures import BATCH_AXES, UNLIMITED, Attention, Integers
from ._threads import thread_count
from ._views import CODES, NAMES, address_of, batch_strides, code_of, empty, fill, readable, strides_of

__all__ = [
    "LIMIT",
    "Arguments",
    "arguments",
    "blocks_of",
    "fill_numbers",
    "kept_axes",
    "masks_of",
    "point_to",
    "prefixes_of",
    "refusal",
    "threads_of",
]

LIMIT = 2**38
"""Positions are at most this large, so that sums of a position, a length and a distance are exact."""
WORTHWHILE = 4e6
"""Floating-point operations below which the library uses one thread anyhow."""
ARRAYS = ("q", "k", "v", "out")
STEEP = 1e15
"""Slopes of ALiBi from which the library's products could overflow."""


class Arguments(NamedTuple):
    """The structure of a problem, and the arrays that it points to besides q, k, v and the results."""

    structure: Attention
    held: tuple[Array, ...]
    distances: Array | None = None
    """The relative position bias of each distance."""


# ---- support -------------------------------------------------------------------------------------------------------


@constant_result
def missing() -> str | None:
    """Return why there is no library, or None."""
    found = status()
    return found if isinstance(found, str) else None


def refusal(problem: Problem) -> str | None:
    """Return why the library does not support a problem, or None; numbers may be traced."""
    reason = missing()
    if reason is not None:
        return reason
    if problem.device is not None and problem.device.partition(":")[0] != "cpu":
        return f"the native library computes on the CPU, not on {problem.device}"
    sizes = problem.sizes
    if len(sizes.batch) > BATCH_AXES and sum(n != 1 for n in sizes.batch) > BATCH_AXES:
        return f"more than {BATCH_AXES} axes before the heads are left to the generic kernel"
    if sizes.d_k == 0 or sizes.d_v == 0:
        return "an axis of features without elements is left to the generic kernel"
    if problem.dtype not in CODES:
        return f"the native library has no {problem.dtype}"
    if problem.dropout and _drops_all_or_none(concrete(problem.dropout)):
        return "a dropout that keeps or drops all weights is left to the generic kernel"
    if problem.rows is not None:
        return "a tile of a problem is left to the generic kernel"
    return _refused_structure(problem) if problem.structured else None


@constant_result
def _drops_all_or_none(dropout: float) -> bool:
    return not 0 < round(65536 * dropout) < 65536


@constant_result
def _are_steep(slopes: tuple[float, ...]) -> bool:
    return not all(abs(slope) < STEEP for slope in slopes)


def _refused_structure(problem: Problem) -> str | None:
    bias = problem.bias
    if isinstance(bias, StructuredBias) and not isinstance(bias, AlibiBias | RelativePositionBias):
        return f"a {type(bias).__name__} is left to the generic kernel"
    if isinstance(bias, AlibiBias) and _are_steep(concrete(bias.slopes)):
        return "slopes so steep that a bias may overflow are left to the generic kernel"
    if isinstance(problem.mask, StructuredMask):
        kinds = [type(mask) for mask in masks_of(problem.mask)]
        if any(kind not in (BlockMask, PrefixMask) for kind in kinds) or len(set(kinds)) != len(kinds):
            return "other masks than one block mask and one prefix mask are left to the generic kernel"
    return None


def masks_of(mask: Array | None) -> Iterator[StructuredMask]:
    """Yield the structured masks of which all must allow a pair."""
    if isinstance(mask, BothMasks):
        yield from masks_of(mask.one)
        yield from masks_of(mask.other)
    elif isinstance(mask, StructuredMask):
        yield mask


# ---- the structure --------------------------------------------------------------------------------------------------


def _shared(arrays: tuple[Array, ...], problem: Problem) -> Attention | None:
    """Return the structure of a problem that has no other arrays than q, k, v and out, without their addresses.

    It is shared by all calls with the same numbers and layout. None for other problems.
    """
    if (
        problem.mask is not None or problem.bias is not None or problem.sinks is not None or problem.dropout
        or problem.q_segments is not None or not isinstance(problem.q_offset, int)
        or not (problem.key_lengths is None or isinstance(problem.key_lengths, int))
    ):  # fmt: skip
        return None
    q, k, v, out = arrays
    if isinstance(q, np.ndarray):
        strides, size = (q.strides, k.strides, v.strides, out.strides), q.itemsize
    else:
        strides, size = (q.stride(), k.stride(), v.stride(), out.stride()), 1
    layout = strides, (q.shape, k.shape, v.shape, out.shape), size
    return _numbers_only(
        problem.dtype, problem.sizes, layout, problem.scale, problem.softcap, problem.causal, problem.window,
        problem.q_offset, problem.key_lengths,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _numbers_only(
    dtype: str, sizes: Sizes, layout: Any, scale: float, softcap: float | None, causal: bool,
    window: tuple[int | None, int | None], q_offset: int, key_lengths: int | None,
) -> Attention:  # fmt: skip
    structure, kept = Attention(), kept_axes(sizes.batch)
    reach = (window[0], 0) if causal else window
    fill_numbers(structure, CODES[dtype], sizes, scale, softcap, reach, q_offset, key_lengths)
    for name, strides, shape in zip(ARRAYS, *layout[:2], strict=True):
        _fill_layout(getattr(structure, name), shape, tuple(step // layout[2] for step in strides), kept)
    return structure


def arguments(q: Array, k: Array, v: Array, out: Array, problem: Problem) -> Arguments:
    """Return the structure with all but the addresses of q, k, v and the results; it must not be changed."""
    arrays = (q, k, v, out)
    shared = _shared(arrays, problem)
    return _filled(arrays, problem) if shared is None else Arguments(shared, ())


def _filled(arrays: tuple[Array, ...], problem: Problem) -> Arguments:
    structure, kept = Attention(), kept_axes(problem.sizes.batch)
    reach = problem.reach
    q_offset, lengths = problem.q_offset, problem.key_lengths
    numbers = (
        problem.scale, problem.softcap, reach, q_offset if isinstance(q_offset, int) else 0,
        lengths if isinstance(lengths, int) else None,
    )  # fmt: skip
    q = arrays[0]
    fill_numbers(structure, code_of(q), problem.sizes, *numbers)
    for name, x in zip(ARRAYS, arrays, strict=True):
        _fill_layout(getattr(structure, name), x.shape, strides_of(x), kept)
    held: list[Array] = []
    for name in ("q_offset", "key_lengths"):
        if not isinstance(getattr(problem, name), int | None):
            values = _int64(problem.backend.to_numpy(getattr(problem, name)))
            _fill_integers(getattr(structure, name), values, kept, held)
    _fill_masks(structure, problem, kept, held)
    distances = _fill_bias(structure, q, problem, kept, held)
    if problem.sinks is not None:
        sinks = problem.backend.to_numpy(problem.sinks.float() if _is_bfloat(problem.sinks) else problem.sinks)
        structure.sinks = _hold(held, np.ascontiguousarray(readable(sinks), dtype=NAMES[structure.wide_dtype]))
    if problem.dropout:
        seed = problem.seed if isinstance(problem.seed, int) else int(problem.backend.to_numpy(problem.seed))
        structure.seed[:] = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        structure.drop_below = round(65536 * problem.dropout)
        structure.keep_scale = 1 / (1 - problem.dropout)
    return Arguments(structure, tuple(held), distances)


def kept_axes(batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch axes that a call has, as negative indices: all, or those longer than 1 if they are many."""
    axes = range(-len(batch), 0)
    return tuple(axes) if len(batch) <= BATCH_AXES else tuple(axis for axis in axes if batch[axis] != 1)


def point_to(structure: Attention, q: Array, k: Array, v: Array, out: Array, largest: Array, log_total: Array) -> None:
    """Set the addresses of q, k, v and of the results."""
    structure.q.data, structure.k.data, structure.v.data = address_of(q), address_of(k), address_of(v)
    structure.out.data = address_of(out)
    structure.largest, structure.log_total = address_of(largest), address_of(log_total)


def threads_of(problem: Problem) -> int:
    """Return the number of threads for a problem."""
    batch, heads, _, n_q, n_k, d_k, d_v = problem.sizes
    if 2.0 * math.prod(batch) * heads * n_q * n_k * (d_k + d_v) < WORTHWHILE:
        return 1
    return thread_count(problem.backend.name)


def fill_numbers(
    structure: Attention, dtype: int, sizes: Sizes, scale: float, softcap: float | None,
    reach: tuple[int | None, int | None], q_offset: int, key_lengths: int | None,
) -> None:  # fmt: skip
    """Set all numbers of a problem; out is contiguous."""
    structure.dtype, structure.threads, structure.wide_dtype = dtype, 1, int(dtype == CODES["float64"])
    batch = [sizes.batch[axis] for axis in kept_axes(sizes.batch)]
    structure.batch[:] = [1] * (BATCH_AXES - len(batch)) + batch
    for name in ("heads", "kv_heads", "n_q", "n_k", "d_k", "d_v"):
        setattr(structure, name, getattr(sizes, name))
    lengths = (*structure.batch, sizes.heads, sizes.n_q, sizes.d_v)
    steps = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    structure.out.batch[:] = steps[:BATCH_AXES]
    structure.out.head, structure.out.row, structure.out.feature = steps[BATCH_AXES:]
    structure.scale, structure.softcap, structure.keep_scale = scale, softcap or 0.0, 1.0
    structure.left, structure.right = (UNLIMITED if x is None or x >= LIMIT else x for x in reach)
    structure.q_offset.value = max(-LIMIT, min(q_offset, LIMIT))
    structure.key_lengths.value = UNLIMITED if key_lengths is None else key_lengths
    structure.prefix.value = UNLIMITED


def _fill_layout(view: Any, shape: tuple[int, ...], strides: tuple[int, ...], kept: tuple[int, ...]) -> None:
    """Set the strides of q, k, v or out."""
    view.head, view.row, view.feature = strides[-3:]
    view.batch[:] = batch_strides(shape[:-3], strides[:-3], kept)


def _fill_integers(view: Integers, values: Any, kept: tuple[int, ...], held: list[Array]) -> None:
    """Set an integer for each entry of the batch."""
    view.batch[:] = batch_strides(values.shape, strides_of(values), kept)
    view.data = _hold(held, values)


def _fill_masks(structure: Attention, problem: Problem, kept: tuple[int, ...], held: list[Array]) -> None:
    """Set all that excludes pairs, apart from positions."""
    mask = problem.mask
    if isinstance(mask, StructuredMask):
        for part in masks_of(mask):
            if isinstance(part, BlockMask):
                blocks = blocks_of(part.bits, part.grid)
                fill(structure.blocks, blocks, kept)
                structure.block_q, structure.block_k = part.block_size
                held.append(blocks)
            elif isinstance(part, PrefixMask):
                lengths = prefixes_of(part)
                _fill_integers(structure.prefix, lengths, kept, held)
    elif mask is not None:
        mask = readable(mask)
        fill(structure.mask, mask, kept)
        held.append(mask)
    if problem.q_segments is not None and problem.k_segments is not None:
        for name in ("q_segments", "k_segments"):
            segments = np.ascontiguousarray(problem.backend.to_numpy(getattr(problem, name)).astype(np.int64))
            fill(getattr(structure, name), segments, kept, ("row",))
            held.append(segments)


def _fill_bias(
    structure: Attention, q: Array, problem: Problem, kept: tuple[int, ...], held: list[Array]
) -> Array | None:  # fmt: skip
    """Set the bias; return the values by distance of a relative position bias."""
    bias, wide = problem.bias, NAMES[structure.wide_dtype]
    if isinstance(bias, AlibiBias):
        structure.slopes = _hold(held, np.asarray(bias.slopes, dtype=wide))
    elif isinstance(bias, RelativePositionBias):
        values = bias.by_distance(problem)  # (…, H, n_q + n_k − 1)
        distances = empty(q, tuple(values.shape), wide)
        distances[...] = values
        fill(structure.distances, distances, kept, ("head", "row"))
        held.append(distances)
        return distances
    elif bias is not None:
        bias = readable(bias)
        structure.bias_dtype = code_of(bias)
        fill(structure.bias, bias, kept)
        held.append(bias)
    return None


def _hold(held: list[Array], x: Array) -> int | None:
    """Keep an array for the time of the call, and return its address."""
    held.append(x)
    return address_of(x)


def _is_bfloat(x: Array) -> bool:
    return not isinstance(x, np.ndarray) and code_of(x) == CODES["bfloat16"]


def _int64(x: Any) -> Any:
    """Return integers as positions: int64, at most ``LIMIT``."""
    values = x.astype(np.int64)
    if x.dtype.kind == "u":
        values = np.where(values < 0, LIMIT, values)
    return np.asarray(np.clip(values, -LIMIT, LIMIT))


def prefixes_of(mask: PrefixMask) -> Any:
    """Return the lengths of prefixes as an array."""
    return np.asarray(mask.lengths, dtype=np.int64).reshape(mask.axes)


@functools.lru_cache(maxsize=16)
def blocks_of(bits: bytes, grid: tuple[int, ...]) -> Any:
    """Return the blocks of a block mask as bytes."""
    unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=math.prod(grid))
    return np.ascontiguousarray(unpacked.reshape(grid))
