"""Reports of optimisers, schedules and their state. docs/field.md has the links."""

import math

import numpy as np
import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_tensors
from polyattn.testing import assert_close


def natives(make, tree, dtype="float64"):
    return {name: make(x, dtype) for name, x in tree.items()}


def test_optax_1752_clipping_no_gradient(make, to_np):
    """Gradients of zero stay zero, and those of just the largest norm as they are; a largest norm of 0 is refused."""
    clip = pa.optim.clip_by_global_norm
    zeros, norm = clip(natives(make, {"w": np.zeros(3)}), 1.0)
    assert float(to_np(norm)) == 0.0
    np.testing.assert_array_equal(to_np(zeros["w"]), np.zeros(3))
    same, norm = clip(natives(make, {"w": np.array([3.0, 4.0])}), 5.0)
    assert float(to_np(norm)) == 5.0
    np.testing.assert_array_equal(to_np(same["w"]), [3.0, 4.0])
    with pytest.raises(pa.ArgumentError, match="max_norm"):
        clip(natives(make, {"w": np.zeros(3)}), 0.0)


def test_mlx_4426_decay_leaves_the_gradients(make, to_np):
    """SGD adds weight decay to a new array, not to the caller's gradient."""
    grads = natives(make, {"weight": np.ones((2, 3)), "bias": np.ones(2)})
    params = natives(make, {"weight": np.full((2, 3), 4.0), "bias": np.full(2, 4.0)})
    optimizer = pa.optim.SGD(lr=0.1, weight_decay=0.5)
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    for name in grads:
        np.testing.assert_array_equal(to_np(grads[name]), np.ones(grads[name].shape))
        assert_close(to_np(new[name]), np.full(grads[name].shape, 4.0 - 0.1 * (1.0 + 0.5 * 4.0)))


def test_mlx_2617_the_decay_begins_after_the_warm_up(make, to_np):
    """After 100 updates of warm-up the rate is the full one, and the cosine is at its start."""
    schedule = pa.optim.linear_warmup(pa.optim.cosine(1e-5, total_steps=1000, final=1e-6), warmup_steps=100)
    for step, want in ((0, 1e-7), (99, 1e-5), (100, 1e-5), (600, 5.5e-6), (1100, 1e-6)):
        assert math.isclose(schedule(step), want, rel_tol=1e-6), step
        assert math.isclose(float(to_np(schedule(make(step, "int32")))), want, rel_tol=1e-5), step


@pytest.mark.parametrize("report", ["torchtitan-4382", "mlx-1623"])
def test_the_first_update_of_adamw(report, make, to_np):
    """A state that was made, and perhaps saved, has counted no update: the first is lr whatever the gradient."""
    gradient = 0.3 if report == "torchtitan-4382" else 1e-5
    params = natives(make, {"w": np.array([1.0, -2.0])})
    optimizer = pa.optim.AdamW(lr=0.1, eps=1e-12, weight_decay=0.0)
    state = optimizer.init(params)
    assert int(to_np(state["step"])) == 0
    new, state = optimizer.update(natives(make, {"w": np.full(2, gradient)}), state, params)
    assert int(to_np(state["step"])) == 1
    np.testing.assert_allclose(to_np(new["w"]), [0.9, -2.1], rtol=1e-7)


@pytest.mark.parametrize("report", ["pytorch-125708", "pytorch-2647", "fairseq2-212"])
def test_a_state_from_a_file(report, dtypes, make, to_np, tmp_path):
    """Reading a state moves no parameter; one of no update serves; moments of narrow parameters keep float32."""
    dtype = dtypes[0] if report == "fairseq2-212" else "float32"  # the narrowest
    params = natives(make, {"w": np.array([1.0, -2.0, 0.5])}, dtype)
    optimizer = pa.optim.AdamW(lr=0.5, weight_decay=0.25)
    grads = natives(make, {"w": np.array([0.1001, -0.3003, 1e-5])}, dtype)
    state = optimizer.init(params)
    if report != "pytorch-2647":
        params, state = optimizer.update(grads, state, params)
    before = to_np(params["w"])
    write_tensors(tmp_path / "state.safetensors", state)
    read, _ = read_tensors(tmp_path / "state.safetensors")
    read = {name: make(x, x.dtype.name) for name, x in read.items()}
    np.testing.assert_array_equal(to_np(params["w"]), before)
    for name in state:
        assert read[name].dtype == state[name].dtype == make(0, "int32" if name == "step" else "float32").dtype
        np.testing.assert_array_equal(to_np(read[name]), to_np(state[name]))
    results = [to_np(optimizer.update(grads, old, params)[0]["w"]) for old in (state, read)]
    np.testing.assert_array_equal(*results)
    if report == "pytorch-125708":  # without a gradient or moments, decay is all that moves a parameter
        still, _ = optimizer.update(natives(make, {"w": np.zeros(3)}, dtype), optimizer.init(params), params)
        assert_close(to_np(still["w"]), before * (1 - 0.5 * 0.25), dtype)


def test_pytorch_7499_the_state_of_another_optimiser(make):
    """SGD with momentum takes no state of AdamW; the message has the names that are missing."""
    params = natives(make, {"w": np.ones(2)})
    state = pa.optim.AdamW(lr=0.1).init(params)
    with pytest.raises(pa.CheckpointError, match="state"):
        pa.optim.SGD(lr=0.1, momentum=0.9).update(params, state, params)
