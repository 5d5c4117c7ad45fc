"""Random cases of operations, each with the formula of torch that it is compared with."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import layers_reference as formulas
import numpy as np
import torch
from arrays_in_memory import Given, given, values

import polyattn as pa

F = pa.functional


@dataclass(frozen=True)
class Case:
    """A forward and its backward, of an operation or a layer."""

    name: str
    arrays: dict[str, Given]
    """The floating arrays that have gradients."""
    call: Callable[..., Any]
    """``call(target, **native)`` returns ``(y, backward)``; ``backward(dy)`` returns gradients by name."""
    formula: Callable[..., Any]
    """``formula(**tensors)`` returns y in float64."""
    more: str = ""
    """The other arguments, as text."""
    roundings: int = 1
    """How many results of the dtype, one after the other, lie between the arrays and y or a gradient."""


def operation(name, arrays, formula, constants=None, **options):
    """Return a case of ``polyattn.functional.NAME``; ``constants`` are arrays without a gradient."""
    constants = constants or {}

    def call(target, /, **tensors):
        fixed = {key: x.native(target) for key, x in constants.items()}
        y, cache = getattr(F, f"{name}_forward")(**tensors, **fixed, **options)
        return y, lambda dy: getattr(F, f"{name}_backward")(dy, cache)._asdict()

    fixed = {key: torch.as_tensor(np.array(x.values)) for key, x in constants.items()}
    text = ", ".join(
        [*(f"{key}={x.source()}" for key, x in constants.items()), *(f"{k}={v!r}" for k, v in options.items())]
    )
    return Case(name, arrays, call, lambda **tensors: formula(**tensors, **fixed, **options), text)


class Operations:
    """The random choices of a case of an operation."""

    RECIPES = ("softmax", "activation", "gated", "linear", "norm", "loss", "embedding", "rotary")

    def __init__(self, target, seed, index, kinds=None):
        self.target, self.few = target, kinds is not None
        self.index, self.seed = index, seed
        self.draw = random.Random(f"layers {target.name} {seed} {index % kinds if kinds else index}")
        self.rng = np.random.default_rng([seed, index])
        self.dtype = self.draw.choice(target.dtypes)

    def case(self):
        return getattr(self, self.draw.choice(self.RECIPES))()

    def floats(self, *shape, spread=1.0, dtype=None):
        x = self.rng.standard_normal(shape) * spread
        return given(self.draw, self.target, x, dtype or self.dtype)

    def integers(self, low, high, *shape):
        kind = "int32" if self.few else self.draw.choice(("int32", "int64", "int8", "uint8"))
        return given(self.draw, self.target, self.rng.integers(low, high, shape), kind)

    def shape(self, least=0, axes=(1, 2, 3)):
        """Return the shape of some rows, and the number of features."""
        draw = self.draw
        if self.few:
            return (2, 3, 4)
        lead = tuple(
            draw.choice((0, 1, 2, 3, 5)) if draw.random() < 0.9 else draw.randint(1, 40)
            for _ in range(draw.choice(axes) - 1)
        )
        return (*lead, draw.randint(max(least, 1), 9) if draw.random() < 0.9 else draw.randint(1, 70))

    # ---- operations --------------------------------------------------------------------------------------------------

    def softmax(self):
        name, shape = self.draw.choice(("softmax", "log_softmax")), self.shape()
        axis = self.draw.randrange(-len(shape), len(shape))
        return operation(name, {"x": self.floats(*shape, spread=self.draw.choice((1, 10)))},
                         lambda x, axis: getattr(torch, name)(x, dim=axis), axis=axis)  # fmt: skip

    def activation(self):
        name = self.draw.choice(("relu", "silu", "gelu"))
        if name != "gelu":
            return operation(name, {"x": self.floats(*self.shape())}, lambda x: formulas.ACTIVATIONS[name](x))
        kind = self.draw.choice(("none", "tanh"))
        formula = formulas.ACTIVATIONS["gelu" if kind == "none" else "gelu_tanh"]
        return operation(name, {"x": self.floats(*self.shape())}, lambda x, approximate: formula(x), approximate=kind)

    def gated(self):
        name, shape = self.draw.choice(("swiglu", "geglu")), self.shape()
        arrays = {"gate": self.floats(*shape), "up": self.floats(*shape)}
        return operation(name, arrays, formulas.ACTIVATIONS[name])

    def linear(self):
        shape, out = self.shape(), 3 if self.few else self.draw.randint(1, 9)
        arrays = {"x": self.floats(*shape), "weight": self.floats(shape[-1], out)}
        if self.draw.random() < 0.5:
            arrays["bias"] = self.floats(out)
        return operation("linear", arrays, lambda **p: formulas.linear(p["x"], p))

    def norm(self):
        name, shape = self.draw.choice(("layer_norm", "rms_norm")), self.shape(least=2)
        axes = self.draw.randint(1, len(shape)) if 0 not in shape else 1
        arrays = {"x": self.floats(*shape, spread=self.draw.choice((1, 30)))}
        for parameter in ("weight", "bias")[: 1 if name == "rms_norm" else 2]:
            if self.draw.random() < 0.6:
                arrays[parameter] = self.floats(*shape[len(shape) - axes :])
        return operation(name, arrays, getattr(formulas, name), eps=self.draw.choice((1e-5, 1e-3, 0.5)), axes=axes)

    def loss(self):
        draw, shape = self.draw, self.shape(least=2)
        shape = (*(max(n, 1) for n in shape[:-1]), shape[-1])
        if draw.random() < 0.3:
            arrays = {"prediction": self.floats(*shape), "target": self.floats(*shape)}
            return operation("mse_loss", arrays, lambda prediction, target: torch.mean((prediction - target) ** 2))
        arrays = {"logits": self.floats(*shape, spread=draw.choice((1, 10)))}
        if draw.random() < 0.4:
            x = abs(self.rng.standard_normal(shape)) + 0.1
            arrays["weight"] = given(draw, self.target, x[(0,) * (len(shape) - 1)], self.dtype)
        reduction = draw.choice(("mean", "sum", "none"))
        if draw.random() < 0.3:
            arrays["labels"] = given(draw, self.target, self.rng.dirichlet(np.ones(shape[-1]), shape[:-1]), self.dtype)
            return operation("cross_entropy", arrays, formulas.cross_entropy, reduction=reduction)
        labels = np.array(self.rng.integers(0, shape[-1], shape[:-1]))
        ignored = draw.choice((None, -100, 1))
        if ignored is not None and labels.size:
            labels[self.rng.random(labels.shape) < 0.3] = ignored
            labels.reshape(-1)[0] = 0  # at least one is not ignored
        constants = {"labels": Given(labels, "int32" if self.few else draw.choice(("int32", "int64")))}
        return operation(
            "cross_entropy", arrays, formulas.cross_entropy, constants, ignore_index=ignored, reduction=reduction
        )

    def embedding(self):
        count, features = (5, 4) if self.few else (self.draw.randint(1, 9), self.draw.randint(1, 5))
        constants = {"indices": self.integers(0, count, *self.shape()[:-1])}
        return operation(
            "embedding",
            {"weight": self.floats(count, features)},
            lambda weight, indices: weight[indices.long()],
            constants,
        )

    def rotary(self):
        draw, lead = self.draw, (2,) if self.few else self.draw.choice(((), (2,), (1, 3)))
        heads, n, d = (2, 3, 4) if self.few else (draw.randint(1, 3), draw.randint(0, 6), 2 * draw.randint(1, 5))
        options = {**self.rotation(d)}
        constants = {}
        if draw.random() < 0.4:
            constants["positions"] = given(draw, self.target, self.rng.integers(-50, 5000, (*lead, n)), "int32")
        elif draw.random() < 0.4:
            constants["offset"] = given(draw, self.target, self.rng.integers(-50, 5000, lead), "int32")
        elif draw.random() < 0.8:
            options["offset"] = draw.randint(-50, 5000)

        def formula(x, positions=None, offset=0, **settings):
            first = np.asarray(values(constants.get("offset", offset)))
            where = first[..., None] + np.arange(n) if positions is None else positions.numpy()
            return formulas.rotary(x, where, **settings)

        return operation("rotary_embedding", {"x": self.floats(*lead, heads, n, d)}, formula, constants, **options)

    def rotation(self, d):
        """Return settings of a rotary embedding of d features."""
        draw = self.draw
        scalings = (
            None,
            None,
            F.LinearScaling(2.5),
            F.NTKScaling(4.0),
            F.YaRNScaling(4.0, 64),
            F.Llama3Scaling(original_length=64),
        )
        recipes = {"base": draw.choice((10000.0, 100.0)), "dim": 2 * draw.randint(1, d // 2), "interleaved": True,
                   "scaling": draw.choice(scalings)}  # fmt: skip
        return {name: value for name, value in recipes.items() if draw.random() < 0.4}
