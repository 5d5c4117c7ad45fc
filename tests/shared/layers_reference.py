"""Operations and layers as plain float64 formulas of torch, whose autograd gives their gradients."""

import math

import numpy as np
import torch
import torch.nn.functional as f
from arrays_in_memory import values
from attention_reference import Made, Pairs, keep_mask

import polyattn as pa

ACTIVATIONS = {
    "relu": f.relu,
    "silu": f.silu,
    "gelu": f.gelu,
    "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
    "swiglu": lambda gate, up: f.silu(gate) * up,
    "geglu": lambda gate, up: f.gelu(gate) * up,
}


def linear(x, p, name=""):
    """Return x W + b with the parameters under a name."""
    dot = f"{name}." if name else ""
    y = x @ p[f"{dot}weight"]
    return y + p[f"{dot}bias"] if f"{dot}bias" in p else y


def layer_norm(x, weight=None, bias=None, eps=1e-5, axes=1):
    return f.layer_norm(x, x.shape[x.ndim - axes :], weight, bias, eps)


def rms_norm(x, weight=None, eps=1e-5, axes=1):
    y = x / torch.sqrt(torch.mean(x * x, dim=tuple(range(-axes, 0)), keepdim=True) + eps)
    return y if weight is None else y * weight


def cross_entropy(logits, labels, weight=None, ignore_index=None, reduction="mean"):
    """Return the loss, with a weight of zero for what is ignored."""
    costs = -torch.log_softmax(logits, -1)
    if labels.is_floating_point():
        losses = torch.sum(costs * labels * (1 if weight is None else weight), -1)
        return {"mean": torch.mean, "sum": torch.sum, "none": lambda x: x}[reduction](losses)
    kept = torch.ones_like(labels, dtype=bool) if ignore_index is None else labels != ignore_index
    index = torch.where(kept, labels, 0)
    shares = kept.double() if weight is None else torch.where(kept, weight[index], 0.0)
    losses = torch.take_along_dim(costs, index[..., None], -1)[..., 0] * shares
    if reduction == "none":
        return losses
    return torch.sum(losses) / torch.sum(shares) if reduction == "mean" else torch.sum(losses)


def rotary(x, positions, base=10000.0, dim=None, interleaved=False, scaling=None):
    """Rotate the pairs of the first ``dim`` features as complex numbers; positions (…, n) are those of every head."""
    dim = x.shape[-1] if dim is None else dim
    theta, magnitude = frequencies(dim, base, scaling)
    angle = torch.as_tensor(np.asarray(positions)[..., None] * theta)  # (…, n, dim / 2)
    angle = angle[..., None, :, :] if x.ndim > 2 else angle
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    x1, x2 = x[..., first] * magnitude, x[..., second] * magnitude
    y1, y2 = x1 * torch.cos(angle) - x2 * torch.sin(angle), x1 * torch.sin(angle) + x2 * torch.cos(angle)
    y = torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1)
    return torch.cat([y, x[..., dim:]], -1)


def frequencies(dim, base, scaling):
    """Return the angle of each pair for one position, and the magnitude."""
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if isinstance(scaling, pa.functional.LinearScaling):
        return np.array(plain) / scaling.factor, 1.0
    if isinstance(scaling, pa.functional.NTKScaling):
        power = dim / (dim - 2) if dim > 2 else 0
        return np.array([(base * scaling.factor**power) ** (-2 * i / dim) for i in range(dim // 2)]), 1.0
    if isinstance(scaling, pa.functional.Llama3Scaling):
        return np.array([llama3(theta, scaling) for theta in plain]), 1.0
    if isinstance(scaling, pa.functional.YaRNScaling):
        turns = [dim * math.log(scaling.original_length / (beta * 2 * math.pi)) / (2 * math.log(base))
                 for beta in (scaling.beta_fast, scaling.beta_slow)]  # fmt: skip
        low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dim - 1)
        ramp = [min(max((i - low) / ((high - low) or 0.001), 0), 1) for i in range(dim // 2)]
        mixed = [theta / scaling.factor * r + theta * (1 - r) for theta, r in zip(plain, ramp, strict=True)]
        return np.array(mixed), 0.1 * math.log(scaling.factor) + 1
    return np.array(plain), 1.0


def llama3(theta, scaling):
    turns = scaling.original_length * theta / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = min(max(smooth, 0), 1)
    return (1 - smooth) * theta / scaling.factor + smooth * theta


def attention(q, k, v, arguments, bias=None, sinks=None):
    """Return attention of heads; ``bias`` is the array of the bias or the table of a structured one."""
    known = values(arguments)
    options = {
        name: known.pop(name, default)
        for name, default in (("scale", None), ("softcap", None), ("dropout", 0), ("seed", 0))
    }
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    shape = (*lead, *q.shape[-3:-1], k.shape[-2])
    known.pop("sinks", None)
    given = known.pop("bias", None)
    pairs = Pairs(shape, given, **known)
    allowed = torch.as_tensor(pairs.allowed)
    added = torch.as_tensor(np.where(pairs.allowed, pairs.bias, 0.0))
    if bias is not None:
        added = bias[torch.as_tensor(pairs.buckets(given))].movedim(-1, -3) if isinstance(given, Made) else bias
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if options["scale"] is None else options["scale"])
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = torch.where(allowed, scores + torch.where(torch.isneginf(added), 0.0, added), -math.inf)
    sink = torch.full((shape[-3], 1), -math.inf, dtype=torch.float64) if sinks is None else sinks[:, None]
    most = torch.cat([scores, sink[..., None].expand(*shape[:-1], 1)], -1).amax(-1).detach()
    most = torch.where(torch.isneginf(most), 0.0, most)
    shares = torch.where(allowed, torch.exp(scores - most[..., None]), 0.0)
    total = shares.sum(-1) + torch.exp(sink - most)
    weights = shares / torch.where(total == 0, 1.0, total)[..., None]
    if options["dropout"]:
        keep = keep_mask(shape, options["dropout"], options["seed"]) / ((1 - options["dropout"]) or 1.0)
        weights = weights * torch.as_tensor(keep)
    return weights @ v


def multi_head(layer, p, query, key, value, arguments, bias=None, sinks=None):
    """Return multi-head attention with the settings of a layer."""
    key = query if key is None else key
    value = key if value is None else value
    arguments, positions = dict(arguments), arguments.get("positions")
    arguments.pop("positions", None)
    n_q, n_k = query.shape[-2], key.shape[-2]
    if positions is None:
        first = np.asarray(n_k - n_q if arguments.get("q_offset") is None else values(arguments["q_offset"]))
        positions = first[..., None] + np.arange(n_q), np.arange(n_k)
    else:
        positions = values(positions)
        positions = positions if isinstance(positions, tuple) else (positions, positions)

    def heads(x, name, count, where=None):
        x = linear(x, p, f"{name}_proj").unflatten(-1, (count, -1)).movedim(-2, -3)
        if where is None:
            return x
        if layer.qk_norm == "rms":
            x = rms_norm(x, p[f"{name}_norm.weight"], layer.qk_norm_eps)
        if layer.qk_norm == "layer":
            x = layer_norm(x, p[f"{name}_norm.weight"], None, layer.qk_norm_eps)
        return x if layer.rotary is None else rotary(x, where, **layer.rotary)

    q, k = heads(query, "q", layer.num_heads, positions[0]), heads(key, "k", layer.num_kv_heads, positions[1])
    v = heads(value, "v", layer.num_kv_heads)
    if layer.window is not None and "window" not in arguments:
        arguments["window"] = layer.window
    arguments["scale"] = 1 / math.sqrt(layer.d_model) if layer.scale == "model" else layer.scale
    out = attention(q, k, v, arguments, bias, p.get("sinks", sinks))
    return linear(out.movedim(-3, -2).flatten(-2), p, "out_proj")


def feed_forward(layer, p, x):
    halves = [linear(x, p, f"{name}_proj") for name in ("gate", "up") if f"{name}_proj.weight" in p]
    return linear(ACTIVATIONS[layer.activation](*halves), p, "down_proj")


def block(layer, p, x, arguments, bias=None, sinks=None):
    """Return the transformer block with the settings of a layer."""

    def part(name):
        return {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}

    def norm(name, x):
        if layer.norm == "rms":
            return rms_norm(x, p[f"{name}.weight"], layer.eps)
        return layer_norm(x, p[f"{name}.weight"], p.get(f"{name}.bias"), layer.eps)

    def attend(x):
        return multi_head(layer.attention, part("attention"), x, None, None, arguments, bias, sinks)

    def feed(x):
        return feed_forward(layer.feed_forward, part("feed_forward"), x)

    for name, inner in (("norm1", attend), ("norm2", feed)):
        x = x + inner(norm(name, x)) if layer.norm_first else norm(name, x + inner(x))
    return x
