"""Attention as one dense float64 formula, written apart from the library and from the references of its kit.

Every result comes with the size of its terms, to which a rounding error is relative. Excluded pairs are left out of
every sum, so that NaN and inf there reach nothing.
"""

import math
import operator
from typing import Any, NamedTuple

import numpy as np

import polyattn as pa

WORD, PARITY, ROTATIONS = 0xFFFFFFFF, 0x1BD11BDA, (13, 15, 26, 6, 17, 29, 16, 24)  # of Threefry-2x32


class Made(NamedTuple):
    """A structured mask or bias: the function that makes it, and its arguments."""

    by: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Value(NamedTuple):
    """A result, and the sums of the magnitudes of its terms or the largest of these."""

    value: np.ndarray
    terms: Any


class Answer(NamedTuple):
    """The results of attention and its gradients; None for an absent argument."""

    out: Value
    lse: Value
    largest: np.ndarray
    """The largest score of each row, the sink included; 0 in an empty row."""
    log_total: np.ndarray
    """log Σ exp(score − largest)."""
    spread: float
    """The largest sum of the magnitudes of a score's terms."""
    q: Value
    k: Value
    v: Value
    bias: Value | None
    sinks: Value | None


@np.errstate(all="ignore")
def attention(
    q, k, v, dout, dlse=None, *, bias=None, scale=None, softcap=None, sinks=None, dropout=0.0, seed=0, **masks
):
    """Return the results for float64 inputs; the arguments are those of ``polyattn.attention``."""
    shapes, flat = [x.shape for x in (q, k, v)], q.ndim == k.ndim == v.ndim == 2
    q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
    lead, (heads, n_q, d_k) = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))), q.shape[-3:]
    kv_heads, rows = k.shape[-3], (*lead, heads, n_q)
    q, k, v = (np.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (q, k, v))
    k, v = (np.repeat(x, heads // max(kv_heads, 1), axis=-3) for x in (k, v))
    pairs = Pairs((*rows, k.shape[-2]), bias, **masks)
    scale = scale if scale is not None else 1 / math.sqrt(d_k) if d_k else 1.0
    sink = np.full((heads, 1), -math.inf) if sinks is None else sinks[:, None]
    # ---- scores, softmax, dropout, values
    raw = pairs.only(scale * product(q, k))
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    scores = np.where(pairs.allowed, capped + pairs.bias, -math.inf)
    largest = np.maximum(np.max(scores, axis=-1, initial=-math.inf), sink)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    shares, sink_share = pairs.only(np.exp(scores - largest[..., None])), np.exp(sink - largest)
    total = np.sum(shares, axis=-1) + sink_share
    divisor = np.where(total == 0, 1.0, total)
    weights, sink_weight = pairs.only(shares / divisor[..., None]), sink_share / divisor
    factor = 1.0 if dropout == 0 else keep_mask(scores.shape, dropout, seed) / ((1 - dropout) or 1.0)
    out = pairs.over_keys(Value(weights * factor, weights * factor), v)
    # ---- the same in reverse
    dout, dlse = dout.reshape(out.value.shape), np.zeros(rows) if dlse is None else dlse.reshape(rows)
    dv = pairs.over_queries(Value(weights * factor, weights * factor), dout)
    dweights, terms = (pairs.only(product(f(dout), f(v))) * factor for f in (np.asarray, size))
    mean, mean_terms = np.sum(weights * dweights, axis=-1), np.sum(size(weights) * terms, axis=-1) + size(dlse)
    dscores = Value(
        pairs.only(weights * (dweights + (dlse - mean)[..., None])),
        pairs.only(size(weights) * (terms + mean_terms[..., None])),
    )
    slope = scale if softcap is None else scale * (1 - np.tanh(raw / softcap) ** 2)
    draw = Value(dscores.value * slope, dscores.terms * abs(scale))  # 1 − tanh² is a difference
    dq, dk = pairs.over_keys(draw, k), pairs.over_queries(draw, q)
    dsinks = Value(*(np.sum(sink_weight * x, axis=-1) for x in (dlse - mean, mean_terms)))
    spread = abs(scale) * product(size(q), size(k))
    spread = spread if softcap is None else np.minimum(spread, 2 * softcap)
    rows, log_total = rows[1:] if flat else rows, np.log(total)
    return Answer(
        out=summed(out, (*rows, v.shape[-1])),
        lse=Value((largest + log_total).reshape(rows), max(1.0, finite(largest), finite(log_total))),
        largest=largest.reshape(rows),
        log_total=log_total.reshape(rows),
        spread=finite(pairs.only(spread + size(pairs.bias))),
        q=summed(dq, shapes[0]),
        k=summed(dk, shapes[1], kv_heads),
        v=summed(dv, shapes[2], kv_heads),
        bias=pairs.bias_gradient(dscores, bias),
        sinks=None if sinks is None else summed(dsinks, sinks.shape),
    )


class Pairs:
    """Which query may attend to which key, the bias of each pair, and sums over the allowed pairs."""

    def __init__(
        self, shape, bias, mask=None, causal=False, q_offset=None, window=None, key_lengths=None, segment_ids=None
    ):
        self.heads, n_q, n_k = shape[-3:]
        key, first = np.arange(n_k), per_entry(n_k - n_q if q_offset is None else q_offset)
        self.ahead = key - (np.arange(n_q)[:, None] + first)  # (…, 1, n_q, n_k)
        self.bias = np.broadcast_to(self.dense_bias(bias), shape)
        left, right = window or (None, None)
        allowed = self.bias != -math.inf
        if mask is not None:
            allowed &= self.dense_mask(mask)
        if left is not None:
            allowed &= self.ahead >= -left
        if right is not None:
            allowed &= self.ahead <= right
        if causal:
            allowed &= self.ahead <= 0
        if key_lengths is not None:
            allowed &= key < per_entry(key_lengths)
        if segment_ids is not None:
            allowed &= segment_ids[0][..., None, :, None] == segment_ids[1][..., None, None, :]
        self.allowed = allowed

    def dense_mask(self, mask):
        """Return a mask as booleans."""
        if not isinstance(mask, Made):
            return mask
        given = mask.arguments
        if mask.by is operator.and_:
            return self.dense_mask(given[0]) & self.dense_mask(given[1])
        if mask.by is pa.prefix_mask:
            return (np.arange(self.ahead.shape[-1]) < per_entry(given[0])) | (self.ahead <= 0)
        blocks = np.repeat(np.repeat(given[0], given[1][0], axis=-2), given[1][1], axis=-1)
        return blocks[..., : self.ahead.shape[-2], : self.ahead.shape[-1]]

    def dense_bias(self, bias):
        """Return a bias as numbers."""
        if not isinstance(bias, Made):
            return np.zeros(()) if bias is None else bias
        if bias.by is pa.alibi_bias:
            return -alibi_slopes(self.heads, **bias.options)[:, None, None] * abs(self.ahead)
        return np.moveaxis(bias.arguments[0][self.buckets(bias)], -1, -3)  # (…, n_q, n_k, H) → (…, H, n_q, n_k)

    def buckets(self, bias):
        """Return the bucket of each pair, (…, n_q, n_k)."""
        ahead, where = np.unique(self.ahead[..., 0, :, :], return_inverse=True)
        each = [bucket(int(distance), len(bias.arguments[0]), **bias.options) for distance in ahead]
        return np.array(each, dtype=np.int64)[where.reshape(self.ahead[..., 0, :, :].shape)]

    def bias_gradient(self, dscores, bias):
        """Return the gradient of a bias, of the table of a relative position bias; None where there is no array."""
        if bias is None or (isinstance(bias, Made) and bias.by is pa.alibi_bias):
            return None
        if not isinstance(bias, Made):
            return summed(dscores, bias.shape)
        tables = np.zeros((2, *bias.arguments[0].shape))
        for table, x in zip(tables, dscores, strict=True):
            x = np.moveaxis(x, -3, -1)
            np.add.at(table, np.broadcast_to(self.buckets(bias), x.shape[:-1]), x)
        return Value(tables[0], finite(tables[1]))

    def only(self, x):
        """Return zero at the excluded pairs."""
        return np.where(self.allowed, x, 0.0)

    def over_keys(self, weights, x):
        """Return Σ_j weight_ij x_j."""
        terms = size(weights.terms) @ size(x)
        if np.isfinite(x).all():
            return Value(weights.value @ x, terms)
        parts = np.where(self.allowed[..., None], weights.value[..., None] * x[..., None, :, :], 0.0)
        return Value(np.sum(parts, axis=-2), terms)

    def over_queries(self, weights, x):
        """Return Σ_i weight_ij x_i."""
        terms = np.swapaxes(size(weights.terms), -1, -2) @ size(x)
        if np.isfinite(x).all():
            return Value(np.swapaxes(weights.value, -1, -2) @ x, terms)
        parts = np.where(self.allowed[..., None], weights.value[..., None] * x[..., :, None, :], 0.0)
        return Value(np.sum(parts, axis=-3), terms)


def product(x, y):
    """Return x yᵀ. A NaN is in its row or column only."""
    return x @ np.swapaxes(y, -1, -2)


def size(x):
    """Return magnitudes, 0 for NaN and inf."""
    return np.where(np.isfinite(x), abs(x), 0.0)


def finite(x):
    """Return the largest finite magnitude, 0 if there is none."""
    return float(np.max(size(x), initial=0.0))


def per_entry(x):
    """Return integers for each entry of the batch so that they broadcast against the scores."""
    return np.asarray(x, dtype=np.int64)[..., None, None, None]


def summed(x, shape, kv_heads=None):
    """Return a sum over the query heads of each key head, and over the axes along which ``shape`` was broadcast."""

    def to_shape(y):
        if kv_heads is not None:
            *lead, heads, n, d = y.shape
            y = np.sum(y.reshape(*lead, kv_heads, heads // max(kv_heads, 1), n, d), axis=-3)
        y = np.sum(y, axis=tuple(range(y.ndim - len(shape)))) if y.ndim > len(shape) else y
        axes = tuple(i for i, n in enumerate(shape) if n == 1 != y.shape[i])
        return np.sum(y, axis=axes, keepdims=True).reshape(shape)

    return Value(to_shape(x.value), finite(to_shape(x.terms)))


def alibi_slopes(heads, max_bias=8.0):
    """Return 2^(−max_bias · h / H); for other than powers of two, the lower power's and every other of the higher's."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-max_bias * h / power) for h in range(1, power + 1)]
    more = [2 ** (-max_bias * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return np.array((first + more)[:heads])


def bucket(ahead, count, bidirectional=True, max_distance=128):
    """Return T5's bucket of a distance, with floor(log(…)) in exact integers."""
    half = count // 2 if bidirectional else count
    away = abs(ahead) if bidirectional else max(-ahead, 0)
    exact = half // 2
    found = away
    if away >= exact:
        wide = half - exact  # exact + floor(wide · log(away / exact) / log(max_distance / exact))
        steps = range(1, wide)
        found = exact + sum(away**wide >= max_distance**s * exact ** (wide - s) for s in steps)
    return found + (half if bidirectional and ahead > 0 else 0)


def keep_mask(shape, p, seed):
    """Return which weights dropout keeps: Threefry-2x32 with 13 rounds of (row, key // 4), one 16-bit lane a key."""
    low, high = int(seed) & WORD, (int(seed) >> 32) & WORD
    keys = [low, high, low ^ high ^ PARITY]
    column = np.arange(shape[-1], dtype=np.uint64)
    row = np.arange(math.prod(shape[:-1]), dtype=np.uint64)[:, None]
    x0, x1 = np.broadcast_arrays((row + np.uint64(keys[0])) & WORD, (column // 4 + np.uint64(keys[1])) & WORD)
    for turn in range(13):
        x0 = (x0 + x1) & WORD
        x1 = (((x1 << ROTATIONS[turn % 8]) | (x1 >> (32 - ROTATIONS[turn % 8]))) & WORD) ^ x0
        if turn % 4 == 3:
            step = turn // 4 + 1
            x0, x1 = (x0 + keys[step % 3]) & WORD, (x1 + keys[(step + 1) % 3] + step) & WORD
    lane = (np.where(column % 4 < 2, x0, x1) >> (16 * (column % 2))) & 0xFFFF
    return (lane >= round(65536 * p)).reshape(shape)
