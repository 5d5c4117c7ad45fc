"""Keys and values kept for decoding."""

from __future__ import annotations

from ._cache import KVCache

__all__ = ["KVCache"]
