"""Key-value caches for decoding: three classes with the same methods.

:class:`KVCache` has a fixed capacity for each entry of the batch. :class:`PagedKVCache` shares a pool of pages among
entries of very different lengths. :class:`SlidingKVCache` keeps the last positions of a sequence of any length.
"""

from __future__ import annotations

from ._cache import KVCache
from ._paged import PagedKVCache
from ._sliding import SlidingKVCache

__all__ = ["KVCache", "PagedKVCache", "SlidingKVCache"]
