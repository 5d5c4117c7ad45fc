"""Random sequences of calls on key-value caches.

A sequence appends, rewinds, copies and reads caches of each kind, on arrays of every library. Each cache is compared
with plain lists of all keys and values that it was given.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from arrays_in_memory import Given, given, opened
from attention_reference import attention

import polyattn as pa
from polyattn.testing import assert_close

KINDS = {"contiguous": pa.KVCache, "paged": pa.PagedKVCache, "sliding": pa.SlidingKVCache}


@dataclass
class Entry:
    """What one entry of the batch was given: keys (H_kv, n, d_k) and values, and the most positions it ever held."""

    k: np.ndarray
    v: np.ndarray
    most: int = 0

    def appended(self, k, v):
        return Entry(
            np.concatenate([self.k, k], 1), np.concatenate([self.v, v], 1), max(self.most, len(self) + k.shape[1])
        )

    def shortened(self, n):
        return Entry(self.k[:, :n], self.v[:, :n], self.most)

    def __len__(self):
        return self.k.shape[1]


@dataclass
class Pair:
    """A cache, and the entries that it should hold."""

    cache: Any
    entries: list[Entry]

    @property
    def lengths(self):
        return np.array([len(entry) for entry in self.entries], dtype=np.int32)


class Sequence:
    """A random sequence of calls on copies of one cache; each call is written to ``log``."""

    def __init__(self, target, kind, seed, index):
        self.target, self.kind, self.draw = target, kind, random.Random(f"{target.name} {kind} {seed} {index}")
        self.rng = np.random.default_rng(self.draw.getrandbits(64))
        self.log = [f"# seed {seed}, sequence {index} of {kind} on {target.name}"]
        self.few = few = target.name == "jax"  # it compiles a program for each new shape
        draw = self.draw
        self.dtype = "float32" if few else draw.choice(target.dtypes)
        batch, kv_heads, self.d_k, self.d_v = (2, 1, 4, 3) if few else (draw.randint(1, 3), draw.randint(1, 2), 4, 3)
        self.heads = kv_heads * (2 if few else draw.randint(1, 3))
        self.window, self.sinks, self.chunk = (
            (4, 1, 3) if few else (draw.randint(1, 6), draw.randint(0, 3), draw.randint(1, 5))
        )
        sizes = {
            "contiguous": {"capacity": 12 if few else draw.randint(1, 20)},
            "paged": {"pages": 6, "page_size": 3}
            if few
            else {"pages": draw.randint(1, 9), "page_size": draw.randint(1, 5)},
            "sliding": {"window": self.window, "sink_tokens": self.sinks, "chunk": self.chunk},
        }[kind]
        options = {
            "batch": batch,
            "kv_heads": kv_heads,
            **sizes,
            "head_dim": self.d_k,
            "value_dim": self.d_v,
            "dtype": self.dtype,
        }
        self.log.append(f"cache = pa.{KINDS[kind].__name__}.create(**{options})")
        empty = [Entry(np.zeros((kv_heads, 0, self.d_k)), np.zeros((kv_heads, 0, self.d_v))) for _ in range(batch)]
        self.shape, self.sizes = (batch, kv_heads), sizes
        self.pairs = [Pair(KINDS[kind].create(**options, backend=target.name), empty)]

    def given(self, x, dtype=None):
        layout = "contiguous" if self.few else None
        return given(self.draw, self.target, x, dtype or self.dtype, layout)

    def step(self):
        """Do one random call on one of the caches, and compare the cache with its entries."""
        pair = self.draw.choice(self.pairs)
        call = self.draw.choices((self.append, self.rewind, self.copy, self.attend, self.misuse), (6, 3, 1, 6, 1))[0]
        self.log.append(f"{call.__name__} on cache {self.pairs.index(pair)} of lengths {pair.lengths.tolist()}")
        call(pair)
        self.check(pair)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def append(self, pair):
        n = 1 if self.few else self.draw.choice((0, 1, 1, 1, 2, 5, 9))
        k, v = (self.given(self.rng.standard_normal((*self.shape, n, d))) for d in (self.d_k, self.d_v))
        self.log.append(f"  append(k={k.source()}, v={v.source()})")
        arrays, old = (k.native(self.target), v.native(self.target)), pair.cache
        if self.fits(pair, n):
            pair.cache = old.append(*arrays)
            pair.entries = [entry.appended(k.values[i], v.values[i]) for i, entry in enumerate(pair.entries)]
            self.consumed(old)
        else:
            with pytest.raises(pa.ArgumentError, match="k: expected"):
                old.append(*arrays)

    def fits(self, pair, n):
        if self.kind == "contiguous":
            return max(pair.lengths) + n <= self.sizes["capacity"]
        if self.kind == "paged":
            return sum(-(-(m + n) // self.sizes["page_size"]) for m in pair.lengths.tolist()) <= self.sizes["pages"]
        return True

    def rewind(self, pair):
        lengths, old = pair.lengths, pair.cache
        n = self.rng.integers(0, self.draw.choice((2, 4, 30)), lengths.shape)
        if self.draw.random() < 0.5:
            n[:] = n[0]
        if self.kind != "sliding":
            n = n if self.draw.random() < 0.1 else np.minimum(n, lengths)
        kept = lengths - n
        name, value = self.draw.choice((("n", n), ("lengths", kept)))
        plain = (value == value[0]).all() and self.draw.random() < 0.7
        argument = int(value[0]) if plain else Given(value, self.draw.choice(("int32", "int64"))).native(self.target)
        self.log.append(f"  rewind({name}={value.tolist()}, {'an integer' if plain else 'an array'})")
        try:
            pair.cache = old.rewind(**{name: argument})
        except pa.ArgumentError as error:
            if self.must_rewind(pair, kept) or not str(error).startswith(f"{name}: expected"):
                raise
        else:
            assert (kept >= 0).all(), f"rewound to {kept.tolist()}"
            pair.entries = [entry.shortened(m) for entry, m in zip(pair.entries, kept.tolist(), strict=True)]
            self.consumed(old)

    def must_rewind(self, pair, kept):
        """Return whether a rewind to these lengths has to work: a sliding cache holds the last positions."""
        enough = all(
            self.kind != "sliding" or entry.most - m <= self.chunk for entry, m in zip(pair.entries, kept, strict=True)
        )
        return (kept >= 0).all() and enough

    def copy(self, pair):
        self.pairs.append(Pair(pair.cache.copy(), list(pair.entries)))
        if len(self.pairs) > 3:
            del self.pairs[self.draw.randrange(3)]

    def consumed(self, old):
        if old.in_place:
            with pytest.raises(pa.ArgumentError, match="consumes"):
                old.append(None, None)

    def misuse(self, pair):
        """Wrong arguments raise and leave the cache as it is."""
        k, v = (self.target.make(np.zeros((*self.shape, 1, d)), self.dtype) for d in (self.d_k, self.d_v))
        cache, wrong = pair.cache, self.target.make(np.zeros((*self.shape, 1, self.d_k + 1)), self.dtype)
        calls = [
            ("k", lambda: cache.append(wrong, v), pa.ShapeError),
            ("v", lambda: cache.append(k, wrong), pa.ShapeError),
            ("k", lambda: cache.append(self.target.make(np.zeros(k.shape), "int32"), v), pa.DTypeError),
            ("k", lambda: cache.append(None, v), pa.BackendMismatchError),
            ("n", lambda: cache.rewind(), pa.ArgumentError),
            ("n", lambda: cache.rewind(1, lengths=1), pa.ArgumentError),
            ("n", lambda: cache.rewind(0.5), pa.DTypeError),
            ("lengths", lambda: cache.rewind(lengths=-1), pa.ArgumentError),
            ("lengths", lambda: cache.rewind(lengths=10**6), pa.ArgumentError),
            ("q", lambda: cache.attention(None), pa.BackendMismatchError),
        ]
        if self.kind != "sliding":  # which first looks whether it holds the keys of the query
            mask = np.ones(cache.capacity + 2, bool)
            calls.append(("mask", lambda: cache.attention(k, mask=mask), pa.ShapeError))
        name, call, error = self.draw.choice(calls)
        with pytest.raises(error, match=rf"^{name}\b"):
            call()

    # ---- attention -------------------------------------------------------------------------------------------------

    def attend(self, pair):
        draw, capacity = self.draw, pair.cache.capacity
        n_q = 1 if self.few else draw.choice((1, 1, 2, 3, 5))
        q = self.given(self.rng.standard_normal((self.shape[0], self.heads, n_q, self.d_k)))
        recipes = {"causal": (True, False), "scale": (None, 0.3), "softcap": (None, 2.0)}
        options = {name: draw.choice(values) for name, values in recipes.items() if draw.random() < 0.4}
        arrays = {}
        if self.few:
            options = {}
        elif draw.random() < 0.3:
            shape = (
                *draw.choice(((), (self.shape[0], 1), (self.heads,))),
                draw.choice((1, n_q)),
                draw.choice((1, capacity)),
            )
            arrays["mask"] = self.given(self.rng.random(shape) < 0.7, "bool")
        if draw.random() < 0.3 and not self.few:
            shape = (*draw.choice(((), (self.shape[0], 1), (self.heads,))), 1, capacity)
            arrays["bias"] = self.given(self.rng.standard_normal(shape), self.dtype)
        if draw.random() < 0.2 and not self.few:
            arrays["sinks"] = self.given(self.rng.standard_normal(self.heads), self.dtype)
        if self.kind != "sliding" and draw.random() < 0.3 and not self.few:
            options["window"] = draw.choice(((2, None), (3, 1), (0, 0)))
        self.log.append(
            f"  attention({q.source()}, {options}, {[f'{name}={x.source()}' for name, x in arrays.items()]})"
        )
        try:
            out = pair.cache.attention(
                q.native(self.target), **options, **{name: x.native(self.target) for name, x in arrays.items()}
            )
        except pa.ArgumentError:
            if self.kind != "sliding" or all(entry.most - len(entry) + n_q <= self.chunk for entry in pair.entries):
                raise
            return  # keys that a query sees are overwritten
        for i, entry in enumerate(pair.entries):
            want = self.expected(pair, i, entry, q.values[i], {name: x.values for name, x in arrays.items()}, options)
            scale = max(1.0, want.out.terms) * max(1.0, want.spread / 8)
            assert_close(
                self.target.to_np(out)[i], want.out.value, self.dtype, scale=scale, what=f"attention of entry {i}"
            )

    def expected(self, pair, i, entry, q, arrays, options):
        """Return the reference's attention of one entry."""
        n, n_q = len(entry), q.shape[-2]
        slots = np.arange(n)
        options = {"causal": True, **options}
        if self.kind == "sliding":
            slots = np.zeros(
                n, dtype=int
            )  # the place of each position in the memory; positions that are gone have none
            where = self.target.to_np(pair.cache.key_positions)[i]
            for slot, position in enumerate(where.tolist()):
                if position >= 0:
                    slots[position] = slot
        own = {}
        for name, x in arrays.items():
            if name == "sinks":
                own[name] = x
                continue
            x = x[i] if x.ndim == 4 and len(x) > 1 else x[0] if x.ndim == 4 else x
            own[name] = x[..., slots] if x.shape[-1] > 1 else x
        if self.kind == "sliding":
            key, query = np.arange(n), np.arange(n - n_q, n)[:, None]
            own["mask"] = own.get("mask", True) & ((key > query - self.window) | (key < self.sinks))
        return attention(q, entry.k, entry.v, np.zeros((self.heads, n_q, self.d_v)), **own, **options)

    # ---- the state ---------------------------------------------------------------------------------------------------

    def check(self, pair):
        """Compare lengths, position, keys and values."""
        cache, lengths, to_np = pair.cache, pair.lengths, self.target.to_np
        assert to_np(cache.lengths).tolist() == lengths.tolist()
        position = cache.position
        position = [position] * len(lengths) if isinstance(position, int) else to_np(position).tolist()
        assert position == lengths.tolist()
        k, v = (np.asarray(to_np(x), dtype=np.float64) for x in (cache.k, cache.v))
        for i, entry in enumerate(pair.entries):
            if self.kind == "sliding":
                where = to_np(cache.key_positions)[i]
                held = [(slot, p) for slot, p in enumerate(where.tolist()) if p >= 0]
                needed = {p for p in range(len(entry)) if p < self.sinks or p > len(entry) - 1 - self.window}
                assert needed <= {p for _, p in held} or entry.most - len(entry) >= self.chunk
            else:
                held = [(p, p) for p in range(len(entry))]
            for slot, p in held:
                assert np.array_equal(k[i, :, slot], entry.k[:, p]), f"key {p} of entry {i}"
                assert np.array_equal(v[i, :, slot], entry.v[:, p]), f"value {p} of entry {i}"
        if self.kind == "paged":
            used = sum(-(-n // self.sizes["page_size"]) for n in lengths.tolist())
            assert cache.free_pages == self.sizes["pages"] - used


AMOUNTS = {"numpy": (12, 800), "torch": (8, 400), "jax": (1, 30), "array-api-strict": (5, 150)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", AMOUNTS)
def test_sequences(backend, kind, amount, tried, request):
    """After every call a cache holds what it was given, and attention over it is that over the lists."""
    target, count, seed = opened(backend), amount(*AMOUNTS[backend]), request.config.getoption("--seed")
    steps = amount(8, 25) if backend == "jax" else 25
    for index in range(count):
        sequence = Sequence(target, kind, seed, index)
        try:
            for _ in range(steps):
                sequence.step()
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\n" + "\n".join(sequence.log))
    tried(f"calls on {kind} caches on {backend}", count * steps, "each cache holds what it was given")
