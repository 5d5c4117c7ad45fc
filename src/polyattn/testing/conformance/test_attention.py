"""Attention on the table of problems: value, log-sum-exp, weights and every gradient."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.kernels import candidates
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES, NARROW

LSE_DTYPE = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32"}


def by_name(case: Any) -> Any:
    return case.name


def check(case: Any, make: Any, to_np: Any, dtype: Any) -> Any:
    """Run one problem forward and backward, and compare everything."""
    problem = case.problem()
    inputs, arguments = problem.native(make, dtype)
    held = problem.rounded(to_np, make, dtype)
    out, cache = pa.attention_forward(*inputs, **arguments)
    expected = ref.attention(*held.inputs, **held.arguments)
    assert type(out) is type(cache.lse) is type(inputs[0])
    assert out.dtype == inputs[0].dtype
    assert dtype_name(cache.lse.dtype) == LSE_DTYPE[dtype]
    assert_close(to_np(out), expected.out.reshape(problem.dout.shape), dtype, what="out")
    assert_close(to_np(cache.lse), expected.lse.reshape(problem.dlse.shape), LSE_DTYPE[dtype], what="lse")

    dlse = make(held.dlse, LSE_DTYPE[dtype])
    grads = pa.attention_backward(make(held.dout, dtype), cache, dlse=dlse)
    slopes = ref.attention_gradients(held.dout, *held.inputs, **{"dlse": held.dlse, **held.arguments})
    given = {"q": inputs[0], "k": inputs[1], "v": inputs[2]} | {x: arguments.get(x) for x in ("bias", "sinks")}
    for name, argument in given.items():
        gradient, slope = getattr(grads, name), getattr(slopes, name)
        assert (gradient is None) == (argument is None), f"gradient of {name}: got {type(gradient)}"
        if gradient is not None:
            assert type(gradient) is type(argument), f"gradient of {name}: {type(gradient)}"
            assert gradient.dtype == argument.dtype, f"gradient of {name}: {gradient.dtype}, not {argument.dtype}"
            assert_close(to_np(gradient), slope, dtype, what=f"gradient of {name}")


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_float64(make: Any, to_np: Any, case: Any) -> None:
    check(case, make, to_np, "float64")


@pytest.mark.parametrize("case", NARROW, ids=by_name)
def test_dtypes(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    if dtype != "float64":
        check(case, make, to_np, dtype)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_weights(make: Any, to_np: Any, case: Any) -> None:
    problem = case.problem()
    (q, k, _), arguments = problem.native(make, "float64")
    weights = to_np(pa.attention_weights(q, k, **arguments))
    lead = np.broadcast_shapes(case.q[:-3], case.k[:-3])
    if lead == problem.dout.shape[:-3] and "mask" not in arguments:
        expected = ref.attention(*problem.inputs, **problem.arguments).weights
    else:
        values = np.zeros((*problem.inputs[1].shape[:-1], 1))  # in place of v, which may have other leading axes
        expected = ref.attention(q=problem.inputs[0], k=problem.inputs[1], v=values, **problem.arguments).weights
    assert_close(weights, expected.reshape(weights.shape))


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_short_form_equals_forward(make: Any, to_np: Any, case: Any) -> None:
    inputs, arguments = case.problem().native(make, "float64")
    assert_close(to_np(pa.attention(*inputs, **arguments)), to_np(pa.attention_forward(*inputs, **arguments)[0]))


@pytest.mark.parametrize("case", NARROW, ids=by_name)
def test_central_differences(make: Any, to_np: Any, case: Any) -> None:
    problem = case.problem()
    names = [name for name in ("bias", "sinks") if name in problem.arguments]
    hosts = [*problem.inputs, *(problem.arguments[name] for name in names)]
    _, arguments = problem.native(make, "float64")

    def loss(q: Any, k: Any, v: Any, *others: Any) -> Any:
        moved = {**arguments, **{name: make(x) for name, x in zip(names, others, strict=True)}}
        out, cache = pa.attention_forward(make(q), make(k), make(v), **moved)
        lse = to_np(cache.lse)
        reached = np.isfinite(lse)
        return float(np.sum(to_np(out) * problem.dout) + np.sum(np.where(reached, lse, 0.0) * problem.dlse))

    _, cache = pa.attention_forward(*(make(x) for x in problem.inputs), **arguments)
    grads = pa.attention_backward(make(problem.dout), cache, dlse=make(problem.dlse))
    given = [gradient for gradient in grads if gradient is not None]
    assert len(given) == len(hosts)
    slopes_agree(loss, hosts, [to_np(gradient) for gradient in given])


def test_without_dlse_it_is_zero(make: Any, to_np: Any) -> None:
    problem = CASES[0].problem()
    inputs, _ = problem.native(make, "float64")
    _, cache = pa.attention_forward(*inputs)
    dout = make(problem.dout)
    alone, zero = pa.attention_backward(dout, cache), pa.attention_backward(dout, cache, dlse=make(0 * problem.dlse))
    for a, b in zip(alone[:3], zero[:3], strict=True):
        assert_close(to_np(a), to_np(b))


def test_bias_and_sinks_may_have_another_dtype(make: Any, to_np: Any) -> None:
    problem = next(case for case in CASES if case.name == "everything").problem()
    inputs, arguments = problem.native(make, "float64")
    arguments |= {name: make(problem.arguments[name], "float32") for name in ("bias", "sinks")}
    held = problem.arguments | {name: to_np(arguments[name]).astype(np.float64) for name in ("bias", "sinks")}
    out, cache = pa.attention_forward(*inputs, **arguments)
    grads = pa.attention_backward(make(problem.dout), cache)
    assert_close(to_np(out), ref.attention(*problem.inputs, **held).out)
    slopes = ref.attention_gradients(problem.dout, *problem.inputs, **held)
    for name in ("bias", "sinks"):
        assert dtype_name(getattr(grads, name).dtype) == "float32"
        assert_close(to_np(getattr(grads, name)), getattr(slopes, name), "float32", what=name)
    assert_close(to_np(grads.q), slopes.q)


@pytest.mark.parametrize("case", NARROW, ids=by_name)
def test_every_kernel(target: Any, make: Any, to_np: Any, case: Any) -> None:
    """Each kernel of the backend, and the generic one, agrees with the reference or declines with a reason."""
    problem = case.problem()
    inputs, arguments = problem.native(make, "float64")
    expected = ref.attention(*problem.inputs, **problem.arguments)
    slopes = ref.attention_gradients(problem.dout, *problem.inputs, **problem.arguments)
    ran: list[str] = []
    refusals: list[str] = []
    for kernel in candidates(() if target.contract is None else target.contract.kernels):
        try:
            out, cache = pa.attention_forward(*inputs, kernel=kernel.name, **arguments)
        except pa.KernelUnsupportedError as refusal:
            refusals.append(str(refusal))
            continue
        ran.append(str(cache.kernel))
        grads = pa.attention_backward(make(problem.dout), cache)
        assert_close(to_np(out), expected.out, what=f"out of {kernel.name}")
        for name in ("q", "k", "v"):
            assert_close(to_np(getattr(grads, name)), getattr(slopes, name), what=f"gradient of {name}, {kernel.name}")
    assert ran
    assert all("does not compute" in refusal for refusal in refusals)
    assert len(set(ran)) == len(ran)


def test_unknown_kernel(make: Any) -> None:
    q = make(np.zeros((2, 3, 4)))
    with pytest.raises(pa.KernelUnsupportedError, match="no-such-kernel"):
        pa.attention(q, q, q, kernel="no-such-kernel")


@pytest.mark.parametrize("name", ["plain", "mask-empty-rows", "everything"])
def test_merge_of_parts_is_the_whole(make: Any, to_np: Any, name: Any) -> None:
    """Attention over keys 0–2 and 3–6, merged in both orders and with an empty part; one part has the sinks."""
    problem = next(case for case in CASES if case.name == name).problem()
    q, k, v = problem.inputs
    allowed = ref.allowed_pairs((*problem.dout.shape[:-1], 7), **{
        key: x for key, x in problem.arguments.items() if key not in ("scale", "softcap", "sinks")
    })  # fmt: skip
    bias = problem.arguments.get("bias")
    parts = []
    for first, last in ((0, 3), (3, 7), (0, 1)):
        arguments = {key: x for key, x in problem.arguments.items() if key in ("scale", "softcap")}
        arguments |= {"mask": make(allowed[..., first:last] if last != 1 else np.zeros((1, 1)), "bool")}
        if bias is not None:
            arguments["bias"] = make(np.broadcast_to(bias, allowed.shape)[..., first:last])
        if "sinks" in problem.arguments and last == 3:
            arguments["sinks"] = make(problem.arguments["sinks"])
        keys, values = make(k[..., first:last, :]), make(v[..., first:last, :])
        out, cache = pa.attention_forward(make(q), keys, values, **arguments)
        parts.append((out, cache.lse))
    whole = ref.attention(q, k, v, **problem.arguments)
    for order in ((0, 1), (1, 0), (2, 1, 0)):
        out, lse = pa.attention_merge([parts[i] for i in order])
        assert_close(to_np(out), whole.out, what=f"out of {order}")
        assert_close(to_np(lse), whole.lse, what=f"lse of {order}")
    left = pa.attention_merge([pa.attention_merge(parts[:2]), parts[2]])
    assert_close(to_np(left[0]), whole.out, what="associated")


def test_traced_arguments(contract: Any, make: Any, to_np: Any) -> None:
    """``q_offset`` and ``key_lengths`` as 0-d integer arrays, under the backend's compiler."""
    problem = CASES[0].problem()
    inputs, _ = problem.native(make, "float64")

    def function(q: Any, k: Any, v: Any, offset: Any, lengths: Any) -> Any:
        return pa.attention(q, k, v, causal=True, q_offset=offset, key_lengths=lengths)

    compiled = contract.jit(function)
    for offset, lengths in ((0, 7), (2, 3)):
        out = compiled(*inputs, make(offset, "int32"), make(lengths, "int32"))
        expected = ref.attention(*problem.inputs, causal=True, q_offset=offset, key_lengths=lengths)
        assert_close(to_np(out), expected.out)
