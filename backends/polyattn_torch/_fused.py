"""The calls of torch's fused attention: layout of operands, masks, merging of parts. This module imports torch.

The results of each call are tested. A NaN or infinity in the inputs, excluded or
not, makes them not finite; the generic kernel then computes the problem.

The operations return one rounded log-sum-exp for each row. Its rounding error is a
factor of all weights of the row in the backward. Where the error is negligible, the
largest score is set to 0 in all rows by an array with strides 0, which the backward
recognises without waiting for a device. Elsewhere the generic kernel computes the
backward, and problems in several parts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, allowed_in, statistics_of_lse

from ._kernel import Part, varies
from ._operations import operation

__all__ = ["backward", "forward"]

LARGE = 1e38  # below the largest float32
SMALL = {"float16": 1024.0, "bfloat16": 1024.0, "float32": 16.0, "float64": 16.0}
"""The largest log-sum-exp, by dtype of the inputs, with a negligible rounding error: below 5e-7 for float32."""


class Layout:
    """The layout (items, heads, n, width) of operands for the fused operations, and its reverse for results."""

    def __init__(self, problem: Problem, calls: list[Part], operands: tuple[Array, ...], columns: int = 0) -> None:
        sizes, self.run = problem.sizes, operation(problem)
        every = Part(slice(0, sizes.n_q), slice(0, sizes.n_k))
        self.batch, self.groups = sizes.batch, sizes.heads // sizes.kv_heads
        self.width = -(-max(sizes.d_k, sizes.d_v + columns) // self.run.multiple) * self.run.multiple
        self.whole = len(calls) == 1 and calls[0][:2] == every[:2]
        items, heads = math.prod(sizes.batch), sizes.heads
        if self.groups > 1 and calls in ([every], [every._replace(masked=True)]) and alike(problem):
            heads, self.groups = sizes.kv_heads, 1  # all rows attend to the same keys: stack those of a key head
        if self.run.flat and not any(part.masked for part in calls) and all(map(self.packed, operands)):
            items, heads = items * heads, 1  # so that the gradients are contiguous too
        self.lead = (items, heads)

    def packed(self, x: Array) -> bool:
        """Return whether an operand is contiguous and has all batch axes."""
        return bool(x.is_contiguous()) and x.shape[:-3] == self.batch

    def lay(self, x: Array, groups: int = 1) -> Array:
        """(…, H, n, d) → (items, heads, n, width), without a copy if possible."""
        x = x.to(self.run.dtype(x.dtype))
        if x.shape[:-3] != self.batch:
            x = x.expand(*self.batch, *x.shape[-3:])
        if x.shape[-1] != self.width:
            x = pad(x, (0, self.width - x.shape[-1]))
        if groups != 1:
            x = x.repeat_interleave(groups, dim=-3)
        if x.ndim != 4 or x.shape[:2] != self.lead:
            x = x.reshape(*self.lead, -1, self.width)
        # The operations need contiguous rows that do not overlap.
        return x if x.stride(-1) == 1 and x.stride(-2) >= self.width else x.contiguous()

    def lay_all(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Lay out q, k and v, with k and v repeated for each query head."""
        return self.lay(q), self.lay(k, self.groups), self.lay(v, self.groups)

    def lay_rows(self, x: Array) -> Array:
        """(…, H, n) → (items, heads, n)."""
        return x.to(self.run.dtype(x.dtype)).reshape(*self.lead, -1)

    def back(self, y: Array, shape: tuple[int, ...]) -> Array:
        """Return out or a gradient in its own shape, summed over repeated heads and broadcast axes."""
        y = y.reshape(*self.batch, -1, shape[-2], self.width)
        if self.width != shape[-1]:
            y = y[..., : shape[-1]]
        if y.shape[-3] != shape[-3]:
            y = y.unflatten(-3, (shape[-3], self.groups)).sum(-3)
        return y if y.shape == shape else y.sum_to_size(shape)


def alike(problem: Problem) -> bool:
    """Return whether all rows of a batch entry, over all heads, have the same mask, apart from causality."""
    one_mask = problem.mask is None or math.prod(problem.mask.shape[-3:-2]) == 1
    return one_mask and (problem.sizes.n_q == 1 or not varies(problem))


def forward(q: Array, k: Array, v: Array, problem: Problem, calls: list[Part]) -> tuple[Array, RowStatistics] | None:
    """Return out and the row statistics, or None if the generic kernel must compute them."""
    layout, rows = Layout(problem, calls, (q, k, v)), problem.sizes.scores[:-1]
    operands = layout.lay_all(q, k, v)
    if layout.whole:
        out, lse, doubt = attend(layout, operands, problem, calls[0])
    else:
        out = torch.zeros_like(operands[0], dtype=torch.promote_types(q.dtype, torch.float32))
        lse, doubt = out.new_full(out.shape[:-1], -math.inf), out.new_zeros(())
        for part in calls:
            out_, lse_, more = attend(layout, operands, problem, part)
            if part.more:
                out_, lse_ = joined((out[:, :, part.rows], lse[:, :, part.rows]), (out_, lse_))
            out[:, :, part.rows], lse[:, :, part.rows] = out_, lse_
            doubt = doubt + more
    out, lse = layout.back(out, (*rows, problem.sizes.d_v)), lse.reshape(rows)
    most = largest_magnitude(lse)
    if problem.sinks is not None:  # one more score with a value of zero
        sinks = problem.sinks.to(lse.dtype)
        most = torch.maximum(most, largest_magnitude(sinks))
        out, lse = joined((out, lse), (torch.zeros_like(out), sinks[:, None]))
        doubt = doubt + (sinks * 0).sum()
    doubt_, most_ = torch.stack((doubt.to(most.dtype), most)).tolist()
    if not math.isfinite(doubt_) and not (bounded(*operands[:2], problem.scale) and math.isfinite(total(out))):
        return None
    if most_ <= SMALL[problem.dtype]:
        return out.to(q.dtype), RowStatistics(lse.new_zeros(()).expand(lse.shape), lse)
    if problem.sinks is not None or any(part.more for part in calls):
        return None  # merging has lost digits
    return out.to(q.dtype), statistics_of_lse(problem.xp, lse)


def largest_magnitude(lse: Array) -> Array:
    """Return the largest absolute value, without the −inf of empty rows."""
    return torch.where(lse == -math.inf, 0.0, lse).abs().amax()


def is_small(statistics: RowStatistics, dtype: str) -> bool:
    """Return whether the rounding error of the log-sum-exp is negligible, by strides if possible, else by values."""
    if not any(statistics.largest.stride()) and statistics.largest.ndim:
        return True
    return bool(largest_magnitude(statistics.lse) <= SMALL[dtype])


def attend(layout: Layout, operands: Any, problem: Problem, part: Part) -> tuple[Array, Array, Array]:
    """Run the forward of one part; the third result is finite only if the other two are right."""
    q, k, v = operands if layout.whole else cut(part, *operands)
    mask, some = masks(problem, part, q.dtype)
    out, lse = layout.run.forward(q, k, v, part.causal, mask, problem.scale)
    known = lse if some is None else torch.where(some, lse, 1.0)
    doubt = (known / known).sum()  # NaN for an lse of 0, which the CPU operation also returns if all scores are −inf
    if part.causal or part.masked:
        doubt = doubt + total(out)
    return out, lse if some is None else torch.where(some, lse, -math.inf), doubt


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem, calls: list[Part],
) -> AttentionGrads | None:  # fmt: skip
    """Return the gradients, or None if the generic kernel must compute them."""
    if not is_small(statistics, problem.dtype):
        return None
    lse = statistics.lse
    layout = Layout(problem, calls, (q, k, v), columns=0 if dlse is None else 1)
    operands = layout.lay_all(q, k, v)
    dout_, out_, lse_ = layout.lay(dout), layout.lay(out), layout.lay_rows(lse)
    if dlse is not None:
        if dout_.dtype != lse_.dtype:
            return None  # dlse would lose digits in 16 bits
        # dS = P (dO Vᵀ − rowsum(dO O) + dlse): append a column to each, dlse to dO and −1 to O
        dout_[..., problem.sizes.d_v], out_[..., problem.sizes.d_v] = layout.lay_rows(dlse), -1.0
    grads: tuple[Array, ...]
    if layout.whole:
        grads = attend_backward(layout, operands, dout_, out_, lse_, problem, calls[0])
    else:
        grads = tuple(torch.zeros_like(x, dtype=lse_.dtype) for x in operands)
        for part in calls:
            dout_t, out_t, lse_t = (x[:, :, part.rows] for x in (dout_, out_, lse_))
            found = attend_backward(layout, cut(part, *operands), dout_t, out_t, lse_t, problem, part)
            for dx, more, span in zip(grads, found, (part.rows, part.keys, part.keys), strict=True):
                dx[:, :, span] += more
    if any(part.causal or part.masked for part in calls) and not math.isfinite(sum(map(total, grads))):
        return None
    dq, dk, dv = (layout.back(dx, x.shape).to(x.dtype) for dx, x in zip(grads, (q, k, v), strict=True))
    return AttentionGrads(dq, dk, dv, None, sinks_gradient(dout, dlse, out, lse, problem))


def attend_backward(
    layout: Layout, operands: Any, dout: Array, out: Array, lse: Array, problem: Problem, part: Part
) -> tuple[Array, Array, Array]:
    """Run the backward of one part, with dout, out and lse of the whole rows."""
    mask, some = masks(problem, part, out.dtype)
    if some is not None:
        lse = torch.where(lse == -math.inf, 0.0, lse)  # in empty rows, so that exp(−inf − lse) is 0
    dq, dk, dv = layout.run.backward(dout, *operands, out, lse, part.causal, mask, problem.scale)
    return dq, dk, dv


def masks(problem: Problem, part: Part, dtype: Any) -> tuple[Array | None, Array | None]:
    """Return the additive mask (B, H, n_q, n_k) of a part, and which rows are not empty (B, H, n_q)."""
    if not part.masked:
        return None, None
    if not varies(problem):  # a mask of the keys only: the operation applies causality
        problem = replace(problem, causal=False, window=(None, None))
    allowed: Any = allowed_in(problem, part.rows, part.keys)
    if allowed is None:
        return None, None
    batch = problem.sizes.batch
    allowed = allowed.reshape(*(1,) * (len(batch) + 3 - allowed.ndim), *allowed.shape)
    if len(batch) != 1:
        if any(n != 1 for n in allowed.shape[:-3]):
            allowed = allowed.expand(*batch, *allowed.shape[-3:])
        allowed = allowed.reshape(-1, *allowed.shape[-3:])
    some = (allowed.cumsum(-1) > 0)[..., 0, :] if part.causal else allowed.any(-1)
    return torch.where(allowed, 0.0, -math.inf).to(dtype), some


def joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return out and lse over the union of two disjoint sets of keys."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (torch.where(lse == -math.inf, 0.0, torch.exp(x - lse))[..., None] for x in (lse_a, lse_b))
    return out_a * share_a + out_b * share_b, lse


def sinks_gradient(dout: Array, dlse: Array | None, out: Array, lse: Array, problem: Problem) -> Array | None:
    """Return the gradient of the sinks: a sink is one more score, and its value is zero."""
    if problem.sinks is None:
        return None
    sinks, dtype = problem.sinks, lse.dtype
    shift = -(dout.to(dtype) * out.to(dtype)).sum(-1)
    shift = torch.where((out == 0).all(-1), 0.0, shift)  # a NaN in dout of an empty row must not reach the sinks
    shift = shift if dlse is None else shift + dlse
    weight = torch.exp(sinks.to(dtype)[:, None] - torch.where(lse == -math.inf, 0.0, lse))
    return (weight * shift).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)


def cut(part: Part, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return the operands of a part."""
    return q[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys]


def total(x: Array) -> Array:
    """Return the sum in float32 at least: finite if all elements are, except for a rare overflow."""
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


def bounded(q: Array, k: Array, scale: float) -> bool:
    """Return whether q and k are finite and no score can overflow, so that a log-sum-exp of 0 is a valid result."""
    largest = q.abs().amax().double() * k.abs().amax() * q.shape[-1] * max(scale, 1.0)
    return bool(largest < LARGE)
