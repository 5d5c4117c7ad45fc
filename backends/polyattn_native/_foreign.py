"""Attention as a call of XLA's foreign-function interface: its attributes, from the shapes of its arrays.

cpp/xla_ffi.cpp receives the attributes and the addresses. All arrays are contiguous.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from polyattn.backend import AlibiBias, BlockMask, PrefixMask, Problem

from ._arguments import blocks_of, fill_numbers, kept_axes, masks_of, prefixes_of
from ._structures import Attention, AttentionBackward
from ._views import AXES, CODES, batch_strides, lay_out

__all__ = ["ForeignCall", "constants", "foreign_call"]

OTHER_AXES = {"dlse": ("head", "row"), "q_segments": ("row",), "k_segments": ("row",), "ddistances": ("head", "row")}
OTHER_AXES["distances"] = OTHER_AXES["ddistances"]
INTEGERS = ("q_offset", "key_lengths", "prefix")
WITHOUT_STRIDES = ("largest", "log_total", "slopes", "sinks", "dsinks", "scale", "softcap", "seed")

Shape = tuple[int, ...]


class ForeignCall(NamedTuple):
    """The attributes of a call."""

    structure: bytes
    """``Attention`` or ``AttentionBackward`` without addresses and traced numbers."""
    fields: tuple[int, ...]
    """For each argument and result the offset of its field in the structure."""


def foreign_call(
    problem: Problem, batch: Shape, bias: str | None, arguments: Mapping[str, Shape], results: Mapping[str, Shape],
    backward: bool,
) -> ForeignCall:  # fmt: skip
    """Return the attributes of a call.

    ``arguments`` and ``results`` are the shapes of its arrays by field, with axes before the heads that broadcast to
    ``batch``; ``bias`` is the dtype of the bias. Scale, softcap and seed are arguments.
    """
    call: Any = AttentionBackward() if backward else Attention()
    forward: Attention = call.forward if backward else call
    _fill_static(forward, problem, batch)
    if bias is not None:
        forward.bias_dtype = CODES[bias]
    kept, offsets = kept_axes(batch), []
    for name, shape in (*arguments.items(), *results.items()):
        holder = forward if hasattr(forward, name) else call
        if name not in WITHOUT_STRIDES:
            _fill_strides(getattr(holder, name), name, shape, kept)
        offsets.append(_offset(type(holder), name))
    return ForeignCall(bytes(call), tuple(offsets))


def constants(problem: Problem) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of a problem that are no arguments of attention, by field: of structured masks and slopes."""
    if isinstance(problem.bias, AlibiBias):
        yield "slopes", np.asarray(problem.bias.slopes, dtype="float64" if problem.dtype == "float64" else "float32")
    for mask in masks_of(problem.mask):
        if isinstance(mask, BlockMask):
            yield "blocks", blocks_of(mask.bits, mask.grid)
        elif isinstance(mask, PrefixMask):
            yield "prefix", prefixes_of(mask)


def _fill_static(structure: Attention, problem: Problem, batch: Shape) -> None:
    """Set what is known without the arrays."""
    q_offset, lengths = problem.q_offset, problem.key_lengths
    fill_numbers(
        structure, CODES[problem.dtype], problem.sizes._replace(batch=batch), 1.0, None, problem.reach,
        q_offset if isinstance(q_offset, int) else 0, lengths if isinstance(lengths, int) else None,
    )  # fmt: skip
    if problem.dropout:
        structure.drop_below = round(65536 * problem.dropout)
        structure.keep_scale = 1 / (1 - problem.dropout)
    for mask in masks_of(problem.mask):
        if isinstance(mask, BlockMask):
            structure.block_q, structure.block_k = mask.block_size


def _fill_strides(view: Any, name: str, shape: Shape, kept: Shape) -> None:
    steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if name in INTEGERS:
        view.batch[:] = batch_strides(shape, steps, kept)
    else:
        lay_out(view, shape, steps, kept, OTHER_AXES.get(name, AXES))


def _offset(structure: type[ctypes.Structure], name: str) -> int:
    """Return the offset of a field, where its address is; the structure of the forward is the first field."""
    return int(getattr(structure, name).offset)
