"""torch's own samples of operations (OpInfo): values, and gradients through the hand-written backwards."""

import functools
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import polyattn as pa
from polyattn import functional as F
from polyattn.backend import dtype_name
from polyattn.testing.plugin import TARGET

# ---- each operation in torch's arguments: y, and what gives a gradient for each tensor among them -------------------


def attention(xp, q, k, v, *, attn_mask=None, is_causal, dropout_p):
    """torch's causal mask is aligned at the upper left, and its third axis from the end is our axis of heads."""
    assert dropout_p == 0
    y, cache = pa.attention_forward(q, k, v, bias=attn_mask, causal=is_causal, q_offset=0)
    return y, lambda dy: pa.attention_backward(dy, cache)[:4]


def along_axis(forward, backward):
    """Softmax: torch can cast to a dtype first, and treats a scalar as a row of one element."""

    def operation(xp, x, dim, *, dtype=None):
        wide = x if dtype is None else xp.astype(x, getattr(xp, dtype_name(dtype)))
        y, cache = forward(xp.reshape(wide, x.shape or (1,)), axis=dim)

        def pull(dy):
            (dx,) = backward(xp.reshape(dy, y.shape), cache)
            return [xp.astype(xp.reshape(dx, x.shape), x.dtype)]

        return xp.reshape(y, x.shape), pull

    return operation


def layer_norm(xp, x, normalized_shape, weight=None, bias=None, *, eps=1e-5):
    y, cache = F.layer_norm_forward(x, weight, bias, eps=eps, axes=len(normalized_shape))
    return y, lambda dy: F.layer_norm_backward(dy, cache)


def rms_norm(xp, x, normalized_shape, weight=None, *, eps=None):
    """Without an epsilon, torch uses that of the dtype in which it computes."""
    if eps is None:
        eps = 2.0**-52 if dtype_name(x.dtype) == "float64" else 2.0**-23
    y, cache = F.rms_norm_forward(x, weight, eps=eps, axes=len(normalized_shape))
    return y, lambda dy: F.rms_norm_backward(dy, cache)


def linear(xp, x, weight, bias=None):
    """torch's weight is (out, in)."""
    y, cache = F.linear_forward(x, xp.matrix_transpose(weight), bias)

    def pull(dy):
        dx, dweight, dbias = F.linear_backward(dy, cache)
        return dx, xp.matrix_transpose(dweight), dbias

    return y, pull


def gelu(xp, x, *, approximate):
    y, cache = F.gelu_forward(x, approximate=approximate)
    return y, lambda dy: F.gelu_backward(dy, cache)


def cross_entropy(xp, x, target, *, weight=None, ignore_index=None, reduction="mean"):
    """In torch the classes are on the second axis, of logits and of probabilities."""
    labels = xp.moveaxis(target, 1, -1) if target.ndim == x.ndim else target
    more = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    y, cache = F.cross_entropy_forward(xp.moveaxis(x, 1, -1), labels, **more)

    def pull(dy):
        dlogits, dlabels, dweight = F.cross_entropy_backward(dy, cache)
        return xp.moveaxis(dlogits, -1, 1), None if dlabels is None else xp.moveaxis(dlabels, -1, 1), dweight

    return y, pull


def embedding(xp, weight, indices, *, padding_idx=None, scale_grad_by_freq=False, sparse=False):
    """These options affect only the gradient, and for such samples torch checks only the value."""
    y, cache = F.embedding_forward(indices, weight)
    return y, lambda dy: F.embedding_backward(dy, cache)[::-1]


OPERATIONS = {
    "nn.functional.scaled_dot_product_attention": attention,
    "softmax": along_axis(F.softmax_forward, F.softmax_backward),
    "log_softmax": along_axis(F.log_softmax_forward, F.log_softmax_backward),
    "nn.functional.layer_norm": layer_norm,
    "nn.functional.rms_norm": rms_norm,
    "nn.functional.linear": linear,
    "nn.functional.gelu": gelu,
    "nn.functional.cross_entropy": cross_entropy,
    "nn.functional.embedding": embedding,
}

# ---- the samples ---------------------------------------------------------------------------------------------------

# How many there are of each operation and dtype in torch 2.13: those with gradients, and those for the value alone.
SAMPLES = {
    "nn_functional_scaled_dot_product_attention": (25, 25),
    "softmax": (7, 7),
    "softmax_with_dtype": (7, 7),
    "log_softmax": (7, 7),
    "log_softmax_with_dtype": (7, 7),
    "nn_functional_layer_norm": (6, 6),
    "nn_functional_rms_norm": (6, 6),
    "nn_functional_linear": (18, 18),
    "nn_functional_gelu": (8, 8),
    "nn_functional_cross_entropy": (21, 21),
    "nn_functional_embedding": (3, 10),
}
DROPOUT = "the weights are dropped by torch's own random numbers"
RENORMED = "max_norm rewrites the table that it is given; nothing that polyattn is given is changed"
NEGATIVE = "a negative epsilon is refused: test_a_negative_epsilon_is_refused"
# Those of them that are not compared, and why.
LEFT_OUT = {
    ("nn_functional_scaled_dot_product_attention", DROPOUT): (12, 12),
    ("nn_functional_embedding", RENORMED): (0, 3),
    ("nn_functional_layer_norm", NEGATIVE): (1, 1),
    ("nn_functional_rms_norm", NEGATIVE): (1, 1),
}


class Case(NamedTuple):
    op: Any
    dtype: str
    gradients: bool
    number: int
    sample: Any

    def __str__(self):
        return f"{self.op.formatted_name}-{self.dtype}-{'gradients' if self.gradients else 'value'}-{self.number}"

    def run(self, xp, give):
        """Return polyattn's y, and a function that returns the gradients."""
        held = self.sample.transform(lambda x: give(x) if isinstance(x, torch.Tensor) else x)
        return OPERATIONS[self.op.name](xp, held.input, *held.args, **held.kwargs)

    def reason(self):
        """Return why it is not compared, or None."""
        options = self.sample.kwargs
        chosen = {
            DROPOUT: options.get("dropout_p", 0) > 0,
            RENORMED: options.get("max_norm") is not None,
            NEGATIVE: options.get("eps", 0) < 0,
        }
        return next((why for why, holds in chosen.items() if holds), None)


@functools.cache
def cases(dtype):
    random.seed(0)  # one sample of cross_entropy draws from Python's numbers
    dtype = getattr(torch, dtype)
    return [
        Case(op, dtype_name(dtype), gradients, number, sample)
        for op in op_db
        if op.name in OPERATIONS and dtype in op.dtypes
        for gradients in (True, False)
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    ]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        dtypes = metafunc.config.stash[TARGET].dtypes
        compared = [case for dtype in dtypes for case in cases(dtype) if case.reason() is None]
        metafunc.parametrize("case", compared, ids=str)


def tensors(sample):
    return [x for x in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(x, torch.Tensor)]


def answers(op, sample, dy):
    """Return torch's result y, and the gradient of each tensor that has one."""
    y, arguments = op(sample.input, *sample.args, **sample.kwargs), tensors(sample)
    leaves = {f"the gradient of argument {i}": x for i, x in enumerate(arguments) if x.requires_grad}
    slopes = torch.autograd.grad(y, [*leaves.values()], dy.to(y.dtype)) if leaves else ()
    return {"y": y, **dict(zip(leaves, slopes, strict=True))}


def doubled(sample):
    """Return a sample with the same numbers in float64."""

    def double(x):
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().double().requires_grad_(x.requires_grad) if floating else x

    return sample.transform(double)


def test_the_suite_is_whole(dtype):
    def numbers(key):
        found = Counter((key(case), case.gradients) for case in cases(dtype))
        return {what: (found[what, True], found[what, False]) for what, _ in found if what is not None}

    assert numbers(lambda case: case.op.formatted_name) == SAMPLES
    assert numbers(lambda case: case.reason() and (case.op.formatted_name, case.reason())) == LEFT_OUT


def test_case(case, xp, give, agree):
    y, pull = case.run(xp, give)
    dtype = getattr(torch, dtype_name(y.dtype))
    dy = torch.testing.make_tensor(tuple(y.shape), dtype=dtype, device="cpu", low=-1, high=1)
    theirs, exact = (answers(case.op, sample, dy) for sample in (case.sample, doubled(case.sample)))
    ours = {"y": y}
    if case.gradients:
        given = {f"the gradient of argument {i}": dx for i, dx in enumerate(pull(give(dy)))}
        ours |= {name: dx for name, dx in given.items() if name in theirs}
    # In 16 bits the result of attention is rounded before the backward reads it, and that adds up.
    rounded = case.gradients and case.op.name.endswith("attention") and dtype.itemsize == 2
    agree(ours, theirs, exact, slack=4.0 if rounded else 1.0)


def test_a_negative_epsilon_is_refused(xp, give):
    refused = [case for case in cases("float32") if case.reason() == NEGATIVE]
    assert len(refused) == 4
    for case in refused:
        with pytest.raises(pa.ArgumentError, match="eps: expected a number that is not negative"):
            case.run(xp, give)
