"""polyattn on jax."""

import polyattn

from ._polyattn import attention, backward

__all__ = ["ARRAYS", "VERSION", "attention", "backward"]

ARRAYS = "jax"
VERSION = polyattn.__version__
