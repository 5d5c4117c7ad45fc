"""Any combination of attention's arguments, on any kernel: output, log-sum-exp and every gradient."""

import importlib

import numpy as np
import pytest
from attention_sizes import Sizes
from hypothesis import given
from hypothesis import strategies as st
from small_tiles import in_tiles

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.kernels import candidates
from polyattn.testing import TOLERANCES, assert_close
from polyattn.testing import references as ref
from polyattn.testing.features import lacking

# A library that compiles does so for each new shape: there the shapes come from a few.
FEW = [
    Sizes((2,), (2,), (2,), 4, 2, 5, 7, 4, 3),
    Sizes((), (), (), 2, 2, 33, 40, 8, 8),
    Sizes((2,), (1,), (), 2, 1, 1, 19, 3, 5),
    Sizes((3, 1), (2,), (1, 2), 3, 3, 18, 6, 1, 2),
]


@st.composite
def any_sizes(draw):
    """Draw lengths up to 40, grouped heads, and leading axes of which some broadcast or are missing."""
    lead = draw(st.lists(st.integers(1, 2), max_size=2).map(tuple))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length = st.integers(0, 5) | st.integers(1, 40)
    leads = (narrowed(draw, lead) for _ in range(3))
    n_q, n_k, d_k, d_v = draw(length), draw(length), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    return Sizes(*leads, kv_heads * group, kv_heads, n_q, n_k, d_k, d_v)


def narrowed(draw, shape):
    """Return a shape that broadcasts to ``shape``: some axes one, some of the first left out."""
    kept = [size if draw(st.booleans()) else 1 for size in shape]
    return tuple(kept[draw(st.integers(0, len(kept))) :])


def per_item(draw, rng, lead, low, high):
    """Return an integer, a 0-d array or one for each batch entry."""
    shape = draw(st.sampled_from([None, (), narrowed(draw, lead), lead]))
    return int(rng.integers(low, high)) if shape is None else np.asarray(rng.integers(low, high, shape), np.int32)


def draw_arguments(draw, rng, sizes):
    """Draw any combination of the arguments."""
    scores, lead = sizes.scores, sizes.lead

    def bias():
        x = np.asarray(rng.standard_normal(narrowed(draw, scores)))
        return np.where(rng.random(x.shape) < draw(st.sampled_from([0, 0.2])), -np.inf, x)

    limit = st.none() | st.integers(0, 45)
    recipes = {
        "mask": lambda: np.asarray(rng.random(narrowed(draw, scores)) < draw(st.sampled_from([0.3, 0.9]))),
        "bias": bias,
        "causal": lambda: True,
        "q_offset": lambda: per_item(draw, rng, lead, -sizes.n_q - 1, sizes.n_k + 3),
        "window": lambda: (draw(limit), draw(limit)),
        "key_lengths": lambda: per_item(draw, rng, lead, 0, sizes.n_k + 1),
        "segment_ids": lambda: tuple(
            np.sort(rng.integers(0, 3, (*narrowed(draw, lead), n)), axis=-1).astype(np.int32)
            for n in (sizes.n_q, sizes.n_k)
        ),
        "scale": lambda: draw(st.sampled_from([0.1, 1.0, -0.7, 0.0])),
        "softcap": lambda: draw(st.sampled_from([0.5, 3.0, 30.0])),
        "sinks": lambda: rng.standard_normal(sizes.heads),
        "dropout": lambda: draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(recipes))))
    return {name: recipes[name]() for name in sorted(chosen)}


def native(x, make, dtype):
    if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
        return tuple(native(part, make, dtype) for part in x)
    if not isinstance(x, np.ndarray):
        return x
    return make(x, dtype if x.dtype.kind == "f" else x.dtype.name)


def host(x, to_np):
    """Return the values of an array, so that the reference has the same inputs."""
    return to_np(x).astype(np.float64)


def size_of(expected):
    """Return the largest magnitude, one at least: a result may be zero by mathematics, but its terms are near one."""
    return max(1.0, float(np.max(np.abs(np.where(np.isfinite(expected), expected, 0.0)), initial=0.0)))


@pytest.fixture(scope="session")
def all_sizes(target):
    return st.sampled_from(FEW) if lacking(target, "any_shape") else any_sizes()


TILES = {
    "numpy": {"polyattn_numpy._layout": {"ROWS": 5, "COLUMNS": 8, "SCORES": 40}},
    "torch": {"polyattn_torch._kernel": {"MASKED": 64, "LEAST": 2}},
    "jax": {"polyattn_jax._tiles": {"SIDE": 8, "SCORES": 64, "FEW": 2}},
}


@pytest.fixture(autouse=True, scope="module")
def small_tiles(backend, contract):
    """Make the tiles of every kernel so small that most problems need several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(contract), "kernels", in_tiles(contract, 5, 8))
        for module, constants in TILES.get(backend, {}).items():
            for name, value in constants.items():
                patch.setattr(importlib.import_module(module), name, value)
        yield


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_arguments(data, seed, all_sizes, contract, make, to_np, dtypes):
    """Each kernel that supports a problem agrees with the reference; if one declines, another runs."""
    rng, sizes = np.random.default_rng(seed), data.draw(all_sizes)
    dtype, other = (data.draw(st.sampled_from(dtypes)) for _ in range(2))  # other: of bias and sinks
    lse_dtype = "float64" if dtype == "float64" else "float32"
    arguments = draw_arguments(data.draw, rng, sizes)
    shapes = {
        "q": (*sizes.q, sizes.heads, sizes.n_q, sizes.d_k),
        "k": (*sizes.k, sizes.kv_heads, sizes.n_k, sizes.d_k),
        "v": (*sizes.v, sizes.kv_heads, sizes.n_k, sizes.d_v),
    }
    inputs = [make(rng.standard_normal(shape), dtype) for shape in shapes.values()]
    dout = make(rng.standard_normal((*sizes.scores[:-1], sizes.d_v)), dtype)
    dlse = make(rng.standard_normal(sizes.scores[:-1]), lse_dtype) if data.draw(st.booleans()) else None
    given_ = {name: native(x, make, other) for name, x in arguments.items()}
    if "dropout" in arguments:
        given_["seed"] = make(seed, "uint32") if data.draw(st.booleans()) else seed

    held = [host(x, to_np) for x in inputs]
    arguments |= {name: host(given_[name], to_np) for name in ("bias", "sinks") if name in arguments}
    if "dropout" in arguments:
        arguments["keep"] = ref.keep_mask(sizes.scores, arguments["dropout"], seed)
    answer = ref.attention(*held, **arguments)
    upstream = None if dlse is None else host(dlse, to_np)
    slopes = ref.attention_gradients(host(dout, to_np), *held, dlse=upstream, **arguments)

    def check(kernel):
        """Compare all results of a kernel, and return the name of the one that ran."""
        out, cache = pa.attention_forward(*inputs, **given_, kernel=kernel)
        assert_close(to_np(out), answer.out, dtype, what=f"out of {cache.kernel}", scale=size_of(answer.out))
        assert_close(to_np(cache.lse), answer.lse, lse_dtype, what=f"lse of {cache.kernel}", scale=size_of(answer.lse))
        grads = pa.attention_backward(dout, cache, dlse)
        for name, gradient, slope in zip(grads._fields, grads, slopes, strict=True):
            assert (gradient is None) == (slope is None)
            if gradient is not None:
                coarser = max(dtype, other if name in ("bias", "sinks") else dtype, key=TOLERANCES.__getitem__)
                assert dtype_name(gradient.dtype) == (other if name in ("bias", "sinks") else dtype)
                what = f"gradient of {name}, {cache.kernel}"
                # In 16 bits out is rounded before the backward reads it, and that adds up over the rows.
                scale = size_of(slope) * (4 if TOLERANCES[dtype] > 1e-3 else 1)
                assert_close(to_np(gradient), slope, coarser, what=what, scale=scale)
        return cache.kernel

    ran, refused = [], []
    for kernel in dict.fromkeys(kernel.name for kernel in candidates(contract.kernels)):
        try:
            assert check(kernel) == kernel
            ran.append(kernel)
        except pa.KernelUnsupportedError:
            refused.append(kernel)
    assert {"tiled", "plain"} <= {*ran}
    assert check(None) == ran[0]


@pytest.mark.parametrize("lead", [(2,), (1, 1)], ids=str)
def test_values_with_axes_of_their_own(lead, contract, make, to_np):
    """Leading axes of the values alone: the weights are the same for all."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((*axes, 2, n, 3)) for axes, n in (((1,), 20), ((1,), 24), (lead, 24), (lead, 20))
    )
    slopes = ref.attention_gradients(dout, q, k, v)
    for kernel in candidates(contract.kernels):
        try:
            out, cache = pa.attention_forward(make(q), make(k), make(v), kernel=kernel.name)
        except pa.KernelUnsupportedError:
            continue  # a fused kernel may leave them to the generic one, which never declines
        assert_close(to_np(out), ref.attention(q, k, v).out, what=f"out of {kernel.name}")
        for name, gradient in zip("qkv", pa.attention_backward(make(dout), cache)[:3], strict=True):
            assert_close(to_np(gradient), getattr(slopes, name), what=f"gradient of {name}, {kernel.name}")
