"""The native kernel on torch's CPU tensors: the same errors as torch's own attention, and what torch follows."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyattn as pa
from polyattn_native import status

pytestmark = pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here")
SHAPES = [((2, 3, 70, 16), (2, 3, 70, 16)), ((1, 4, 600, 64), (1, 4, 700, 64)), ((1, 2, 3, 17), (1, 2, 130, 33))]


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def error(found, expected):
    return float((found.double() - expected).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_errors_are_like_torchs(shapes, causal, dtype):
    q_shape, k_shape = shapes
    q, k, v = tensors(q_shape, (*k_shape[:-1], q_shape[-1]), k_shape, dtype=dtype)
    mask = torch.ones(q_shape[-2], k_shape[-2], dtype=torch.bool).tril(k_shape[-2] - q_shape[-2]) if causal else None
    want = sdpa(*(x.double() for x in (q, k, v)), attn_mask=mask)
    out, cache = pa.attention_forward(q, k, v, causal=causal)
    assert (cache.kernel, out.dtype) == ("native", dtype)
    least = torch.finfo(dtype).eps * float(want.abs().max())
    assert error(out, want) <= 2 * max(error(sdpa(q, k, v, attn_mask=mask), want), least)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 5.0},
        {"scale": -0.3},
        {"scale": 0.0},
        {"window": (30, 5)},
        {"key_lengths": torch.tensor([5, 301])},
        {"mask": torch.rand(1, 301, generator=torch.Generator().manual_seed(1)) < 0.5},
        {"bias": tensors((6, 1, 301))[0], "sinks": tensors((6,))[0]},
        {"bias": pa.alibi_bias(6), "dropout": 0.2, "seed": 4},
    ],
    ids=str,
)
def test_options_of_narrow_dtypes(arguments, dtype):
    q, k, v = tensors((2, 6, 50, 15), (2, 2, 301, 15), (2, 2, 301, 7), dtype=dtype)
    given = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in arguments.items()}
    out, cache = pa.attention_forward(q, k, v, kernel="native", **given)
    wide = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in given.items()}
    want, want_cache = pa.attention_forward(*(x.double() for x in (q, k, v)), kernel="plain", **wide)
    assert error(out, want) <= 2 * torch.finfo(dtype).eps * float(want.abs().max())
    assert error(cache.lse, want_cache.lse) <= 2e-5


def test_views_of_tensors():
    q, k, v = tensors((2, 40, 3, 16), (1, 50, 3, 16), (2, 3, 16, 50), dtype=torch.bfloat16)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2).expand(2, 3, 50, 16), v.mT
    out = pa.attention(q, k, v, kernel="native")
    assert torch.equal(out, pa.attention(*(x.contiguous() for x in (q, k, v)), kernel="native"))


def test_values_that_are_not_finite():
    q, k, v = tensors((1, 9, 8), (1, 70, 8), (1, 70, 8), dtype=torch.bfloat16)
    v[0, 3, 2] = k[0, 4, 1] = torch.nan
    mask = torch.ones(70, dtype=torch.bool)
    mask[3:5] = False
    assert pa.attention(q, k, v, mask=mask, kernel="native").isfinite().all()
    assert pa.attention(q, k, v, kernel="native").isnan().any()


def test_the_number_of_threads_is_torchs(monkeypatch):
    q, k, v = tensors(*[(8, 300, 64)] * 3)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert pa.attention(q, k, v).isfinite().all()
    finally:
        torch.set_num_threads(before)


def test_a_negation_of_torch_that_is_not_computed_yet():
    """A view of the imaginary part of a conjugate has its sign beside its memory, which the library reads."""
    q, k, v, dout = tensors((1, 4), (3, 4), (3, 2), (1, 2))
    dlse = torch.tensor([0.7])
    negated = torch.complex(torch.zeros(1), -dlse).conj().imag
    assert negated.is_neg()
    _, cache = pa.attention_forward(q, k, v, kernel="native")
    found, want = (pa.attention_backward(dout, cache, x) for x in (negated, dlse))
    assert all(torch.equal(x, y) for x, y in zip(found[:3], want[:3], strict=True))
