"""polyattn in a torch model: attention and layers that autograd goes through, and torch's own layers as ours.

Importing this imports torch.
"""

from ._attention import attention
from ._modules import LayerModule, to_module
from ._weights import copy_to, from_module

__all__ = ["LayerModule", "attention", "copy_to", "from_module", "to_module"]
