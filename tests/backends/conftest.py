"""Caches of keys and values, with which torch's tests and JAX's decode."""

import numpy as np
import pytest

import polyattn as pa

KV_HEADS, D, KEYS = 2, 16, 4096


@pytest.fixture(params=["fixed", "paged", "sliding"])
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def create():
    """Return ``create(kind, batch, room, **where)``: an empty cache for 2 heads of 16 features."""

    def create(kind, batch, room, **where):
        if kind == "paged":
            page = min(64, room // 2)
            return pa.PagedKVCache.create(batch, KV_HEADS, batch * -(-room // page), page, D, **where)
        if kind == "sliding":
            return pa.SlidingKVCache.create(batch, KV_HEADS, room, D, chunk=2, **where)
        return pa.KVCache.create(batch, KV_HEADS, room, D, **where)

    return create


@pytest.fixture
def full(create, kind):
    """Return ``full(backend, batch)``: a cache that holds 4096 positions of each entry, with room for more."""

    def full(backend, batch=1):
        x = np.random.default_rng(9).standard_normal((batch, KV_HEADS, KEYS, D)).astype(np.float32)
        return create(kind, batch, KEYS + 8, backend=backend).append(x, x)

    return full
