"""Random operations, layers and steps of training.

Each case of an operation or a layer has any of its options, dtypes and memory layouts, on arrays of every library; its
result and all gradients are those of torch's autograd on the formula in float64. Steps of an optimiser are those of the
formula in NumPy's float64.
"""

import math
import random

import numpy as np
import pytest
import torch
from arrays_in_memory import opened, rounded
from layer_cases import Layers

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.testing import TOLERANCES, assert_close


def compare(case, cases):
    """Compute a case, and compare the result and every gradient."""
    target, dtype = cases.target, cases.dtype
    tensors = {name: torch.tensor(np.array(x.values), requires_grad=True) for name, x in case.arrays.items()}
    want = case.formula(**tensors)
    dy = rounded(cases.rng.standard_normal(tuple(want.shape)), dtype)
    want.backward(torch.as_tensor(dy))
    y, backward = case.call(target, **{name: x.native(target) for name, x in case.arrays.items()})
    grads = backward(target.make(dy, dtype))
    expected = {"y": want.detach()} | {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in tensors.items()
    }
    for name, x in expected.items():
        got = y if name == "y" else grads[name]
        assert dtype_name(got.dtype) == dtype, f"{name}: {got.dtype}"
        size = max(1.0, float(abs(x).max()) if x.numel() else 1.0)
        assert_close(target.to_np(got), x.numpy(), dtype, scale=case.roundings * size, what=name)
    assert all(dx is None for name, dx in grads.items() if name not in expected)


AMOUNTS = {"numpy": (120, 6_000), "torch": (60, 3_000), "jax": (2, 600), "array-api-strict": (30, 1_000)}


@pytest.mark.parametrize("backend", AMOUNTS)
def test_cases(backend, amount, tried, request):
    """Every result and gradient is that of the formula."""
    target, count = opened(backend), amount(*AMOUNTS[backend])
    kinds = amount(1, 20) if backend == "jax" else None
    for index in range(count):
        cases = Layers(target, request.config.getoption("--seed"), index, kinds)
        case = cases.case()
        try:
            compare(case, cases)
        except Exception as error:
            what = f"# seed {cases.seed}, case {index} of {backend}: {case.name}, {case.more}"
            arrays = "\n".join(f"{name} = {x.source()}" for name, x in case.arrays.items())
            pytest.fail(f"{type(error).__name__}: {error}\n{what}\n{arrays}")
    tried(f"operations and layers on {backend}", count, "every result and gradient is that of the formula")


def falling(first, last, t):
    """Return half a wave of the cosine over four updates, from the first rate to the last."""
    return last + (first - last) * (1 + math.cos(math.pi * min(t / 4, 1))) / 2


class Steps:
    """Random updates of an optimiser, with the formula beside it."""

    def __init__(self, target, seed, index):
        self.target = target
        self.draw = draw = random.Random(f"steps {target.name} {seed} {index}")
        self.rng = np.random.default_rng([seed, index])
        few = target.name == "jax"
        self.dtypes = {name: draw.choice(target.dtypes) for name in "abc"[: 2 if few else draw.randint(1, 3)]}
        self.params = {name: rounded(self.numbers(few), dtype) for name, dtype in self.dtypes.items()}
        rate = draw.choice((0.1, 0.003))
        constant, cosine, warmup = pa.optim.constant(rate), pa.optim.cosine(rate, 4, 0.001), pa.optim.linear_warmup
        schedules = (
            (rate, lambda t: rate),
            (constant, lambda t: rate),
            (cosine, lambda t: falling(rate, 0.001, t)),
            (warmup(rate, 3), lambda t: rate * min((t + 1) / 3, 1)),
            (warmup(cosine, 2), lambda t: rate * (t + 1) / 2 if t < 2 else falling(rate, 0.001, t - 2)),
        )
        self.lr, self.rate = draw.choice(schedules)
        self.decay = draw.choice((0.0, 0.01, 0.5))
        self.adam = draw.random() < 0.6
        if self.adam:
            self.betas = draw.choice(((0.9, 0.999), (0.0, 0.5), (0.5, 0.0)))
            self.eps, self.eps_root = draw.choice((1e-8, 1e-3)), draw.choice((0.0, 1e-4))
            self.optimizer = pa.optim.AdamW(self.lr, self.betas, self.eps, self.eps_root, self.decay)
        else:
            self.momentum = draw.choice((0.0, 0.5, 0.9))
            self.nesterov = bool(self.momentum) and draw.random() < 0.5
            self.optimizer = pa.optim.SGD(self.lr, self.momentum, self.nesterov, self.decay)
        self.slots = {name: (np.zeros(x.shape), np.zeros(x.shape)) for name, x in self.params.items()}

    def numbers(self, few=False):
        shape = (
            (3, 2)
            if few
            else tuple(
                self.draw.randint(0 if self.draw.random() < 0.1 else 1, 4) for _ in range(self.draw.randint(0, 3))
            )
        )
        return np.asarray(self.rng.standard_normal(shape))

    def formula(self, name, g, t):
        """Return the parameter after update ``t``, counted from 0, and keep what the next one needs."""
        theta, (first, second), lr = self.params[name], self.slots[name], self.rate(t)
        if self.adam:
            (b1, b2), n = self.betas, t + 1
            first, second = b1 * first + (1 - b1) * g, b2 * second + (1 - b2) * g * g
            self.slots[name] = first, second
            direction = first / (1 - b1**n) / (np.sqrt(second / (1 - b2**n) + self.eps_root) + self.eps)
            return theta - lr * self.decay * theta - lr * direction
        g = g + self.decay * theta
        first = self.momentum * first + g
        self.slots[name] = first, second
        return theta - lr * (g + self.momentum * first if self.nesterov else first)

    def clipped(self, grads, most):
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in grads.values()))
        return {name: g * min(1.0, most / norm if norm else 1.0) for name, g in grads.items()}, norm

    def run(self, count):
        """Update ``count`` times; each time the formula continues from the library's rounded parameters."""
        make, to_np = self.target.make, self.target.to_np
        native = {name: make(x, self.dtypes[name]) for name, x in self.params.items()}
        state = self.optimizer.init(native)
        for t in range(count):
            kinds = (
                {name: self.draw.choice(self.target.dtypes) for name in native}
                if self.target.name != "jax"
                else self.dtypes
            )
            grads = {
                name: rounded(np.asarray(self.rng.standard_normal(x.shape)), kinds[name])
                for name, x in self.params.items()
            }
            given = {name: make(g, kinds[name]) for name, g in grads.items()}
            if self.draw.random() < 0.3:
                most = self.draw.choice((0.5, 100.0))
                given, norm = pa.optim.clip_by_global_norm(given, most)
                wanted, total = self.clipped(grads, most)
                assert_close(to_np(norm), total, "float32", what="norm", scale=max(1.0, total))
                for name, g in given.items():
                    assert_close(to_np(g), wanted[name], kinds[name], what=f"clipped {name}", scale=4.0)
                grads = {name: to_np(g).astype(np.float64) for name, g in given.items()}
            before = {name: to_np(x) for name, x in native.items()}
            following, state = self.optimizer.update(given, state, native)
            for name, x in native.items():
                assert np.array_equal(to_np(x), before[name]), f"{name} was written to"
            native = following
            for name, x in native.items():
                want, dtype = self.formula(name, grads[name], t), self.dtypes[name]
                assert dtype_name(x.dtype) == dtype
                # The schedule is computed in float32 unless a parameter is float64.
                assert_close(
                    to_np(x),
                    want,
                    dtype if "float64" in self.dtypes.values() else max(dtype, "float32", key=TOLERANCES.get),
                    what=f"{name} after update {t}",
                    scale=max(1.0, float(abs(want).max(initial=0.0))),
                )
                self.params[name] = to_np(x).astype(np.float64)
            assert int(to_np(state["step"])) == t + 1


SEQUENCES = {"numpy": (60, 3_000), "torch": (30, 1_500), "jax": (1, 40), "array-api-strict": (20, 500)}
UPDATES = 6


@pytest.mark.parametrize("backend", SEQUENCES)
def test_steps(backend, amount, tried, request):
    """Every update of AdamW and SGD, with a schedule and clipped gradients, is that of the formula."""
    target, count, seed = opened(backend), amount(*SEQUENCES[backend]), request.config.getoption("--seed")
    for index in range(count):
        steps = Steps(target, seed, index)
        try:
            steps.run(UPDATES)
        except Exception as error:
            what = f"# seed {seed}, sequence {index} of {backend}: {steps.optimizer}"
            pytest.fail(f"{type(error).__name__}: {error}\n{what}\n{steps.dtypes}, {steps.params}")
    tried(f"updates of optimisers on {backend}", count * UPDATES, "every parameter is that of the formula")
