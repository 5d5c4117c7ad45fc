"""polyattn in a torch model: attention and layers with gradients by autograd, and conversion of torch's own layers.

Importing this imports torch. ``torch.compile`` compiles the modules of :func:`to_module`, and every function and layer
of polyattn, into one graph. The selected backend is the one selected when torch compiles.
"""

from ._attention import attention
from ._modules import LayerModule, to_module
from ._weights import copy_to, from_module

__all__ = ["LayerModule", "attention", "copy_to", "from_module", "to_module"]
