"""Gradients lose no digit where scores are large: each kernel is held to the error of the plain float32 formula.

The error of both is measured against the same formula in float64, on the same float32 inputs.
"""

import numpy as np
import pytest

import polyattn as pa
from polyattn.kernels import candidates
from polyattn.testing import references as ref
from polyattn.testing.conformance.test_overflow import CASES as OVERFLOW
from polyattn.testing.conformance.test_overflow import arrays_of, check
from polyattn.testing.conformance.test_overflow import formula as formula_of_overflow
from polyattn.testing.plugin import TARGET

MIN = float(np.finfo(np.float32).min)
NAMES = ("q", "k", "v", "bias", "sinks")


def formula(q, k, v, dout, *, dtype, scale, bias=None, sinks=None, softcap=None, keep=None, p=0.0, causal=False):
    """Return out and the gradients by name, as they are written down, in one dtype."""
    q, k, v, dout = (np.asarray(x, dtype) for x in (q, k, v, dout))
    groups, scale = q.shape[-3] // k.shape[-3], dtype(scale)
    k_, v_ = (np.repeat(x, groups, axis=-3) for x in (k, v))
    capped = scores = (q @ k_.swapaxes(-1, -2)) * scale
    if softcap is not None:
        capped = scores = np.tanh(scores / dtype(softcap)) * dtype(softcap)
    if bias is not None:
        scores = scores + np.asarray(bias, dtype)
    if causal:
        n_q, n_k = scores.shape[-2:]
        scores = np.where(np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q, scores, dtype(-np.inf))
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, dtype)[:, None, None]
        largest = np.maximum(largest, sinks)
    exp = np.exp(scores - largest)
    total = exp.sum(axis=-1, keepdims=True)
    sink_weights = 0
    if sinks is not None:
        total = total + np.exp(sinks - largest)
        sink_weights = np.exp(sinks - largest) / total
    weights = exp / total
    drop = dtype(1) if keep is None else keep / dtype(1 - p)
    out = (weights * drop) @ v_
    dv = (weights * drop).swapaxes(-1, -2) @ dout
    dweights = (dout @ v_.swapaxes(-1, -2)) * drop
    mean = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - mean)
    grads = {"bias": dscores, "sinks": -(sink_weights * mean).sum(axis=(0, 2, 3)) if sinks is not None else None}
    if softcap is not None:
        dscores = dscores * (1 - (capped / dtype(softcap)) ** 2)
    dscores = dscores * scale
    dq, dk = dscores @ k_, dscores.swapaxes(-1, -2) @ q
    dk, dv = (x.reshape(x.shape[0], -1, groups, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    if bias is not None:
        axes = tuple(i for i, n in enumerate(np.shape(bias)) if n == 1)
        grads["bias"] = grads["bias"].sum(axis=axes, keepdims=True)
    return {"out": out, "q": dq, "k": dk, "v": dv, **grads}


def random_case(size, n_k=11, heads=2, kv_heads=2, seed=0, integers=False, **more):
    """Return inputs whose scores are up to about ``size``: exact in float32 if they are ``integers``."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = (
        rng.standard_normal((1, h, n, 4)) for h, n in ((heads, 19), (kv_heads, n_k), (kv_heads, n_k), (heads, 19))
    )
    if integers:
        q, k = np.round(q * 2), np.round(k * 2)
        factor = 2.0 ** np.round(np.log2(max(size, 8) / 8))
        return {"q": q * factor, "k": k, "v": v, "dout": dout, "scale": 1.0, **more}
    return {"q": q * size**0.5, "k": k * size**0.5, "v": v, "dout": dout, "scale": 0.5, **more}


def cases():
    """Return the cases by name."""
    rng = np.random.default_rng(5)
    found = {}
    for size in (1.0, 30.0, 1e3, 1e5, 1e8, 1e15, 1e30):
        found[f"random {size:.0e}"] = random_case(size, seed=int(np.log10(size)) + 40)
        found[f"exact {size:.0e}"] = random_case(size, integers=True, seed=3)
    ties = {"q": np.full((1, 1, 4, 1), 1e3), "k": np.full((1, 1, 8, 1), 1e2), "scale": 1.0}
    found["ties"] = ties | {"v": rng.standard_normal((1, 1, 8, 3)), "dout": rng.standard_normal((1, 1, 4, 3))}
    found["ties of 1e30"] = found["ties"] | {"q": np.full((1, 1, 4, 1), 1e20), "k": np.full((1, 1, 8, 1), 1e10)}
    found["negative ties"] = found["ties"] | {"k": np.full((1, 1, 8, 1), -1e2)}
    one = random_case(1.0)
    found["every key at the lowest bias"] = one | {"bias": np.full((1, 1, 19, 11), MIN)}
    found["some rows at the lowest bias"] = one | {
        "bias": np.where(np.arange(19)[:, None] % 3 == 0, MIN, rng.standard_normal((1, 2, 19, 11)))
    }
    found["some keys at the lowest bias"] = one | {
        "bias": np.where(np.arange(11) % 3 == 0, MIN, np.zeros((1, 1, 1, 11)))
    }
    found["bias of 1e6"] = one | {"bias": np.round(rng.standard_normal((1, 2, 19, 11))) + 1e6}
    for size in (1.0, 1e5, 1e8):
        exact = random_case(size, integers=True, seed=3)
        found[f"sinks {size:.0e}"] = exact | {
            "sinks": np.array([max(float((exact["q"] @ exact["k"].swapaxes(-1, -2)).max()), 1.0), -1.0])
        }
        found[f"softcap {size:.0e}"] = random_case(size, softcap=20.0)
        found[f"dropout {size:.0e}"] = exact | {"p": 0.25}
        found[f"causal {size:.0e}"] = random_case(size, n_k=23, integers=True) | {"causal": True}
        found[f"groups {size:.0e}"] = random_case(size, integers=True, kv_heads=1)
        found[f"long {size:.0e}"] = random_case(size, n_k=700, integers=True)
    return found


CASES = cases()


def pytest_generate_tests(metafunc):
    contract = metafunc.config.stash[TARGET].contract
    if "kernel" in metafunc.fixturenames:
        kernels = [kernel.name for kernel in candidates(contract.kernels if contract else ())]
        metafunc.parametrize("kernel", [*kernels, None])


def arguments_of(case):
    """Return what a case gives attention besides q, k, v and dout, on the host."""
    given = {name: x for name, x in case.items() if name not in ("q", "k", "v", "dout", "p")}
    return given | ({"dropout": case["p"], "seed": 3} if "p" in case else {})


def bounds_of(case):
    """Return the largest error that each gradient may have, and the gradients in float64."""
    rounded = {name: np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x for name, x in case.items()}
    if "p" in case:
        shape = (*case["q"].shape[:-1], case["k"].shape[-2])
        rounded["keep"] = ref.keep_mask(shape, case["p"], 3)
    with np.errstate(all="ignore"):
        exact, plain = formula(dtype=np.float64, **rounded), formula(dtype=np.float32, **rounded)
    top = {name: float(np.abs(rounded[name]).max()) for name in ("q", "k", "v", "dout")}
    common = top["dout"] * top["v"] / (1 - case.get("p", 0.0))
    unit = {
        "q": case["scale"] * common * top["k"], "k": case["scale"] * common * top["q"],
        "v": top["dout"] / (1 - case.get("p", 0.0)), "bias": common, "sinks": common,
    }  # fmt: skip
    bounds = {}
    for name in NAMES:
        if name in case:
            own = np.abs(plain[name] - exact[name])
            bounds[name] = 2 * float(np.nan_to_num(own, nan=0).max()) + 1e-6 * unit[name]
    return bounds, exact


def native_of(case, make):
    """Return q, k, v, dout and the arguments as arrays of the library."""
    arguments = {name: make(x, "float32") if isinstance(x, np.ndarray) else x for name, x in arguments_of(case).items()}
    return [make(case[name], "float32") for name in ("q", "k", "v", "dout")], arguments


@pytest.mark.parametrize("name", CASES)
def test_gradients(name, kernel, make, to_np):
    case = CASES[name]
    (q, k, v, dout), arguments = native_of(case, make)
    try:
        _, cache = pa.attention_forward(q, k, v, kernel=kernel, **arguments)
    except pa.KernelUnsupportedError:
        return  # another kernel takes the problem, which None stands for here
    grads = pa.attention_backward(dout, cache)
    bounds, exact = bounds_of(case)
    for which, bound in bounds.items():
        error = np.abs(to_np(getattr(grads, which)).astype(np.float64) - exact[which])
        assert error.max() <= bound, f"{which}: {error.max():.2g} where {bound:.2g} is allowed"


@pytest.mark.parametrize("name", OVERFLOW)
def test_overflow_on_every_kernel(name, kernel, make, to_np):
    case = OVERFLOW[name]
    arrays, given = arrays_of(case, "float32", make)
    hosts = [to_np(x).astype(np.longdouble) for x in arrays]
    with np.errstate(all="ignore"):
        want = formula_of_overflow(*hosts, **{key: x for key, x in case.items() if key not in ("q", "k")})
    try:
        check(arrays, given, want, "float32", to_np, kernel=kernel)
    except pa.KernelUnsupportedError:
        return  # another kernel takes the problem, which None stands for here
