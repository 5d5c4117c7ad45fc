"""Attention on tensors, computed by any backend."""

from __future__ import annotations

from typing import Any

from ... import functional
from ...backend import dtype_name
from ...selection import selected
from ._autocast import asked_for, lowered
from ._elsewhere import Pull, elsewhere

__all__ = ["attention"]

Tensor = Any


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, sinks: Tensor | None = None,
    backend: str | None = None, **arguments: Any,
) -> Tensor:  # fmt: skip
    """:func:`polyattn.attention` on tensors that may require gradients, on any backend.

    ``polyattn.attention`` raises rather than move tensors that require gradients to another library, because autograd
    would lose them. This function may move them, because it returns the gradients to autograd.

    Parameters
    ----------
    q, k, v, bias, sinks : Tensor
        As in :func:`polyattn.attention`; each may require gradients.
    backend : str, optional
        The backend that computes: by default the selected one, else torch.
    **arguments
        The other arguments of :func:`polyattn.attention`.

    Returns
    -------
    Tensor
        On the device of the inputs. On torch it may be differentiated twice, on another backend once.

        Under ``torch.autocast`` q, k and v are cast to its dtype, and the result has this dtype, as with
        ``torch.nn.functional.scaled_dot_product_attention``; float64 is not cast. Scores, softmax and sums are still
        computed in float32 at least. ``polyattn.attention`` ignores autocast.

    Raises
    ------
    PolyattnError
        What :func:`polyattn.attention` raises.

    Examples
    --------
    >>> import torch
    >>> from polyattn.interop.torch import attention
    >>> q = torch.ones(2, 4, 8, requires_grad=True)
    >>> attention(q, q, q, causal=True, backend="numpy").sum().backward()
    >>> q.grad.shape
    torch.Size([2, 4, 8])
    """
    if (asked := asked_for(q)) is not None:
        q, k, v = (lowered(x, dtype_name(asked)) for x in (q, k, v))
    selection = selected(backend)
    if selection is None or selection.backend == "torch":
        return functional.attention(q, k, v, bias=bias, sinks=sinks, backend=backend, **arguments)

    def run(*tensors: Tensor | None) -> tuple[Tensor, Pull]:
        q, k, v, bias, sinks = tensors
        out, cache = functional.attention_forward(q, k, v, bias=bias, sinks=sinks, backend=backend, **arguments)
        return out, lambda dout: tuple(functional.attention_backward(dout, cache))

    return elsewhere(run, q, k, v, bias, sinks)
