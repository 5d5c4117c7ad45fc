"""Properties over random shapes, dtypes and masks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.features import lacking

F = pa.functional

# A library that compiles does so for each new shape: there the shapes come from a few.
FEW = [((2,), 2, 1, 3, 5, 4, 3), ((), 2, 2, 4, 4, 2, 2)]
SIZES = st.tuples(
    st.lists(st.integers(1, 3), max_size=2).map(tuple),  # before the heads
    st.sampled_from([1, 2, 4]),  # heads
    st.sampled_from([1, 2, 4]),  # at most so many of them for keys and values
    st.integers(1, 6),  # n_q
    st.integers(1, 6),  # n_k
    st.integers(1, 5),  # d_k
    st.integers(1, 5),  # d_v
)


@pytest.fixture(scope="session")
def sizes(target):
    return st.sampled_from(FEW) if lacking(target, "any_shape") else SIZES


def magnitude(expected):
    """Return the largest magnitude, one at least: a result may be zero by mathematics, but its terms are near one."""
    return max(1.0, float(np.max(np.abs(np.where(np.isfinite(expected), expected, 0.0)))))


def narrowed(draw, shape):
    """Return a shape that broadcasts to ``shape``: some axes one, some of the first left out."""
    kept = [size if draw(st.booleans()) else 1 for size in shape]
    return tuple(kept[draw(st.integers(0, len(kept))) :])


def draw_masks(draw, rng, scores):
    """Draw arguments that exclude keys, and those that change the scores."""
    lead, (heads, n_q, n_k) = scores[:-3], scores[-3:]
    arguments = {}
    if draw(st.booleans()):
        arguments["mask"] = np.asarray(rng.random(narrowed(draw, scores)) < 0.7)
    if draw(st.booleans()):
        bias = np.asarray(rng.standard_normal(narrowed(draw, scores)))
        arguments["bias"] = np.asarray(np.where(rng.random(bias.shape) < 0.15, -np.inf, bias))
    if draw(st.booleans()):
        arguments["causal"] = True
    if draw(st.booleans()):
        limit = st.none() | st.integers(0, 4)
        arguments["window"] = (draw(limit), draw(limit))
    if draw(st.booleans()):
        arguments["q_offset"] = draw(st.integers(-3, 5))
    if draw(st.booleans()):
        per_item = np.asarray(rng.integers(0, n_k + 1, narrowed(draw, lead)), dtype=np.int32)
        arguments["key_lengths"] = draw(st.sampled_from([per_item, int(rng.integers(0, n_k + 1))]))
    if draw(st.booleans()):
        ids = (np.sort(rng.integers(0, 3, (*lead, n))).astype(np.int32) for n in (n_q, n_k))
        arguments["segment_ids"] = tuple(ids)
    if draw(st.booleans()):
        arguments["sinks"] = rng.standard_normal(heads)
    if draw(st.booleans()):
        arguments["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        arguments["scale"] = draw(st.sampled_from([0.1, 1.0, -0.7]))
    return arguments


def native(x, make, dtype):
    if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
        return tuple(native(part, make, dtype) for part in x)
    if not isinstance(x, np.ndarray):
        return x
    return make(x, dtype if x.dtype.kind == "f" else x.dtype.name)


def host(x, to_np):
    """Return the values of the backend's array, so that the reference has the same inputs."""
    return to_np(x).astype(np.float64)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_attention(data, seed, sizes, make, to_np, dtypes):
    """Value, log-sum-exp and every gradient, whatever is excluded."""
    rng, (lead, heads, most, n_q, n_k, d_k, d_v) = np.random.default_rng(seed), data.draw(sizes)
    dtype = data.draw(st.sampled_from([name for name in dtypes if name in ("float32", "float64")]))
    kv_heads = math.gcd(heads, most)
    scores = (*lead, heads, n_q, n_k)
    arguments = draw_masks(data.draw, rng, scores)
    shapes = ((*lead, heads, n_q, d_k), (*lead, kv_heads, n_k, d_k), (*lead, kv_heads, n_k, d_v))
    inputs = [make(rng.standard_normal(shape), dtype) for shape in shapes]
    given_ = {name: native(x, make, dtype) for name, x in arguments.items()}
    dout = make(rng.standard_normal((*scores[:-1], d_v)), dtype)
    dlse = make(rng.standard_normal(scores[:-1]), dtype)

    out, cache = pa.attention_forward(*inputs, **given_)
    grads = pa.attention_backward(dout, cache, dlse=dlse)

    held = [host(x, to_np) for x in inputs]
    arguments |= {name: host(given_[name], to_np) for name in ("bias", "sinks") if name in arguments}
    answer = ref.attention(*held, **arguments)
    assert_close(to_np(out), answer.out, dtype, what="out")
    assert_close(to_np(cache.lse), answer.lse, dtype, what="lse", scale=magnitude(answer.lse))
    want = ref.attention_gradients(host(dout, to_np), *held, dlse=host(dlse, to_np), **arguments)
    for name in ("q", "k", "v", "bias", "sinks"):
        got, expected = getattr(grads, name), getattr(want, name)
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(to_np(got), expected, dtype, scale=magnitude(expected), what=f"gradient of {name}")


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_attention_of_parts(data, seed, sizes, make, to_np):
    """Divide the keys anywhere: the merge of the parts equals attention over all keys."""
    rng, (lead, heads, _, n_q, n_k, d_k, d_v) = np.random.default_rng(seed), data.draw(sizes)
    q, k, v = (rng.standard_normal((*lead, heads, *end)) for end in ((n_q, d_k), (n_k, d_k), (n_k, d_v)))
    mask = rng.random((n_q, n_k)) < 0.6
    cut = data.draw(st.integers(0, n_k))
    parts = []
    for piece in (slice(0, cut), slice(cut, n_k)):
        arguments = {"mask": make(mask[:, piece], "bool")}
        out, cache = pa.attention_forward(make(q), make(k[..., piece, :]), make(v[..., piece, :]), **arguments)
        parts.append((out, cache.lse))
    out, lse = pa.attention_merge(parts)
    answer = ref.attention(q, k, v, mask=mask)
    assert_close(to_np(out), answer.out)
    assert_close(to_np(lse), answer.lse, scale=magnitude(answer.lse))


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout(data, seed, p, sizes, make, to_np):
    rng, (lead, heads, _, n_q, n_k, d_k, d_v) = np.random.default_rng(seed), data.draw(sizes)
    q, k, v = (rng.standard_normal((*lead, heads, *end)) for end in ((n_q, d_k), (n_k, d_k), (n_k, d_v)))
    keep = ref.keep_mask((*lead, heads, n_q, n_k), p, seed)
    out = pa.attention(make(q), make(k), make(v), dropout=p, seed=seed)
    assert_close(to_np(out), ref.attention(q, k, v, keep=keep, dropout=p).out)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
FEW_SHAPES = st.sampled_from([(3,), (2, 4), (2, 3, 4)])


@pytest.fixture(scope="session")
def shapes(target):
    return FEW_SHAPES if lacking(target, "any_shape") else SHAPES


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-3, 1.0, 100.0]))
def test_softmax(data, seed, spread, shapes, make, to_np, dtypes):
    rng, shape, dtype = np.random.default_rng(seed), data.draw(shapes), data.draw(st.sampled_from(list(dtypes)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x, dy = (make(rng.standard_normal(shape) * scale, dtype) for scale in (spread, 1.0))
    y, cache = F.softmax_forward(x, axis=axis)
    (dx,) = F.softmax_backward(dy, cache)
    assert_close(to_np(y), ref.softmax(to_np(x), axis), dtype)
    assert_close(to_np(y).sum(axis, dtype=np.float64), np.ones(np.delete(shape, axis)), dtype)
    assert_close(to_np(dx), ref.softmax_gradient(to_np(dy), to_np(x), axis), dtype, scale=1.0)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), mean=st.sampled_from([0.0, -3.0, 1000.0]))
def test_layer_norm(data, seed, mean, shapes, make, to_np):
    """In float64 and float32, also where the mean is a thousand times the spread."""
    rng, shape = np.random.default_rng(seed), data.draw(shapes)
    dtype = data.draw(st.sampled_from(["float64", "float32"]))
    x, dy = make(rng.standard_normal(shape) + mean, dtype), make(rng.standard_normal(shape), dtype)
    weight, bias = (make(rng.standard_normal(shape[-1:]), dtype) for _ in range(2))
    y, cache = F.layer_norm_forward(x, weight, bias)
    grads = F.layer_norm_backward(dy, cache)
    held = [host(a, to_np) for a in (dy, x, weight, bias)]
    gain = max(1.0, float(np.max(np.abs(held[2]))))
    slope = gain * float(np.max(np.abs(held[0]))) / float(np.min(np.sqrt(np.var(held[1], axis=-1) + 1e-5)))
    assert_close(to_np(y), ref.layer_norm(*held[1:]), dtype, scale=gain, what="y")
    for got, want, field in zip(grads, ref.layer_norm_gradients(*held[:3]), ("x", "weight", "bias"), strict=True):
        # Two values a row have a gradient of zero, as a difference of such slopes.
        assert_close(to_np(got), want, dtype, scale=max(1.0, slope), what=f"gradient of {field}")


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), width=st.sampled_from([1, 4]))
def test_linear(data, seed, width, shapes, make, to_np, dtypes):
    rng, shape, dtype = np.random.default_rng(seed), data.draw(shapes), data.draw(st.sampled_from(list(dtypes)))
    x, weight, bias, dy = (
        make(rng.standard_normal(s), dtype) for s in (shape, (shape[-1], width), (width,), (*shape[:-1], width))
    )
    y, cache = F.linear_forward(x, weight, bias)
    held = [host(a, to_np) for a in (dy, x, weight, bias)]
    assert_close(to_np(y), ref.linear(*held[1:]), dtype, scale=magnitude(ref.linear(*held[1:])))
    for got, want in zip(F.linear_backward(dy, cache), ref.linear_gradients(*held[:3]), strict=True):
        assert_close(to_np(got), want, dtype, scale=magnitude(want))


@given(
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    weighted=st.booleans(),
    ignoring=st.booleans(),
)
def test_cross_entropy(data, seed, reduction, weighted, ignoring, shapes, make, to_np):
    rng, shape = np.random.default_rng(seed), (*data.draw(shapes), 4)
    logits, labels = 5 * rng.standard_normal(shape), rng.integers(0, 4, shape[:-1])
    labels.reshape(-1)[0] = 0  # one label at least that counts
    options = {"reduction": reduction, "ignore_index": 3 if ignoring else None}
    weight = rng.uniform(0.1, 2, 4) if weighted else None
    native_weight = None if weight is None else make(weight)
    loss, cache = F.cross_entropy_forward(make(logits), make(labels, "int64"), weight=native_weight, **options)
    dy = rng.standard_normal(shape[:-1]) if reduction == "none" else np.asarray(0.6)
    grads = F.cross_entropy_backward(make(dy), cache)
    assert_close(to_np(loss), ref.cross_entropy(logits, labels, weight=weight, **options), scale=10.0)
    dlogits = ref.cross_entropy_gradient(dy, logits, labels, weight=weight, **options)
    assert_close(to_np(grads.logits), dlogits, scale=magnitude(dlogits))
    if weight is not None:
        dweight = ref.cross_entropy_weight_gradient(dy, logits, labels, weight, **options)
        assert_close(to_np(grads.weight), dweight, scale=10.0)
