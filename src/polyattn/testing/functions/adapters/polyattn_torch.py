"""polyattn on torch."""

import polyattn

from ._polyattn import attention, backward

__all__ = ["ARRAYS", "VERSION", "attention", "backward"]

ARRAYS = "torch"
VERSION = polyattn.__version__
