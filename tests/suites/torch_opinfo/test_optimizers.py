"""torch's own test inputs of AdamW and SGD, for each of torch's implementations on the CPU."""

import functools
from collections import Counter

import pytest
import torch
from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs, optim_db

from polyattn.optim import SGD, AdamW

OURS = {"AdamW": AdamW, "SGD": SGD}
# How many there are in torch 2.13, each option in three implementations: plain, differentiable and fused.
INPUTS = {"AdamW": 5 * 3, "SGD": 9 * 3}
# The options that change the mathematics and that polyattn does not offer: these inputs are not compared.
NOT_OFFERED = {
    "amsgrad": "a variant of Adam with a state of its own; AdamW here is Adam with decoupled decay alone",
    "dampening": "a factor of SGD's momentum that Nesterov's excludes; not part of SGD here",
}
LEFT_OUT = {("AdamW", "amsgrad"): 3, ("SGD", "dampening"): 3}
IMPLEMENTATIONS = ("foreach", "fused", "differentiable", "capturable")  # how torch computes it, not what
SHAPES = {"weight": (10, 5), "bias": (10,), "temperature": ()}
STEPS = 10


@functools.cache
def inputs():
    """Return (name, options, description) of each input."""
    return [
        (info.optim_cls.__name__, given.kwargs, given.desc.replace(" ", "_"))
        for info in optim_db
        if info.optim_cls.__name__ in OURS
        for given in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float64, info)
    ]


def not_offered(options):
    """Return the name of an option that polyattn lacks, or None."""
    return next((name for name in NOT_OFFERED if options.get(name)), None)


def pytest_generate_tests(metafunc):
    if "given" in metafunc.fixturenames:
        compared = [given for given in inputs() if not not_offered(given[1])]
        metafunc.parametrize("given", compared, ids=lambda given: f"{given[0]}-{given[2]}")


def test_the_suite_is_whole():
    assert Counter(name for name, *_ in inputs()) == INPUTS
    left_out = [(name, not_offered(options)) for name, options, _ in inputs()]
    assert Counter(pair for pair in left_out if pair[1]) == LEFT_OUT


def stepped(name, options, params, all_grads, dtype):
    """Return torch's parameters after all steps."""
    params = {key: x.to(dtype, copy=True) for key, x in params.items()}
    optimizer = getattr(torch.optim, name)(params.values(), **options)
    for grads in all_grads:
        for key, x in params.items():
            x.grad = grads[key].to(dtype)
        optimizer.step()
    return params


# In these torch computes as the parameters are; its steps in 16 bits round within.
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_input(given, dtype, give, agree):
    name, options, _ = given
    generator = torch.Generator().manual_seed(0)
    drawn = [
        {key: torch.randn(shape, dtype=getattr(torch, dtype), generator=generator) for key, shape in SHAPES.items()}
        for _ in range(STEPS + 1)
    ]
    theirs = stepped(name, options, drawn[0], drawn[1:], getattr(torch, dtype))
    plain = {key: x for key, x in options.items() if key not in IMPLEMENTATIONS}
    exact = stepped(name, plain, drawn[0], drawn[1:], torch.float64)

    ours, params = OURS[name](**our_options(options, give)), {key: give(x) for key, x in drawn[0].items()}
    state, sign = ours.init(params), -1 if options.get("maximize") else 1  # to go up is to go down the negative
    for grads in drawn[1:]:
        params, state = ours.update({key: give(sign * x) for key, x in grads.items()}, state, params)
    agree(params, theirs, exact)


def our_options(options, give):
    """Return polyattn's options; the rate has no default, and a rate as an array becomes a function of the step."""
    options = {name: x for name, x in options.items() if name not in (*IMPLEMENTATIONS, "maximize")}
    rate = options.pop("lr", 1e-3)
    return {"lr": (lambda step: give(rate)) if isinstance(rate, torch.Tensor) else rate, **options}
