"""Keys and values kept for decoding, in three kinds with one use.

:class:`KVCache` has a fixed capacity for each entry. :class:`PagedKVCache` shares one pool among entries of very
different lengths. :class:`SlidingKVCache` keeps the last positions of a text without end.
"""

from __future__ import annotations

from ._cache import KVCache
from ._paged import PagedKVCache
from ._sliding import SlidingKVCache

__all__ = ["KVCache", "PagedKVCache", "SlidingKVCache"]
