"""torch.nn.functional.scaled_dot_product_attention with torch's flash kernel alone."""

from torch.nn.attention import SDPBackend

from .torch_sdpa import ARRAYS, by_kernel

__all__ = ["ARRAYS", "attention"]

attention = by_kernel(SDPBackend.FLASH_ATTENTION)
