"""The masks of transformers' eager attention; the n_q × n_k array is made only when an operation reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import eager_mask, sdpa_mask

Tensor = Any


class EagerMask(torch.Tensor):  # type: ignore[misc]  # torch is Any to the type checker
    """Eager's floating mask (B, 1, n_q, n_k), 0 or the lowest number of the dtype, made when an operation reads it.

    Some models compute with their mask: they slice it, extend it, add to it. They get the same values as with eager
    attention. Most models only pass the mask on; then `allowed` and `causal` represent it in less memory.

    Attributes
    ----------
    allowed : Tensor (B, 1, n_q, n_k) or None
        Boolean, True where a query may attend. None: everywhere, or on and below the diagonal if `causal`.
    causal : bool
        Whether query i may attend to keys 0 to i only.
    numbers : Tensor (B, 1, n_q, n_k) or None
        The mask as an array, once an operation has read it. An operation may write to it, so it then replaces
        `allowed` and `causal`.
    """

    allowed: Tensor | None
    causal: bool
    numbers: Tensor | None

    @staticmethod
    def __new__(cls: Any, allowed: Tensor | None, causal: bool, shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.allowed, mask.causal, mask.numbers = allowed, causal, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.read() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """Return the mask as an array, the same tensor at each call, so that writes to it are kept."""
        if self.numbers is None:
            allowed = self.allowed
            if allowed is None:
                allowed = torch.ones(self.shape, dtype=torch.bool, device=self.device)
                allowed = allowed.tril() if self.causal else allowed
            zero = torch.zeros((), dtype=self.dtype, device=self.device)
            self.numbers = torch.where(allowed, zero, torch.finfo(self.dtype).min)
        return self.numbers


def make_mask(
    *, batch_size: int, q_length: int, kv_length: int, dtype: Any = torch.float32, device: Any = "cpu",
    allow_is_causal_skip: bool = True, **arguments: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask that `eager_mask` returns, made lazily; None where it returns None."""
    arguments.update(batch_size=batch_size, q_length=q_length, kv_length=kv_length, device=device)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return eager_mask(dtype=dtype, **arguments)
    # sdpa_mask returns None for a causal mask aligned at the upper left, and for one query that attends to every key.
    allowed = sdpa_mask(allow_is_causal_skip=allow_is_causal_skip, **arguments)
    if allowed is None and not allow_is_causal_skip:
        return None
    causal = allowed is None and q_length > 1
    return EagerMask(allowed, causal, (batch_size, 1, q_length, kv_length), dtype, torch.device(device))


def structure(mask: Tensor | None) -> tuple[Tensor | None, bool]:
    """Return the mask to compute with, boolean or floating, and whether attention is causal instead of masked."""
    if not isinstance(mask, EagerMask):
        return mask, False
    return (mask.allowed, mask.causal) if mask.numbers is None else (mask.numbers, False)
