"""Bad input of the optimisers, schedules and clipping, and the messages."""

import math

import numpy as np
import pytest

from polyattn.errors import ArgumentError, BackendMismatchError, CheckpointError, DTypeError, ShapeError
from polyattn.optim import SGD, AdamW, clip_by_global_norm, constant, cosine, linear_warmup


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), r"lr: expected a finite number of at least 0, got -0\.1"),
        (lambda: SGD(math.nan), "lr: .*got nan"),
        (lambda: AdamW("fast"), "lr: .*got 'fast'"),
        (lambda: AdamW(True), "lr: .*got True"),
        (lambda: SGD(0.1, momentum=1.0), r"momentum: .*below 1, got 1\.0"),
        (lambda: SGD(0.1, weight_decay=-1.0), r"weight_decay: .*got -1\.0"),
        (lambda: SGD(0.1, nesterov=True), "momentum: expected more than 0 for nesterov=True"),
        (lambda: AdamW(0.1, betas=(0.9, 1.0)), r"betas\[1\]: .*got 1\.0"),
        (lambda: AdamW(0.1, betas=(-0.1, 0.9)), r"betas\[0\]: .*got -0\.1"),
        (lambda: AdamW(0.1, betas=0.9), "betas: expected a tuple of two numbers, got 0.9"),
        (lambda: AdamW(0.1, eps=-1e-8), "eps: .*got -1e-08"),
        (lambda: AdamW(0.1, eps_root=math.inf), "eps_root: .*got inf"),
        (lambda: AdamW(0.1, weight_decay=-0.1), r"weight_decay: .*got -0\.1"),
        (lambda: constant(-1), "lr: .*got -1"),
        (lambda: cosine(0.1, 0), "total_steps: expected an integer of at least 1, got 0"),
        (lambda: cosine(0.1, 10.0), r"total_steps: .*got 10\.0"),
        (lambda: cosine(0.1, 10, final=-1), "final: .*got -1"),
        (lambda: linear_warmup(-0.1, 5), r"schedule: .*got -0\.1"),
        (lambda: linear_warmup(0.1, -1), "warmup_steps: expected an integer of at least 0, got -1"),
        (lambda: clip_by_global_norm({"a": np.ones(2)}, 0.0), r"max_norm: expected a number above 0, got 0\.0"),
        (lambda: clip_by_global_norm({"a": np.ones(2)}, math.nan), "max_norm: .*got nan"),
    ],
)
def test_hyperparameters_out_of_range(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_numpy_scalars_do_not_widen_float32():
    params = {"p": np.ones(2, dtype=np.float32)}
    double = np.float64
    for optimizer in (
        SGD(double(0.1), momentum=double(0.9), weight_decay=double(0.1)),
        AdamW(cosine(double(0.1), np.int64(10), double(0.01)), (double(0.9), double(0.99)), double(0.1), double(0.1)),
    ):
        new, state = optimizer.update(params, optimizer.init(params), params)
        assert {x.dtype for x in (*new.values(), *state.values())} == {np.dtype("float32"), np.dtype("int32")}
    assert clip_by_global_norm(params, double(0.1))[1].dtype == np.float32


def test_names_that_differ():
    adamw, params = AdamW(0.1), {"a": np.ones(2), "b": np.ones(3)}
    state = adamw.init(params)
    with pytest.raises(CheckpointError, match=r"grads: .*missing: b; unexpected: c"):
        adamw.update({"a": np.ones(2), "c": np.ones(3)}, state, params)
    with pytest.raises(CheckpointError, match=r"state: .*missing: mean\.a, mean\.b, square\.a, square\.b; unexp.*none"):
        adamw.update(params, SGD(0.1).init(params), params)
    with pytest.raises(CheckpointError, match=r"state: .*missing: none; unexpected: mean\.a"):
        SGD(0.1).update(params, state, params)
    with pytest.raises(CheckpointError, match=r"params: .*at least one array"):
        adamw.init({})


def test_shapes_that_differ():
    adamw, params = AdamW(0.1), {"a": np.ones((2, 3))}
    state = adamw.init(params)
    with pytest.raises(ShapeError, match=r"grads\['a'\]: expected shape \(2, 3\), got \(3,\)"):
        adamw.update({"a": np.ones(3)}, state, params)
    with pytest.raises(ShapeError, match=r"state\['square\.a'\]: expected shape \(2, 3\), got \(1,\)"):
        adamw.update(params, {**state, "square.a": np.ones(1)}, params)
    with pytest.raises(ShapeError, match=r"state\['step'\]: expected shape \(\), got \(1,\)"):
        adamw.update(params, {**state, "step": np.ones(1, dtype=np.int32)}, params)
    wrong = AdamW(lambda step: np.ones(2))
    with pytest.raises(ShapeError, match=r"lr: expected a function .*got shape \(2,\)"):
        wrong.update(params, state, params)


@pytest.mark.parametrize("dtype", [np.int64, np.complex128, np.bool_])
def test_parameters_that_are_not_floating(dtype):
    params, adamw = {"a": np.ones(2, dtype=dtype)}, AdamW(0.1)
    with pytest.raises(DTypeError, match=rf"params\['a'\]: expected a floating dtype.*got {np.dtype(dtype).name}"):
        adamw.init(params)
    good = {"a": np.ones(2)}
    with pytest.raises(DTypeError, match=r"grads\['a'\]: expected a floating dtype"):
        adamw.update(params, adamw.init(good), good)
    with pytest.raises(DTypeError, match=r"grads\['a'\]: expected a floating dtype"):
        clip_by_global_norm(params, 1.0)


def test_state_of_another_dtype():
    adamw, params = AdamW(0.1), {"a": np.ones(2, dtype=np.float32)}
    state = adamw.init(params)
    with pytest.raises(DTypeError, match=r"state\['mean\.a'\]: expected float32, .*, got float64"):
        adamw.update(params, {**state, "mean.a": np.zeros(2)}, params)
    with pytest.raises(DTypeError, match=r"state\['step'\]: expected int32, got float64"):
        adamw.update(params, {**state, "step": np.asarray(0.0)}, params)


@pytest.mark.parametrize("value", [[1.0, 2.0], 1.0, None])
def test_what_is_no_array(value):
    with pytest.raises(BackendMismatchError, match=rf"params\['a'\]: expected an array, got {type(value).__name__}"):
        AdamW(0.1).init({"b": np.ones(2), "a": value})


def test_libraries_and_devices_do_not_mix():
    strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed: no second library")
    params, foreign = {"a": np.ones(2)}, {"a": strict.ones(2)}
    sgd = SGD(0.1)
    expected = r"one library and device, got: params\['a'\] is numpy on cpu, grads\['a'\] is array-api-strict on cpu"
    with pytest.raises(BackendMismatchError, match=expected):
        sgd.update(foreign, sgd.init(params), params)
    with pytest.raises(BackendMismatchError, match=r"lr: .*got numpy ndarray"):
        SGD(lambda step: np.zeros(())).update(foreign, sgd.init(foreign), foreign)
    elsewhere = {"a": strict.ones(2, device=strict.Device("device1"))}
    with pytest.raises(
        BackendMismatchError, match=r"device, got: params\['a'\] is .* on cpu, grads\['a'\] is .* on device1"
    ):
        sgd.update(elsewhere, sgd.init(foreign), foreign)
    state = sgd.init(elsewhere)
    assert state["step"].device == elsewhere["a"].device
    new, state = AdamW(cosine(0.1, 5)).update(elsewhere, AdamW(0.1).init(elsewhere), elsewhere)
    assert {x.device for x in (*new.values(), *state.values())} == {elsewhere["a"].device}
