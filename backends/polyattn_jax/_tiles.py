"""The tiles of the scan kernel: their sizes, and one query tile with its range of key tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array

from ._operands import Operands, wide

__all__ = ["Allowed", "QueryTile", "Tiles", "loop", "put", "tiles_of"]

Allowed = Callable[[], Array] | None
"""A function that returns the allowed pairs of a tile, ``(1 or heads, 1 or rows, 1 or n_k)``; None if all are."""

SIDE = 512
"""Rows and keys of a tile. On the CPU, XLA's products are half as fast for smaller tiles, no faster for larger ones."""
SCORES = 2**19
"""Scores of one step, over the key heads that are computed together: two such tiles; a single tile is slower."""
FEW = 16
"""The most rows that are computed with all keys at once: their scores are small compared with a copy of the keys."""
SMALL = 2**10
"""Keys of a small tile, over all its heads."""


class Span(NamedTuple):
    """An axis of length n in tiles of equal length. If the length does not divide n, the last two tiles overlap."""

    n: int
    length: int

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.n // self.length)

    @property
    def overlaps(self) -> bool:
        """Whether the last tile overlaps the one before."""
        return self.n % self.length != 0

    def start(self, number: Any) -> Any:
        """Return the start of a tile."""
        start = number * self.length
        return jnp.minimum(start, self.n - self.length) if self.overlaps else start


class Tiles(NamedTuple):
    """The tiles of a problem; ``heads`` is the number of key heads that are computed together."""

    queries: Span
    keys: Span
    heads: int


def tiles_of(x: Operands, *, small: bool = False) -> Tiles:
    """Return tiles chosen by the shapes. For few rows one tile holds all keys, or few keys if ``small``."""
    n_q, (u, n_k, _) = x.q.shape[1], x.k.shape
    if n_q * x.shared <= FEW:
        keys = _even(n_k, SMALL // 8 if small else n_k)
        return Tiles(Span(n_q, n_q), keys, _divisor(u, SMALL // keys.length if small else u))
    queries = _even(n_q, max(SIDE // x.shared, 64))
    rows = queries.length * x.shared
    room = SCORES // (rows * min(n_k, SIDE))
    heads = _divisor(u, room)
    return Tiles(queries, _even(n_k, max(SCORES // (rows * heads), 64)), heads)


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most ``most``, and at least 1."""
    return max(m for m in range(1, max(min(most, n), 1) + 1) if n % m == 0)


def _even(n: int, most: int) -> Span:
    """Return the fewest tiles with lengths of at most ``most``, with little overlap."""
    return Span(n, -(-n // -(-n // most)))


class QueryTile(NamedTuple):
    """A tile of queries, for the key heads that start at ``head``.

    The rows of a key head are the queries of all its query heads. With ``once``, queries that are in the
    previous tile too are excluded, so that no pair counts twice.
    """

    x: Operands
    tiles: Tiles
    head: Any
    number: Any
    once: bool = False

    @property
    def at(self) -> tuple[Any, Any]:
        """The start of the tile in an array by query head and query."""
        return self.head * self.x.shared, self.tiles.queries.start(self.number)

    def rows(self, y: Array) -> Array:
        """Return the tile's part ``(heads, rows, …)`` of an array ``(h, n_q, …)``, in float32 at least."""
        part = take(y, self.at, (self.tiles.heads * self.x.shared, self.tiles.queries.length))
        return wide(part).reshape(self.tiles.heads, -1, *y.shape[2:])

    @property
    def value_unit(self) -> Array:
        """The divisors of the values of the tile's heads, two factors: ``(heads, 1, 1, 2)``."""
        return take(self.x.value_units, (self.head,), (self.tiles.heads,))[:, None, None, :]

    def by_query_head(self, part: Array) -> Array:
        """Reverse :meth:`rows`: return ``(heads · shared, n_q, …)``."""
        return part.reshape(len(part) * self.x.shared, -1, *part.shape[2:])

    def keys(self, j: Any) -> tuple[Array, Array]:
        """Return keys and values of a key tile, ``(heads, n_k, d)``, in float32 at least."""
        at, sizes = (self.head, self.tiles.keys.start(j)), (self.tiles.heads, self.tiles.keys.length)
        return wide(take(self.x.k, at, sizes)), wide(take(self.x.v, at, sizes))

    def over_keys(self, body: Callable[[Any, Any, Allowed], Any], carry: Any) -> Any:
        """Run ``carry = body(key tile, carry, allowed)`` for the key tiles that may contain an allowed pair."""

        def whole(j: Any, carry: Any) -> Any:
            return body(j, carry, None)

        def partial(j: Any, carry: Any) -> Any:
            return body(j, carry, lambda: self.allowed(j))

        step = partial if self.excluding else whole
        if self.tiles.keys.tiles == 1 or not self.excluding:
            return loop(self.tiles.keys.tiles, step, carry)
        first, first_whole, past_whole, past = self._bounds()
        if not self._by_pair:
            carry = lax.fori_loop(first_whole, past_whole, whole, carry)
        before = first_whole - first  # the partial tiles before and after the whole tiles follow

        def around(i: Any, carry: Any) -> Any:
            return partial(i + jnp.where(i < before, first, past_whole - before), carry)

        return lax.fori_loop(np.int32(0), before + past - past_whole, around, carry)

    @property
    def _by_pair(self) -> bool:
        """Whether any pair may be excluded individually, so that no key tile is known to be whole."""
        return self.x.mask is not None or self.x.q_segments is not None

    @property
    def _fresh(self) -> bool:
        return self.once and self.tiles.queries.overlaps

    @property
    def excluding(self) -> bool:
        """Whether any pair can be excluded."""
        by_position = any(y is not None for y in (self.x.least, self.x.most, self.x.lengths))
        return by_position or self._by_pair or self._fresh or self.tiles.keys.overlaps

    def _bounds(self) -> tuple[Any, Any, Any, Any]:
        """Return the range of key tiles and, inside it, the range of whole ones: first, first whole, two stops."""
        x, (queries, keys, heads) = self.x, self.tiles
        first = first_whole = np.int32(0)
        past, past_whole = np.int32(keys.tiles), np.int32(keys.tiles - keys.overlaps)
        start = queries.start(self.number)
        last = start + queries.length - 1
        if x.lengths is not None:
            lengths = take(x.lengths, (self.head,), (heads,))
            past = jnp.minimum(past, -(-jnp.max(lengths) // keys.length))
            past_whole = jnp.minimum(past_whole, jnp.min(lengths) // keys.length)
        if x.most is not None:
            most = take(x.most, (self.head,), (heads,))
            past = jnp.minimum(past, (jnp.max(most) + last) // keys.length + 1)
            past_whole = jnp.minimum(past_whole, (jnp.min(most) + start + 1) // keys.length)
        if x.least is not None:
            least = take(x.least, (self.head,), (heads,))
            first = jnp.maximum(first, (jnp.min(least) + start) // keys.length)
            first_whole = jnp.maximum(first_whole, -(-(jnp.max(least) + last) // keys.length))
        if self._fresh:
            past_whole = jnp.where(self.number == queries.tiles - 1, 0, past_whole)
        past = jnp.maximum(past, first)
        first_whole = jnp.clip(first_whole, first, past)
        return first, first_whole, first_whole if self._by_pair else jnp.clip(past_whole, first_whole, past), past

    def allowed(self, j: Any) -> Array:
        """Return the allowed pairs of a key tile, ``(1 or heads, 1 or rows, 1 or n_k)``."""
        x, (queries, keys, heads) = self.x, self.tiles
        start, key_start = queries.start(self.number), keys.start(j)
        row = start + self._repeated(jnp.arange(queries.length, dtype=np.int32)[None])[..., None]  # (1, rows, 1)
        key = key_start + jnp.arange(keys.length, dtype=np.int32)[None, None, :]  # (1, 1, n_k)

        def each(value: Array) -> Array:
            return take(value, (self.head,), (heads,))[:, None, None]

        conditions = [
            key >= j * keys.length if keys.overlaps else None,
            row >= self.number * queries.length if self._fresh else None,
            None if x.lengths is None else key < each(x.lengths),
            None if x.most is None else key - row <= each(x.most),
            None if x.least is None else key - row >= each(x.least),
            None if x.q_segments is None else self._same_segment(start, key_start),
            None if x.mask is None else self._mask(x.mask, start, key_start),
        ]
        result = jnp.ones((1, 1, 1), dtype=bool)
        for condition in conditions:
            result = result if condition is None else result & condition
        return result

    def _same_segment(self, start: Any, key_start: Any) -> Array:
        of_queries = take(self.x.q_segments, (self.head, start), (self.tiles.heads, self.tiles.queries.length))
        of_keys = take(self.x.k_segments, (self.head, key_start), (self.tiles.heads, self.tiles.keys.length))
        return self._repeated(of_queries)[:, :, None] == of_keys[:, None, :]

    def _mask(self, masks: Array, start: Any, key_start: Any) -> Array:
        """Return the mask of the tile, ``(1 or heads, rows, 1 or n_k)``."""
        x, (queries, keys, heads) = self.x, self.tiles
        count, rows, columns = masks.shape
        starts = (0 if rows == 1 else start, 0 if columns == 1 else key_start)
        sizes = (1, min(rows, queries.length), min(columns, keys.length))

        def one(number: Any) -> Array:
            return take(masks, (number, *starts), sizes)[0]

        if count == 1:
            mask = one(0)[None, None]  # (1, 1, 1 or n_q, 1 or n_k)
        else:
            numbers = take(x.mask_of, (self.head * x.shared,), (heads * x.shared,)).reshape(heads, x.shared)
            mask = jax.vmap(jax.vmap(one))(numbers)  # (heads, shared, 1 or n_q, 1 or n_k)
        mask = jnp.broadcast_to(mask, (len(mask), x.shared, queries.length, mask.shape[3]))
        return mask.reshape(len(mask), -1, mask.shape[3])

    def _repeated(self, y: Array) -> Array:
        """Repeat values of the queries, ``(·, n_q)``, for the rows: ``(·, shared · n_q)``."""
        return jnp.tile(y, (1, self.x.shared))


def take(x: Any, starts: tuple[Any, ...], sizes: tuple[int, ...]) -> Array:
    """Return a slice of an array: ``starts`` and ``sizes`` are for its first axes, the other axes are whole."""
    rest = x.shape[len(starts) :]
    return lax.dynamic_slice(x, _indices(starts, len(rest)), (*sizes, *rest))


def put(x: Array, part: Array, starts: tuple[Any, ...]) -> Array:
    """Return a copy of an array with ``part`` written at ``starts``, in the dtype of the array."""
    return lax.dynamic_update_slice(x, part.astype(x.dtype), _indices(starts, x.ndim - len(starts)))


def _indices(starts: tuple[Any, ...], rest: int) -> list[Any]:
    return [jnp.asarray(start, dtype=np.int32) for start in (*starts, *(0,) * rest)]


def loop(length: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Run ``carry = body(i, carry)`` for each i below ``length``; without a loop if ``length`` is 1."""
    return body(np.int32(0), carry) if length == 1 else lax.fori_loop(np.int32(0), np.int32(length), body, carry)
