"""Named arrays in safetensors files, in one or in several with an index, written whole or not at all.

Nothing in a file is ever executed, and no library but NumPy is needed to read one. The metadata hold a digest of
the content, so that a file whose bits have changed since is not taken for good; other readers pass over it.
"""

from ._read import read_tensors
from ._shards import write_shards
from ._write import LEFTOVERS, write_bytes, write_tensors

__all__ = ["LEFTOVERS", "read_tensors", "write_bytes", "write_shards", "write_tensors"]
