"""Attention for Hugging Face's models: ``AutoModel.from_pretrained(..., attn_implementation="polyattn")``.

Models that use transformers' ``AttentionInterface`` pass queries, keys and values after their own projections and
rotary embedding, and a mask. The results equal those of transformers' eager attention: the models get the same masks
as with ``"eager"``, and only the mask excludes keys. Softcap, sinks, position biases and grouped heads are arguments
of :func:`polyattn.attention`.
"""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError, BackendUnavailableError
from ..functional import attention_weights
from ..selection import selected

__all__ = ["attention_forward", "register"]

Tensor = Any
UNKNOWN = {
    "alibi": "", "block_mask": "", "head_mask": "", "seq_lengths": "",
    "indices": "it selects keys for each query, which only transformers' eager attention writes into the mask",
    "block_indices": "it selects keys for each query, which only transformers' eager attention writes into the mask",
    "sinks": "it is a sink for each query, and polyattn has one for each head",
    "cu_seq_lens_q": "leave it out and mark packed sequences by position_ids, from which the mask is made",
    "cu_seq_lens_k": "leave it out and mark packed sequences by position_ids, from which the mask is made",
    "block_table": "continuous batching needs a paged implementation, such as sdpa",
    "read_index": "continuous batching needs a paged implementation, such as sdpa",
}  # fmt: skip
"""Arguments of some models' attention that change its result and that polyattn does not support, and why."""


def register(name: str = "polyattn", *, backend: str | None = None) -> None:
    """Add an implementation of attention to transformers, and the function that makes its masks.

    Parameters
    ----------
    name : str
        The name to pass as ``attn_implementation``, or to ``model.set_attn_implementation``.
    backend : str, optional
        The backend that computes attention: by default the one selected at the call, else torch. Every backend
        returns gradients to torch.

    Raises
    ------
    BackendUnavailableError
        If transformers is missing, or older than 5.
    UnknownBackendError
        If there is no such backend.

    Examples
    --------
    >>> import transformers
    >>> from polyattn.interop.transformers import register
    >>> register()
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10, attn_implementation="polyattn")
    >>> model = transformers.GPT2Model(config)
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        from ._eager_mask import make_mask, structure
    except ImportError as error:
        raise BackendUnavailableError(
            f'transformers: expected 5 or later; install it with: pip install "polyattn[transformers]" ({error})'
        ) from error
    selected(backend)

    def forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        mask, causal = structure(attention_mask)
        arguments["is_causal"] = causal  # eager attention ignores the model's is_causal: its masks are complete
        return attention_forward(module, query, key, value, mask, backend=backend, **arguments)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)  # without it a model would be given no mask at all


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, output_attentions: bool = False,
    backend: str | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention with the signature of transformers' ``AttentionInterface``.

    Parameters
    ----------
    module : nn.Module
        The attention module of the model.
    query : Tensor (B, H, n_q, d)
    key, value : Tensor (B, H_kv, n_k, d)
    attention_mask : Tensor (B, 1 or H, n_q, n_k), optional
        Boolean, True where a query may attend; or floating, added to the scores, with the lowest number of the dtype
        or −inf where a query may not attend. None: no mask, or causal attention if `is_causal`.
    is_causal : bool, optional
        Whether query i may attend to keys 0 to i only, if there is no mask. None: ``module.is_causal``.
    dropout, scaling, softcap : float, optional
        Dropout takes its seed from torch's generator.
    s_aux : Tensor (H,), optional
        A sink for each head.
    position_bias : Tensor, optional
        Added to the scores.
    output_attentions : bool
        Whether to return the weights, before dropout.

    Returns
    -------
    (out, weights) : Tensor (B, n_q, H, d), and Tensor (B, H, n_q, n_k) or None

    Raises
    ------
    ArgumentError
        If the model passes an unknown argument that would change the result, or if there are several queries, no
        mask, and neither `is_causal` nor ``module.is_causal``.
    """
    from .torch import attention

    if unknown := [name for name in UNKNOWN if others.get(name) is not None]:
        reasons = "".join(f"; {name}: {UNKNOWN[name]}" for name in unknown if UNKNOWN[name])
        raise ArgumentError(f"attn_implementation: polyattn does not know this model's {', '.join(unknown)}{reasons}")
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    arguments: dict[str, Any] = {
        "mask": mask, "bias": bias, "sinks": s_aux, "scale": scaling, "softcap": softcap, "backend": backend,
        # Without a mask, causal attention is aligned at the upper left: a longer cache has unused positions at its end.
        "causal": attention_mask is None and query.shape[2] > 1 and _causal(module, is_causal), "q_offset": 0,
    }  # fmt: skip
    out = attention(query, key, value, dropout=dropout, seed=_seed(dropout), **arguments)
    weights = attention_weights(query.detach(), key.detach(), **arguments) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


def _causal(module: Any, is_causal: bool | None) -> bool:
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ArgumentError(
            f"is_causal: expected True or False, or an attention_mask; {type(module).__name__} has no is_causal"
        )
    return bool(causal)


def _mask_and_bias(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Separate exclusion from the bias: models write exclusion as the lowest finite number too."""
    if mask is None or not mask.is_floating_point():
        return mask, bias
    import torch

    allowed = mask > torch.finfo(mask.dtype).min / 2
    added = torch.where(allowed, mask, 0.0)
    return allowed, added if bias is None else bias + added


def _seed(dropout: float) -> int | None:
    import torch

    return int(torch.randint(2**63 - 1, ())) if dropout else None
