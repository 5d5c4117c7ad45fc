"""polyattn in a torch model: attention and layers that autograd goes through, and torch's own layers as ours.

Importing this imports torch. ``torch.compile`` takes what :func:`to_module` returns into one graph, as it does every
function and layer of polyattn; the selection is the one in force when torch compiles.
"""

from ._attention import attention
from ._modules import LayerModule, to_module
from ._weights import copy_to, from_module

__all__ = ["LayerModule", "attention", "copy_to", "from_module", "to_module"]
