"""The lengths of the entries of a cache: NumPy integers if their values are known, else integers of the library."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..backend import Array, Place
from ..errors import ArgumentError
from ..functional._arguments import static_integer
from ..functional._checks import shown
from ..kernels import cast


def known(counts: Array, place: Place) -> NDArray[np.int32] | None:
    """Return the lengths as NumPy integers, or None if they are traced or on a device."""
    if isinstance(counts, np.ndarray):
        return counts
    return place.backend.to_numpy(counts) if place.backend.state(counts).readable else None


def native(x: Any, place: Place) -> Any:
    """Return integers as int32 of the cache's library; a Python integer is returned as it is."""
    if isinstance(x, int):
        return x
    xp, device = place.backend.namespace(), place.backend.native_device(place.device)
    if isinstance(x, np.ndarray):
        return xp.asarray(x.tolist(), dtype=xp.int32, device=device)
    return cast(xp, x, xp.int32)


def grown(counts: Array, n: int, capacity: int, place: Place) -> Array:
    """Return the lengths after n more positions, or raise if they exceed the capacity."""
    held = known(counts, place)
    if held is None:
        return counts + n
    longest = int(held.max())
    if longest + n > capacity:
        raise ArgumentError(
            f"k: expected at most {max(capacity - longest, 0)} more positions, since the cache holds {longest} of "
            f"{capacity}, got {n}"
        )
    return np.asarray(held + n, dtype=np.int32)


def rewound(counts: Array, name: str, given: Any, place: Place) -> Array:
    """Return the lengths minus ``n``, or the given ``lengths``; raise if one is below 0 or above the old length."""
    value, held = _integers(name, given, counts.shape[0]), known(counts, place)
    if held is None or not isinstance(value, int | np.ndarray):
        counts, value = native(counts, place), native(value, place)
        return counts * 0 + value if name == "lengths" else counts - value
    kept = np.asarray(held * 0 + value if name == "lengths" else held - value, dtype=np.int32)
    if (kept < 0).any() or (kept > held).any():
        raise ArgumentError(f"{name}: expected no more than the cache holds, {held.tolist()}, got {shown(given)}")
    return kept


def _integers(name: str, x: Any, batch: int) -> Any:
    """Return an argument as a Python integer, NumPy integers or, if traced, integers of the library."""
    static = static_integer(name, x, (batch,))
    if static is not None:
        return static
    backend = registry.owner(x, name)
    return backend.to_numpy(x) if backend.state(x).captive is None else x
