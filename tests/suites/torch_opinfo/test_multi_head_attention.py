"""torch's own samples of nn.MultiheadAttention: result, weights, and the gradients of inputs and parameters.

The layer computes what it can express. A learnt key and value that are appended
after the projections (add_bias_kv) are the adapter's, from the functions of which
the layer is made. A key and a value of zeros (add_zero_attn) are a sink of logit zero.
"""

import copy
import functools
from collections import Counter

import pytest
import torch
from torch.testing._internal.common_modules import module_db

import polyattn as pa
from polyattn import functional as F

(INFO,) = (info for info in module_db if info.module_cls is torch.nn.MultiheadAttention)
INPUTS = ("query", "key", "value")
OPTIONS = ("bias", "add_bias_kv", "add_zero_attn")
# In torch 2.13: each of these is there or not, as are both masks; batch-first or not is the same without a batch.
SAMPLES = 2 ** len(OPTIONS) * 2**2 * 2
in_both = pytest.mark.parametrize("dtype", ["float64", "float32"])


@functools.cache
def samples(dtype):
    torch.manual_seed(0)
    return INFO.module_inputs_func(INFO, "cpu", getattr(torch, dtype), requires_grad=True, training=True)


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(SAMPLES))


@in_both
def test_the_suite_is_whole(dtype):
    assert {getattr(torch, dtype)} <= {*INFO.dtypes}
    assert len(samples(dtype)) == SAMPLES
    options = Counter(tuple(sample.constructor_input.kwargs[name] for name in OPTIONS) for sample in samples(dtype))
    assert len(options) == 2 ** len(OPTIONS)
    assert {*options.values()} == {8}


@in_both
def test_sample(number, dtype, target, xp, give, agree):
    sample = samples(dtype)[number]
    options, inputs = sample.constructor_input.kwargs, sample.forward_input.args
    torch.manual_seed(number)
    module = torch.nn.MultiheadAttention(**options, dtype=getattr(torch, dtype))
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):  # zero when they are new
            torch.nn.init.normal_(parameter)
    dy = torch.testing.make_tensor(inputs[0].shape, dtype=inputs[0].dtype, device="cpu", low=-1, high=1)
    theirs = answers(module, inputs, dy, **sample.forward_input.kwargs)
    exact = answers(copy.deepcopy(module).double(), inputs, dy, **sample.forward_input.kwargs)

    heads, held = options["num_heads"], [give(x) for x in inputs]
    parameters = {name: give(x) for name, x in renamed(dict(module.named_parameters())).items()}
    blocked = blocked_pairs(heads, inputs, **sample.forward_input.kwargs)
    appended = int(options["add_bias_kv"])  # every query sees what is appended
    mask = None if blocked is None else give(torch.nn.functional.pad(~blocked, (0, appended), value=True))
    sinks = give(torch.zeros(heads, dtype=getattr(torch, dtype))) if options["add_zero_attn"] else None
    if appended:
        ours, weights, pull = by_functions(xp, heads, parameters, held, mask=mask, sinks=sinks)
    else:
        layer = pa.MultiHeadAttention(
            options["embed_dim"], heads, bias=options["bias"], dtype=dtype, backend=target.name, device=target.device
        )
        ours, weights, pull = by_layer(layer.with_parameters(parameters), held, mask=mask, sinks=sinks)

    weights = xp.mean(weights, axis=0)  # (n_q, n_k): torch's are the mean over the heads
    if sinks is not None:
        weights = xp.concat([weights, 1 - xp.sum(weights, axis=-1, keepdims=True)], axis=-1)
    dinputs, gradients = pull(give(dy))
    results = {"y": ours, "y beside weights": ours, "weights": weights}
    # The samples' scores are large, and the backward takes differences of nearly equal numbers, which are larger still.
    slack = 2.0 if dtype == "float32" else 1.0
    agree(results | dict(zip(INPUTS, dinputs, strict=True)) | gradients, theirs, exact, slack)


def answers(module, inputs, dy, **masks):
    """Return torch's results and gradients by our names, in the module's dtype; with weights torch's y differs."""
    dtype = next(module.parameters()).dtype
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y, _ = module(*leaves, need_weights=False, **masks)
    parameters = dict(module.named_parameters())
    slopes = torch.autograd.grad(y, [*leaves, *parameters.values()], dy.to(dtype))
    named = renamed(dict(zip(parameters, slopes[len(INPUTS) :], strict=True)))
    beside_weights, weights = module(*leaves, **masks)
    results = {"y": y, "y beside weights": beside_weights, "weights": weights}
    return results | dict(zip(INPUTS, slopes, strict=False)) | named


def renamed(theirs):
    """Return torch's parameters, or their gradients, by our names: theirs are (out, in) and packed."""
    ours = {"out_proj.weight": theirs["out_proj.weight"].T}
    for name, weight in zip("qkv", theirs["in_proj_weight"].chunk(3), strict=True):
        ours[f"{name}_proj.weight"] = weight.T
    if "in_proj_bias" in theirs:
        ours["out_proj.bias"] = theirs["out_proj.bias"]
        for name, bias in zip("qkv", theirs["in_proj_bias"].chunk(3), strict=True):
            ours[f"{name}_proj.bias"] = bias
    return ours | {name: theirs[name][0] for name in ("bias_k", "bias_v") if name in theirs}  # (1, features)


def blocked_pairs(heads, inputs, *, key_padding_mask, attn_mask):
    """Return the pairs that torch excludes, (heads, n_q, n_k), or None: its masks are True there."""
    if key_padding_mask is None and attn_mask is None:
        return None
    query, key, _ = inputs
    blocked = torch.zeros((heads, query.shape[0], key.shape[0]), dtype=torch.bool)
    for mask in (key_padding_mask, attn_mask):
        blocked = blocked if mask is None else blocked | mask
    return blocked


def by_layer(layer, inputs, **arguments):
    y, cache = layer.forward(*inputs, **arguments)

    def pull(dy):
        dinputs, gradients = layer.backward(dy, cache)
        return dinputs[:3], gradients

    return y, layer.attention_weights(*inputs[:2], **arguments), pull


def by_functions(xp, heads, parameters, inputs, **arguments):
    """Append the learnt key and value after the projections; the backward is the same lines in reverse."""
    projected, caches = {}, {}
    for name, x in zip("qkv", inputs, strict=True):
        weight, bias = parameters[f"{name}_proj.weight"], parameters.get(f"{name}_proj.bias")
        projected[name], caches[name] = F.linear_forward(x, weight, bias)  # (n, H·d)
    for name in "kv":
        projected[name] = xp.concat([projected[name], parameters[f"bias_{name}"]], axis=0)  # (n_k + 1, H·d)
    q, k, v = (split(xp, x, heads) for x in projected.values())
    out, cache = pa.attention_forward(q, k, v, **arguments)  # (H, n_q, d)
    weight, bias = parameters["out_proj.weight"], parameters.get("out_proj.bias")
    y, out_cache = F.linear_forward(join(xp, out), weight, bias)

    def pull(dy):
        gradients = {}
        djoined, *of_out = F.linear_backward(dy, out_cache)
        dq, dk, dv = (join(xp, dx) for dx in pa.attention_backward(split(xp, djoined, heads), cache)[:3])
        gradients["bias_k"], gradients["bias_v"] = dk[-1:, :], dv[-1:, :]
        dinputs = []
        for name, dx in (("q", dq), ("k", dk[:-1, :]), ("v", dv[:-1, :])):
            dinput, *of_projection = F.linear_backward(dx, caches[name])
            dinputs.append(dinput)
            gradients |= dict(zip((f"{name}_proj.weight", f"{name}_proj.bias"), of_projection, strict=True))
        gradients |= dict(zip(("out_proj.weight", "out_proj.bias"), of_out, strict=True))
        return dinputs, {name: dx for name, dx in gradients.items() if dx is not None}

    return y, pa.attention_weights(q, k, **arguments), pull


def split(xp, x, heads):
    """(n, H·d) → (H, n, d)."""
    return xp.permute_dims(xp.reshape(x, (x.shape[0], heads, x.shape[1] // heads)), (1, 0, 2))


def join(xp, x):
    """(H, n, d) → (n, H·d)."""
    return xp.reshape(xp.permute_dims(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))
