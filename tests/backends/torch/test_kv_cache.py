"""The cache on torch, which writes it in place."""

import numpy as np
import torch

import polyattn as pa
from polyattn.testing import references as ref

RNG = np.random.default_rng(6)
HEADS, KV_HEADS, N, D, KEYS = 4, 2, 6, 16, 4096
Q = RNG.standard_normal((2, HEADS, N, D)).astype(np.float32)
K, V = (RNG.standard_normal((2, KV_HEADS, N, D)).astype(np.float32) for _ in range(2))


def test_torch_writes_in_place():
    cache = pa.KVCache.create(2, KV_HEADS, 4096, D, backend="torch")
    addresses = cache.keys.data_ptr(), cache.values.data_ptr()
    for i in range(N):
        q, k, v = (torch.from_numpy(x[:, :, i : i + 1].copy()) for x in (Q, K, V))
        cache = cache.append(k, v)
        out = cache.attention(q)
        want = ref.attention(Q[:, :, i : i + 1], K[:, :, : i + 1], V[:, :, : i + 1]).out
        np.testing.assert_allclose(out.numpy(), want, atol=1e-6)
    cache = cache.rewind(torch.tensor([0, 2])).append(k, v)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.lengths.tolist() == [7, 5]


def test_torch_copies_nothing_at_4096_keys(full):
    """Every byte that a step takes from torch's allocator, freed again or not, is less than half of the keys."""
    cache, (q, k, v) = full("torch"), (torch.ones(1, heads, 1, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    addresses, size = (cache.keys.data_ptr(), cache.values.data_ptr()), cache.keys.nbytes
    cache = cache.append(k, v)
    cache.attention(q)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        cache = cache.append(k, v)
        cache.attention(q)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < taken < size // 2
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.position == KEYS + 2


def test_torch_differentiates_through_it(create, kind):
    cache = create(kind, 2, 8, backend="torch", dtype="float64")
    q, k, v = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V))
    for start, stop in ((0, 4), (4, 6)):
        cache = cache.append(k[:, :, start:stop], v[:, :, start:stop])
    cache.attention(q).sum().backward()
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v)):
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-10)


def test_torch_differentiates_through_pages_read_in_groups(monkeypatch):
    """Sinks and a bias too; the last group begins before its turn, and what it has twice counts once."""
    monkeypatch.setattr("polyattn.kv_cache._paged.NUMBERS", 2 * HEADS * N * 2 * D)
    cache = pa.PagedKVCache.create(2, KV_HEADS, 10, 2, D, backend="torch", dtype="float64")
    rng = np.random.default_rng(7)
    bias, sinks = rng.standard_normal((HEADS, N, 20)), rng.standard_normal(HEADS)
    q, k, v, b, s = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V, bias, sinks))
    spare = torch.zeros(2, KV_HEADS, 3, D, dtype=torch.float64)
    cache = cache.append(k, v).append(spare, spare).rewind(torch.tensor([3, 3]))
    cache.attention(q, bias=b, sinks=s).sum().backward()
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True, bias=bias[..., :N], sinks=sinks)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v), (s, want.sinks)):
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(b.grad.numpy()[..., :N], want.bias, atol=1e-10)
