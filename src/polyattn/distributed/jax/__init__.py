"""Attention on a sequence that is sharded along an axis of a mesh of JAX.

Importing this imports JAX.
"""

from ._attention import attention, positions

__all__ = ["attention", "positions"]
