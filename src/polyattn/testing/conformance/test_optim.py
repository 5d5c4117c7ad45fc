"""The optimisers against step-by-step loops, and what they may not do."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(41)
SHAPES = {"weight": (3, 2), "bias": (2,), "scale": ()}
START = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}
GRADIENTS = [{name: RNG.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(4)]

SETTINGS: dict[str, Any] = {
    "sgd": ("SGD", ref.sgd, {}),
    "sgd-decay": ("SGD", ref.sgd, {"weight_decay": 0.1}),
    "sgd-momentum": ("SGD", ref.sgd, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", ref.sgd, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adamw": ("AdamW", ref.adamw, {}),
    "adamw-all": ("AdamW", ref.adamw, {"betas": (0.8, 0.95), "eps": 1e-3, "eps_root": 1e-4, "weight_decay": 0.3}),
    "adamw-root": ("AdamW", ref.adamw, {"eps": 0.0, "eps_root": 1e-6}),
}


def native(make: Any, tree: Any, dtype: Any = "float64") -> Any:
    return {name: make(x, dtype) for name, x in tree.items()}


def steps(optimizer: Any, make: Any, params: Any, gradients: Any, dtype: Any = "float64") -> Any:
    state = optimizer.init(params)
    for tree in gradients:
        params, state = optimizer.update(native(make, tree, dtype), state, params)
    return params, state


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_against_the_loop(make: Any, to_np: Any, case: Any, dtype: Any) -> None:
    name, loop, settings = SETTINGS[case]
    start = native(make, START, dtype)
    params, state = steps(getattr(pa.optim, name)(lr=0.1, **settings), make, start, GRADIENTS, dtype)
    assert int(to_np(state["step"])) == 4
    for key in SHAPES:
        assert params[key].dtype == start[key].dtype
        want = loop(START[key], [tree[key] for tree in GRADIENTS], 0.1, **settings)
        assert_close(to_np(params[key]), want, dtype, what=key)
        np.testing.assert_array_equal(to_np(start[key]), START[key].astype(dtype))


@pytest.mark.parametrize("case", ["sgd-momentum", "adamw"])
def test_saved_state_resumes_bit_for_bit(make: Any, to_np: Any, case: Any) -> None:
    name, _, settings = SETTINGS[case]
    optimizer = getattr(pa.optim, name)(lr=0.1, **settings)
    whole, _ = steps(optimizer, make, native(make, START), GRADIENTS)
    params, state = steps(optimizer, make, native(make, START), GRADIENTS[:2])
    params, state = ({n: make(to_np(x), x_dtype(to_np(x))) for n, x in tree.items()} for tree in (params, state))
    for tree in GRADIENTS[2:]:
        params, state = optimizer.update(native(make, tree), state, params)
    for key in SHAPES:
        np.testing.assert_array_equal(to_np(params[key]), to_np(whole[key]))


def x_dtype(x: Any) -> Any:
    return x.dtype.name


def test_no_gradient_in_low_precision(make: Any, to_np: Any, dtype: Any) -> None:
    """Case 16: with ε = 1e-8, which is zero in float16, a gradient of zero changes nothing."""
    start = make([1.0, -2.0, 0.5], dtype)
    optimizer = pa.optim.AdamW(lr=1e-3, eps=1e-8, weight_decay=0.0)
    params, state = {"p": start}, optimizer.init({"p": start})
    for _ in range(3):
        params, state = optimizer.update({"p": make(np.zeros(3), dtype)}, state, params)
    np.testing.assert_array_equal(to_np(params["p"]), [1.0, -2.0, 0.5])


def test_one_step_in_low_precision(target: Any, make: Any, to_np: Any) -> None:
    """Case 16: within one float16 unit of the float32 step."""
    dtype = "float16" if "float16" in target.dtypes else "float32"
    p, g = np.array([0.579, -0.729, 0.5493]), np.array([-0.001497, 0.0001875, -0.013176])
    optimizer = pa.optim.AdamW(lr=1e-4)
    results = []
    for kind in (dtype, "float32"):
        held = {"p": make(to_np(make(p, dtype)), kind)}
        updated, _ = optimizer.update({"p": make(to_np(make(g, dtype)), kind)}, optimizer.init(held), held)
        results.append(to_np(updated["p"]))
    assert np.isfinite(results[0]).all()
    unit = np.spacing(np.abs(results[1]).astype(dtype)).astype(np.float64)
    assert (np.abs(results[0] - results[1]) <= unit).all()


def test_decay_without_momentum(make: Any, to_np: Any) -> None:
    """Case 17."""
    optimizer = pa.optim.SGD(lr=0.5, weight_decay=0.1, momentum=0)
    params = {"p": make(2.0)}
    params, _ = optimizer.update({"p": make(0.0)}, optimizer.init(params), params)
    assert_close(to_np(params["p"]), 1.9)


def test_order_and_epsilon_of_adamw(make: Any, to_np: Any) -> None:
    """Case 18: decay by the old parameter, ε outside the root; the gradient is left alone."""
    optimizer = pa.optim.AdamW(lr=0.1, weight_decay=0.5, eps=0.0)
    params, gradient = {"p": make([1.0, -2.0])}, make([0.1, -0.3])
    params, _ = optimizer.update({"p": gradient}, optimizer.init(params), params)
    assert_close(to_np(params["p"]), [0.85, -1.8])
    np.testing.assert_array_equal(to_np(gradient), [0.1, -0.3])
    optimizer = pa.optim.AdamW(lr=1.0, eps=1e-3)
    params = {"p": make(0.0)}
    params, _ = optimizer.update({"p": make(1e-4)}, optimizer.init(params), params)
    assert abs(float(to_np(params["p"])) + 0.0909091) < 1e-7


def test_rate_as_a_function_of_the_step(make: Any, to_np: Any) -> None:
    """The function is given the number of updates already done."""
    optimizer = pa.optim.SGD(lr=lambda step: 0.1 * (step + 1))
    params, _ = steps(optimizer, make, {"p": make(0.0)}, [{"p": 1.0}] * 3)
    assert_close(to_np(params["p"]), -0.6)


def test_state_is_not_shared(make: Any, to_np: Any) -> None:
    """Neither the first state nor the next shares memory with parameters: each is the caller's to keep."""
    optimizer = pa.optim.AdamW(lr=0.1)
    params = native(make, START)
    first = optimizer.init(params)
    kept = {name: to_np(x) for name, x in first.items()}
    _, second = optimizer.update(native(make, GRADIENTS[0]), first, params)
    again, _ = optimizer.update(native(make, GRADIENTS[0]), first, params)
    optimizer.update(native(make, GRADIENTS[1]), second, again)
    for name, x in first.items():
        np.testing.assert_array_equal(to_np(x), kept[name])


def test_clipping(make: Any, to_np: Any) -> None:
    grads = {"a": make([3.0, 0.0]), "b": make([[4.0]])}
    clipped, norm = pa.optim.clip_by_global_norm(grads, 1.0)
    assert_close(to_np(norm), 5.0)
    assert_close(to_np(clipped["a"]), [0.6, 0.0])
    assert_close(to_np(clipped["b"]), [[0.8]])
    same, _ = pa.optim.clip_by_global_norm(grads, 6.0)
    np.testing.assert_array_equal(to_np(same["a"]), [3.0, 0.0])


def test_under_the_compiler(contract: Any, make: Any, to_np: Any) -> None:
    optimizer = pa.optim.AdamW(lr=0.1)
    update = contract.jit(optimizer.update)
    params = native(make, START)
    state = optimizer.init(params)
    for tree in GRADIENTS:
        params, state = update(native(make, tree), state, params)
    for key in SHAPES:
        assert_close(to_np(params[key]), ref.adamw(START[key], [tree[key] for tree in GRADIENTS], 0.1))
