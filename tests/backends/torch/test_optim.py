"""The optimisers against torch's own, twenty steps in float64."""

import numpy as np
import pytest
import torch

from polyattn.optim import SGD, AdamW, clip_by_global_norm, cosine, linear_warmup

SHAPES = {"weight": (4, 3), "bias": (3,), "temperature": ()}
STEPS = 20

CASES = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "sgd-decay": (SGD(0.1, weight_decay=0.2), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.2)),
    "sgd-momentum": (
        SGD(0.1, momentum=0.9, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.2),
    ),
    "sgd-nesterov": (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
    ),
    "adamw": (AdamW(0.05), lambda p: torch.optim.AdamW(p, 0.05)),
    "adamw-options": (
        AdamW(0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
    "adam": (AdamW(0.05, weight_decay=0.0), lambda p: torch.optim.Adam(p, 0.05)),
}


def series(seed):
    """Return the parameters, and a dict of gradients for each step."""
    rng = np.random.default_rng(seed)
    draw = [{name: np.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()} for _ in range(STEPS + 1)]
    return draw[0], draw[1:]


def torch_run(make, params, all_grads, schedule=None):
    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in params.items()}
    optimizer = make(list(theirs.values()))
    for step, grads in enumerate(all_grads):
        for name, x in theirs.items():
            x.grad = torch.tensor(grads[name])
        if schedule:
            optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
    return {name: x.detach().numpy() for name, x in theirs.items()}


def our_run(optimizer, params, all_grads):
    state = optimizer.init(params)
    for grads in all_grads:
        params, state = optimizer.update(grads, state, params)
    return params


def assert_close(ours, theirs, rtol):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(np.asarray(ours[name]), theirs[name], rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_as_torch_does(case, library):
    ours, theirs = CASES[case]
    params, all_grads = series(0)
    expected = torch_run(theirs, params, all_grads)
    if library == "torch":
        params = {name: torch.tensor(x) for name, x in params.items()}
        all_grads = [{name: torch.tensor(x) for name, x in grads.items()} for grads in all_grads]
    assert_close(our_run(ours, params, all_grads), expected, 1e-12)


def test_with_a_schedule():
    schedule = linear_warmup(cosine(0.05, total_steps=15, final=0.01), warmup_steps=5)
    params, all_grads = series(1)
    expected = torch_run(lambda p: torch.optim.AdamW(p, 0.05), params, all_grads, schedule)
    assert_close(our_run(AdamW(schedule), params, all_grads), expected, 1e-12)


def test_clipping_as_torch_does():
    _, (grads, *_) = series(2)
    theirs = {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in grads.items()}
    for name, x in theirs.items():
        x.grad = torch.tensor(grads[name])
    norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
    clipped, our_norm = clip_by_global_norm(grads, 0.5)
    assert float(our_norm) == pytest.approx(float(norm), rel=1e-12)
    assert_close(clipped, {name: x.grad.numpy() for name, x in theirs.items()}, 1e-5)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_keep_their_dtype_record_no_graph_and_share_nothing(dtype):
    dtype = getattr(torch, dtype)
    params = {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}
    for optimizer in (AdamW(cosine(0.1, 10)), SGD(0.1, momentum=0.9)):
        state = optimizer.init(params)
        with torch.no_grad():
            new, new_state = optimizer.update(params, state, params)
        fresh = [*new.values(), *new_state.values()]
        assert {x.dtype for x in new.values()} == {dtype}
        assert {x.dtype for x in new_state.values()} == {torch.float32, torch.int32}
        assert not any(x.requires_grad for x in fresh)
        old = {x.untyped_storage().data_ptr() for x in (*params.values(), *state.values())}
        assert len({x.untyped_storage().data_ptr() for x in fresh} - old) == len(fresh)
