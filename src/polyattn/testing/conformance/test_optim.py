"""The optimisers, compared with step-by-step loops."""

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
    """Case 16: with ε = 1e-8, which is zero in float16, a zero gradient does not change the parameter."""
    start = make([1.0, -2.0, 0.5], dtype)
    optimizer = pa.optim.AdamW(lr=1e-3, eps=1e-8, weight_decay=0.0)
    params, state = {"p": start}, optimizer.init({"p": start})
    for _ in range(3):
        params, state = optimizer.update({"p": make(np.zeros(3), dtype)}, state, params)
    np.testing.assert_array_equal(to_np(params["p"]), [1.0, -2.0, 0.5])


def test_one_step_in_low_precision(target: Any, make: Any, to_np: Any) -> None:
    """Case 16: the result differs from the float32 step by at most one unit in the last place of float16."""
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
    """Case 18: decay of the old parameter, ε outside the root; the gradient is unchanged."""
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
    """No state shares memory with the parameters, so the caller may keep each of them."""
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
    assert_close(to_np(pa.optim.clip_by_global_norm(grads, 4.0)[0]["b"]), [[3.2]])
    same, _ = pa.optim.clip_by_global_norm(grads, 6.0)
    np.testing.assert_array_equal(to_np(same["a"]), [3.0, 0.0])


# ---- both ends of the range: the references compute in float64, whose range is the square of float32's ---------------

EXTREMES: dict[str, Any] = {
    "one large": ([2e19, *[1.0] * 50], {}),
    "one larger": ([1e30, *[1.0] * 50], {}),
    "one of the largest": ([3e38, *[1.0] * 50], {}),
    "all of the largest": ([3e38, -2e38, 3e38, 1e38], {}),
    "larger and larger": ([1.0, 1e10, 1e20, 1e30, 1e38], {}),
    "small": ([1e-23, -2e-23, 1e-23], {"eps": 0.0}),
    "smaller": ([1e-30, 3e-31, -1e-30, 1e-30], {"eps": 0.0}),
    "smaller and smaller": ([1.0, 1e-10, 1e-20, 1e-30, *[0.0] * 5], {"eps": 0.0}),
    "small, then ordinary": ([1e-30, 1e-30, 1.0, 0.5], {"eps": 0.0}),
    "small inside a root": ([1e-12, 1e-18, 1e-12], {"eps": 0.0, "eps_root": 1e-30}),
    "large inside a root": ([1e25, 1e18, 1.0], {"eps": 0.0, "eps_root": 1e-8}),
}


@pytest.mark.parametrize("case", EXTREMES)
def test_adamw_at_the_ends_of_the_range(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    """Every finite gradient gives the update of the formula; in the first case the parameter is 0.403, as in torch."""
    gradients, settings = EXTREMES[case]
    if dtype == "float16":
        gradients = np.copysign(np.clip(np.abs(gradients), 2.0**-14, 65504), gradients)
    given = [to_np(make([g, g], dtype)).astype(np.float64) for g in gradients]
    settings = {"weight_decay": 0.0, **settings}
    optimizer = pa.optim.AdamW(lr=0.1, **settings)
    params, state = steps(optimizer, make, {"p": make([1.0, 0.0], "float32")}, [{"p": g} for g in given], dtype)
    assert_close(to_np(params["p"]), ref.adamw([1.0, 0.0], given, 0.1, **settings), "float32", scale=1.0)
    if case == "one large" and dtype != "float16":
        assert abs(float(to_np(params["p"])[0]) - 0.403) < 1e-3
    assert all(np.isfinite(to_np(x)).all() for x in state.values())


def test_adamw_at_the_ends_of_float64(make: Any, to_np: Any) -> None:
    """The first update is the learning rate times the sign of the gradient, for every magnitude."""
    optimizer = pa.optim.AdamW(lr=0.1, eps=0.0, weight_decay=0.0)
    gradient = np.array([1e200, -1e200, 1e308, 1e-200, -1e-300, 1e160, 1e-160])
    params, state = steps(optimizer, make, {"p": make(np.zeros(7))}, [{"p": gradient}])
    assert_close(to_np(params["p"]), -0.1 * np.sign(gradient))
    assert_close(-to_np(state["square.p"]) / np.abs(gradient), np.full(7, 0.001**0.5))  # negative slots hold the root


def test_ordinary_states_hold_squares(make: Any, to_np: Any) -> None:
    """So states written before, which hold only squares, continue unchanged."""
    optimizer = pa.optim.AdamW(lr=0.1)
    gradient = np.array([1e-12, 1.0, 1e15], np.float32)
    _, state = steps(optimizer, make, {"p": make(np.ones(3), "float32")}, [{"p": gradient}] * 2, "float32")
    square = np.float32(0.001) * gradient.astype(np.float64) ** 2
    assert_close(to_np(state["square.p"]) / (0.999 * square + square), np.ones(3), "float32")


SUMS: dict[str, Any] = {
    "decay": (3e38, [3e38], {"weight_decay": 1.0}),
    "momentum": (1.0, [3e38, 2e37], {"momentum": 0.1}),
    "nesterov": (1.0, [3e38], {"momentum": 0.9, "nesterov": True}),
    "both": (3e38, [-3e38, 3e38], {"momentum": 0.5, "weight_decay": 2.0}),
    "small": (0.0, [1e-36, 1e-36], {"momentum": 0.5}),
}


@pytest.mark.parametrize("case", SUMS)
def test_sgd_at_the_ends_of_the_range(make: Any, to_np: Any, case: Any) -> None:
    start, gradients, settings = SUMS[case]
    optimizer = pa.optim.SGD(lr=2.0**-4, **settings)
    params, _ = steps(optimizer, make, {"p": make([start], "float32")}, [{"p": [g]} for g in gradients], "float32")
    want = ref.sgd(to_np(make([start], "float32")), [[g] for g in gradients], 2.0**-4, **settings)
    assert_close(to_np(params["p"]), want, "float32")


@pytest.mark.parametrize("size", [3e38, 1e30, 1e19, 1e-19, 1e-30, 1e-37])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e30])
def test_clipping_at_the_ends_of_the_range(make: Any, to_np: Any, size: Any, max_norm: Any) -> None:
    """The norm, 10 · size, may overflow; the clipped gradients are those of exact arithmetic."""
    grads = {"a": np.full((4, 4), size), "b": np.full(84, -size)}
    clipped, norm = pa.optim.clip_by_global_norm(native(make, grads, "float32"), max_norm)
    assert_close(to_np(norm), np.inf if size > 1e38 else 10 * size, "float32")
    for name, x in grads.items():
        assert_close(to_np(clipped[name]), x * min(1.0, max_norm / (10 * size)), "float32")


def test_clipping_of_two_dtypes(make: Any, to_np: Any) -> None:
    """Both are scaled in the wider dtype, whose largest number overflows the narrower one."""
    grads = {"a": make([1e-300], "float64"), "b": make([0.0], "float32")}
    clipped, _ = pa.optim.clip_by_global_norm(grads, 1e-301)
    assert_close(to_np(clipped["a"]), [1e-301])
    assert_close(to_np(clipped["b"]), [0.0], "float32")
    clipped, _ = pa.optim.clip_by_global_norm({**grads, "b": make([3e38], "float32")}, 1.0)
    assert_close(to_np(clipped["b"]), [1.0], "float32")


def test_the_number_of_updates_ends_at_the_largest_integer(make: Any, to_np: Any) -> None:
    optimizer = pa.optim.AdamW(pa.optim.linear_warmup(pa.optim.cosine(0.1, 10**12, final=0.05), 10), weight_decay=0.0)
    params = {"p": make([1.0], "float32")}
    state = {**optimizer.init(params), "step": make(2**31 - 2, "int32")}
    for _ in range(3):
        params, state = optimizer.update({"p": make([1.0], "float32")}, state, params)
    assert int(to_np(state["step"])) == 2**31 - 1
    assert np.isfinite(to_np(params["p"])).all()


def test_under_the_compiler(contract: Any, make: Any, to_np: Any) -> None:
    optimizer = pa.optim.AdamW(lr=0.1)
    update = contract.jit(optimizer.update)
    params = native(make, START)
    state = optimizer.init(params)
    for tree in GRADIENTS:
        params, state = update(native(make, tree), state, params)
    for key in SHAPES:
        assert_close(to_np(params[key]), ref.adamw(START[key], [tree[key] for tree in GRADIENTS], 0.1))
