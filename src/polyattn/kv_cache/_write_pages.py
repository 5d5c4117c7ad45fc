"""Writing into pages that are not known before the program runs: page after page, each whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..backend import Array, Backend

__all__ = ["writer"]


@functools.lru_cache(maxsize=64)
def writer(backend: Backend, device: str | None) -> Callable[..., tuple[Array, Array]]:
    """Return :func:`_written` as one program, where the library compiles any."""
    return backend.jit(functools.partial(_written, backend, device))


def _written(
    backend: Backend, device: str | None, keys: Array, values: Array, k: Array, v: Array, pages: Array, begins: Array,
    entries: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the memory with new positions written, at each step those of one entry that belong into one page.

    ``begins`` is the number of the new position that a page's first place would hold: it may be negative.
    """
    xp, n = backend.namespace(), int(k.shape[2])
    row = xp.arange(keys.shape[2], dtype=xp.int32, device=backend.native_device(device))

    def one(memory: Any, i: Any) -> tuple[Any, tuple[()]]:
        page, begin, entry = (x[i, ...] for x in (pages, begins, entries))
        number = begin + row  # which of the new positions each place of the page holds
        new, number = xp.logical_and(number >= 0, number < n), xp.clip(number, 0, n - 1)

        def put(x: Array, given: Array) -> Array:
            given = xp.take(given, xp.reshape(entry, (1,)), axis=0)  # (1, H_kv, n, d)
            block = xp.take(x, xp.reshape(page, (1,)), axis=0)  # (1, H_kv, size, d)
            block = xp.where(new[None, None, :, None], xp.take(given, number, axis=2), block)
            return backend.update_slice(x, block, page, 0)

        return (put(memory[0], k), put(memory[1], v)), ()

    (keys, values), _ = backend.scan(one, (keys, values), int(pages.shape[0]))
    return keys, values
