"""PyTorch: its fused attention with autograd, and nn.MultiheadAttention with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._case import Case
from ._contestant import OPTIMISER, Contestant, contestant
from ._ours import initial_weights

__all__ = ["attention", "layer"]

Tensors = dict[str, Any]


def attention(case: Case, device: str, threads: int) -> Contestant:
    """Prepare ``F.scaled_dot_product_attention``, and its gradients by autograd."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def call(q: Any, k: Any, v: Any, dout: Any) -> Tensors:
        if case.what == "forward":
            with torch.inference_mode():
                return {"out": sdpa(q, k, v, is_causal=case.causal)}
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = sdpa(q, k, v, is_causal=case.causal)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    return _prepared(call, case, device)


def layer(case: Case, device: str, threads: int) -> Contestant:
    """Prepare ``nn.MultiheadAttention`` with polyattn's own initial parameters, autograd and ``torch.optim.AdamW``."""
    import torch

    mha = torch.nn.MultiheadAttention(case.shape.d_model, case.shape.heads, batch_first=True)
    weights = initial_weights(case)
    # torch stores weights as (out, in), and those of q, k and v in one array.
    in_proj = [np.concatenate([weights[f"{x}_proj.{kind}"].T for x in "qkv"]) for kind in ("weight", "bias")]
    out_proj = [weights[f"out_proj.{kind}"].T for kind in ("weight", "bias")]
    state = zip(mha.state_dict(), [*in_proj, *out_proj], strict=True)
    mha.load_state_dict({name: torch.from_numpy(x) for name, x in state})
    mha = mha.to(device, getattr(torch, case.dtype))
    mha.train()  # without dropout the result is the same, and evaluation mode is slower on the CPU
    options: dict[str, Any] = {"need_weights": False}
    if case.causal:  # it also requires the mask, but does not use it
        mask = torch.nn.Transformer.generate_square_subsequent_mask(case.shape.n_q, device=device)
        options |= {"is_causal": True, "attn_mask": mask.to(getattr(torch, case.dtype))}
    make = {"forward": _forward, "both": _both, "step": _step}[case.what]
    return _prepared(make(mha, lambda x: mha(x, x, x, **options)[0]), case, device)


def _forward(mha: Any, model: Callable[[Any], Any]) -> Callable[..., Tensors]:
    import torch

    def forward(x: Any, dy: Any) -> Tensors:
        with torch.inference_mode():
            return {"y": model(x)}

    return forward


def _both(mha: Any, model: Callable[[Any], Any]) -> Callable[..., Tensors]:
    import torch

    names, parameters = zip(*mha.named_parameters(), strict=True)

    def both(x: Any, dy: Any) -> Tensors:
        x = x.detach().requires_grad_()
        y = model(x)
        dx, *grads = torch.autograd.grad(y, (x, *parameters), dy)
        renamed = _renamed(dict(zip(names, grads, strict=True)))
        return {"y": y, "dx": dx} | {f"d{name}": gradient for name, gradient in renamed.items()}

    return both


def _step(mha: Any, model: Callable[[Any], Any]) -> Callable[..., Tensors]:
    import torch

    optimiser = torch.optim.AdamW(mha.parameters(), **OPTIMISER)

    def step(x: Any, target: Any) -> Tensors:
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(model(x), target).backward()
        optimiser.step()
        return _renamed({name: p.detach() for name, p in mha.named_parameters()})

    return step


def _renamed(tensors: Tensors) -> Tensors:
    """Return parameters, or their gradients, under polyattn's names and in its layout, as views."""
    weights, biases = tensors["in_proj_weight"].chunk(3), tensors["in_proj_bias"].chunk(3)
    named = {"out_proj.weight": tensors["out_proj.weight"].T, "out_proj.bias": tensors["out_proj.bias"]}
    for x, weight, bias in zip("qkv", weights, biases, strict=True):
        named |= {f"{x}_proj.weight": weight.T, f"{x}_proj.bias": bias}
    return named


def _prepared(call: Callable[..., Tensors], case: Case, device: str) -> Contestant:
    import torch

    inputs = {name: torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for name, x in case.inputs().items()}
    wide, kind = getattr(torch, case.host_dtype), device.partition(":")[0]

    def to_host(x: Any) -> Any:  # a copy: the next training step changes the parameters in place
        return np.array(x.detach().cpu().to(wide).numpy())

    def wait(results: Tensors) -> None:
        if kind == "cuda":
            torch.cuda.synchronize(device)
        elif kind == "mps":
            torch.mps.synchronize()

    return contestant(call, inputs, to_host, wait)
