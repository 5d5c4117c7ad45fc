"""Attention on tensors, wherever it is computed."""

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

    ``polyattn.attention`` leaves tensors that require gradients where they are: what autograd follows does not go
    to another library unnoticed. Here it may, because the gradients come back.

    Parameters
    ----------
    q, k, v, bias, sinks : Tensor
        As in :func:`polyattn.attention`; each may require gradients.
    backend : str, optional
        Where to compute: by default the selection in force, else torch.
    **arguments
        The others of :func:`polyattn.attention`.

    Returns
    -------
    Tensor
        On the device of the inputs. On torch it may be differentiated twice, on another backend once.

        Under ``torch.autocast`` q, k and v are taken to its dtype, and the result is in it, as with
        ``torch.nn.functional.scaled_dot_product_attention``; float64 stays. Scores, softmax and sums are in float32
        at least all the same. ``polyattn.attention`` computes in the dtype that it is given.

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
