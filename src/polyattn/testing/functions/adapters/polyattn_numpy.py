"""polyattn on numpy."""

import polyattn

from ._polyattn import attention, backward

__all__ = ["ARRAYS", "VERSION", "attention", "backward"]

ARRAYS = "numpy"
VERSION = polyattn.__version__
