"""polyattn on array-api-strict."""

import polyattn

from ._polyattn import attention, backward

__all__ = ["ARRAYS", "VERSION", "attention", "backward"]

ARRAYS = "array-api-strict"
VERSION = polyattn.__version__
