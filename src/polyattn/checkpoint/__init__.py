"""Named arrays in one safetensors file, or in several with an index, written atomically.

Reading never executes code from a file, and needs no array library but NumPy. The metadata include a digest of the
content, by which a damaged file is detected; other readers ignore it.
"""

from ._read import read_tensors
from ._shards import write_shards
from ._write import LEFTOVERS, write_bytes, write_tensors

__all__ = ["LEFTOVERS", "read_tensors", "write_bytes", "write_shards", "write_tensors"]
