"""Attention on a sequence that the processes of torch.distributed share; with gloo, NCCL or any other transport.

Importing this imports torch.
"""

from ._attention import attention
from ._shards import positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
