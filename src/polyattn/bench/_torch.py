"""PyTorch: its fused attention with autograd, and nn.MultiheadAttention with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..kernels import FLOAT_DTYPES
from ._case import Case
from ._contestant import NO_GRADIENT, OPTIMISER, Contestant, Peer, Results

__all__ = ["TorchLayer", "TorchSDPA"]

Tensor = Any
Tensors = dict[str, Tensor]


class _TorchPeer(Peer):
    library = extra = "torch"
    dtypes = FLOAT_DTYPES
    devices = ("cpu", "cuda", "mps")

    def call(self, case: Case, device: str) -> Callable[..., Tensors]:
        """Return the function of the inputs that is timed."""
        raise NotImplementedError

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Move the inputs to the device."""
        import torch

        dtype = getattr(torch, case.dtype)
        inputs = {name: torch.from_numpy(x).to(device, dtype) for name, x in case.inputs().items()}
        call, wait = self.call(case, device), _waiting(device)

        def run() -> Tensors:
            results = call(**inputs)
            wait()
            return results

        def fetch(results: Tensors) -> Results:
            wide = torch.float64 if case.dtype == "float64" else torch.float32
            # A copy: the next step of a training changes its parameters in place.
            return {name: np.array(x.detach().cpu().to(wide).numpy()) for name, x in results.items()}

        return Contestant(run, fetch)


class TorchSDPA(_TorchPeer):
    """``F.scaled_dot_product_attention``, and its gradients by autograd."""

    name = "torch-sdpa"

    def call(self, case: Case, device: str) -> Callable[..., Tensors]:
        """Without a graph where there is no backward."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        def forward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensors:
            with torch.inference_mode():
                return {"out": scaled_dot_product_attention(q, k, v, is_causal=case.causal)}

        def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensors:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
            return {"out": out, "dq": dq, "dk": dk, "dv": dv}

        return forward if case.what == "forward" else both


class TorchLayer(_TorchPeer):
    """``nn.MultiheadAttention`` with autograd and ``torch.optim.AdamW``."""

    name = "torch-mha"
    tasks = ("layer", "train")

    def call(self, case: Case, device: str) -> Callable[..., Tensors]:
        """Give the layer polyattn's own initial parameters."""
        import torch

        layer = torch.nn.MultiheadAttention(case.shape.d_model, case.shape.heads, batch_first=True)
        _load(layer, {name: torch.from_numpy(x) for name, x in case.weights().items()})
        layer = layer.to(device, getattr(torch, case.dtype))
        options: dict[str, Any] = {"need_weights": False}
        if case.causal:  # it asks for the mask as well, and does not use it
            mask = torch.nn.Transformer.generate_square_subsequent_mask(case.shape.n_q, device=device)
            options |= {"is_causal": True, "attn_mask": mask.to(getattr(torch, case.dtype))}
        make = {"forward": _forward, "both": _both, "step": _step}[case.what]
        return make(layer, options)


def _forward(layer: Any, options: dict[str, Any]) -> Callable[..., Tensors]:
    import torch

    layer.train()  # without dropout it is the same function; in evaluation mode it takes a path that is slower on CPU

    def forward(x: Tensor, dy: Tensor) -> Tensors:
        with torch.inference_mode():
            return {"y": layer(x, x, x, **options)[0]}

    return forward


def _both(layer: Any, options: dict[str, Any]) -> Callable[..., Tensors]:
    import torch

    names, parameters = zip(*layer.named_parameters(), strict=True)

    def both(x: Tensor, dy: Tensor) -> Tensors:
        x = x.detach().requires_grad_()
        y = layer(x, x, x, **options)[0]
        dx, *grads = torch.autograd.grad(y, (x, *parameters), dy)
        renamed = _renamed(dict(zip(names, grads, strict=True)))
        return {"y": y, "dx": dx} | {f"d{name}": gradient for name, gradient in renamed.items()}

    return both


def _step(layer: Any, options: dict[str, Any]) -> Callable[..., Tensors]:
    import torch

    optimiser = torch.optim.AdamW(layer.parameters(), **OPTIMISER)

    def step(x: Tensor, target: Tensor) -> Tensors:
        optimiser.zero_grad()
        loss = torch.nn.functional.mse_loss(layer(x, x, x, **options)[0], target)
        loss.backward()
        optimiser.step()
        return _renamed({name: p.detach() for name, p in layer.named_parameters()})

    return step


def _load(layer: Any, weights: Tensors) -> None:
    """Set the parameters: torch keeps weights (out, in), and those of q, k and v in one."""
    import torch

    projections = ("q_proj", "k_proj", "v_proj")
    layer.load_state_dict({
        "in_proj_weight": torch.cat([weights[f"{name}.weight"].T for name in projections]),
        "in_proj_bias": torch.cat([weights[f"{name}.bias"] for name in projections]),
        "out_proj.weight": weights["out_proj.weight"].T,
        "out_proj.bias": weights["out_proj.bias"],
    })  # fmt: skip


def _renamed(tensors: Tensors) -> Tensors:
    """Return parameters, or their gradients, as polyattn names and lays them out, as views."""
    weights, biases = tensors["in_proj_weight"].chunk(3), tensors["in_proj_bias"].chunk(3)
    named = {"out_proj.weight": tensors["out_proj.weight"].T, "out_proj.bias": tensors["out_proj.bias"]}
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        named |= {f"{name}.weight": weight.T, f"{name}.bias": bias}
    del named[NO_GRADIENT]
    return named


def _waiting(device: str) -> Callable[[], None]:
    """Return how to wait for a device."""
    import torch

    kind = device.partition(":")[0]
    if kind == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if kind == "mps" else lambda: None
