"""A function under test: it is run on a problem and compared with the float64 reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import references as ref
from ..compare import TOLERANCES, largest_error
from ._function import AttentionFunction

__all__ = ["SIZES", "Declared", "Problem", "Sizes", "Subject", "Wrong", "ladder", "problem"]

F64 = NDArray[np.float64]


class Wrong(Exception):
    """The function gave a wrong result; the message has the input and both values."""


class Declared(Exception):
    """The check does not apply: the function does not offer what is checked."""


@dataclass(frozen=True)
class Problem:
    """Inputs (batch, heads, n, d), the upstream gradient, and arguments of :func:`polyattn.attention`."""

    q: F64
    k: F64
    v: F64
    dout: F64
    arguments: dict[str, Any]

    def __str__(self) -> str:
        """Return the shapes and arguments; and the values, if they are few."""
        arrays = {"q": self.q, "k": self.k, "v": self.v} | self.arguments
        few = sum(np.size(x) for x in arrays.values()) <= 24
        return ", ".join(f"{name} {_shown(x, few)}" for name, x in arrays.items())


def _shown(x: Any, values: bool) -> str:
    if not isinstance(x, np.ndarray):
        return str(x)
    return str(np.asarray(x).tolist()) if values else f"{x.dtype.name}{list(x.shape)}"


@dataclass(frozen=True)
class Sizes:
    """The axis lengths of a problem."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d: int
    d_v: int


# In the order in which problems are tried: the first that fails is the smallest found.
SIZES = (
    Sizes(1, 1, 1, 1, 1, 1, 1),
    Sizes(1, 1, 1, 2, 2, 1, 1),
    Sizes(1, 1, 1, 3, 3, 2, 2),
    Sizes(1, 2, 2, 3, 3, 4, 4),
    Sizes(2, 4, 4, 7, 7, 8, 8),
    Sizes(1, 2, 2, 33, 33, 16, 16),
    Sizes(1, 2, 2, 130, 130, 64, 64),
)


def problem(sizes: Sizes, seed: int = 0, **arguments: Any) -> Problem:
    """Return a problem of these sizes with values of one decimal, so that they are short to write down."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> F64:
        return np.round(rng.standard_normal(shape), 1)

    s = sizes
    q, k = draw(s.batch, s.heads, s.n_q, s.d), draw(s.batch, s.kv_heads, s.n_k, s.d)
    v, dout = draw(s.batch, s.kv_heads, s.n_k, s.d_v), draw(s.batch, s.heads, s.n_q, s.d_v)
    return Problem(q, k, v, dout, arguments)


def ladder(**changes: Any) -> Iterator[Problem]:
    """Yield problems from small to large. A change is a number, or a function of the sizes; others are arguments."""
    arguments = {name: x for name, x in changes.items() if name not in Sizes.__dataclass_fields__}
    lengths = {name: x for name, x in changes.items() if name in Sizes.__dataclass_fields__}
    for number, sizes in enumerate(SIZES):
        sizes = replace(sizes, **{name: x(sizes) if callable(x) else x for name, x in lengths.items()})
        rng = np.random.default_rng(number)
        given = {name: x(rng, sizes) if callable(x) else x for name, x in arguments.items()}
        yield problem(sizes, number, **given)


@dataclass(frozen=True)
class Subject:
    """A function under test."""

    function: AttentionFunction

    def needs(self, *arguments: str, dtype: str = "float32", gradients: bool = False) -> None:
        """Raise :class:`Declared` unless the function has these arguments, the dtype, and gradients if asked."""
        for argument in arguments:
            if argument not in self.function.offers:
                raise Declared(f"no argument {argument}")
        if dtype not in self.function.dtypes:
            raise Declared(f"no {dtype}")
        if gradients and self.function.backward is None and self.function.library.vjp is None:
            raise Declared("no gradients")

    def inputs(self, x: Problem, dtype: str) -> tuple[list[Any], dict[str, Any]]:
        """Return q, k and v and the arguments as arrays of the function's library."""
        make, layout = self.function.library.make, self.function.in_layout
        arrays = [make(layout(part), dtype) for part in (x.q, x.k, x.v)]
        return arrays, {name: self._native(value, dtype) for name, value in x.arguments.items()}

    def _native(self, value: Any, dtype: str) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return self.function.library.make(value, dtype if value.dtype.kind == "f" else value.dtype.name)

    def call(self, arrays: Iterable[Any], arguments: dict[str, Any]) -> F64:
        """Return the output (batch, heads, n_q, d_v) on the host."""
        return self.on_host(self.function.attention(*arrays, **arguments))

    def on_host(self, out: Any) -> F64:
        """Return an output or a gradient on the host, in the layout (batch, heads, n, d)."""
        return self.function.in_layout(self.function.library.to_numpy(out)).astype(np.float64)

    def out(self, x: Problem, dtype: str = "float32") -> F64:
        """Return the output for a problem on the host."""
        return self.call(*self.inputs(x, dtype))

    def gradients(self, x: Problem, dtype: str = "float32") -> dict[str, F64]:
        """Return the gradients of q, k, v and, if one is given, the bias."""
        arrays, arguments = self.inputs(x, dtype)
        dout = self.function.library.make(self.function.in_layout(x.dout), dtype)
        names = ["q", "k", "v"]
        if self.function.backward is not None:
            found = list(self.function.backward(dout, *arrays, **arguments))
            names += ["bias"] * ("bias" in arguments)
        else:
            assert self.function.library.vjp is not None, "a check of gradients asks needs(gradients=True) first"
            if "bias" in arguments:
                names.append("bias")
                arrays.append(arguments.pop("bias"))

            def function(q: Any, k: Any, v: Any, *bias: Any) -> Any:
                return self.function.attention(q, k, v, **arguments, **({"bias": bias[0]} if bias else {}))

            found = list(self.function.library.vjp(function, arrays, dout))
        to_numpy = self.function.library.to_numpy
        return {
            name: to_numpy(grad).astype(np.float64) if name == "bias" else self.on_host(grad)
            for name, grad in zip(names, found, strict=True)
        }

    def rounded(self, x: Problem, dtype: str) -> Problem:
        """Return a problem with every value rounded to the dtype, so that the reference has the same inputs."""

        def values(part: Any) -> Any:
            if not (isinstance(part, np.ndarray) and part.dtype.kind == "f"):
                return part
            with np.errstate(over="ignore"):
                return self.function.library.to_numpy(self.function.library.make(part, dtype)).astype(np.float64)

        arguments = {name: values(part) for name, part in x.arguments.items()}
        return Problem(values(x.q), values(x.k), values(x.v), values(x.dout), arguments)

    def expect(self, problems: Iterable[Problem], dtype: str = "float32", *, gradients: bool = False) -> str:
        """Compare the output, or the gradients, with the reference for each problem; return the largest error."""
        largest = 0.0
        for each in problems:
            self.needs(*each.arguments, dtype=dtype, gradients=gradients)
            x = self.rounded(each, dtype)
            if gradients:
                found = self.gradients(x, dtype)
                answer = ref.attention_gradients(x.dout, x.q, x.k, x.v, **x.arguments)._asdict()
                pairs = {f"the gradient of {name}": (grad, answer[name]) for name, grad in found.items()}
            else:
                pairs = {"out": (self.out(x, dtype), ref.attention(x.q, x.k, x.v, **x.arguments).out)}
            # A gradient may be zero by mathematics; its terms are of the size of the upstream gradient.
            scale = max(1.0, *(float(np.max(np.abs(want), initial=0.0)) for _, want in pairs.values()))
            for what, (got, want) in pairs.items():
                largest = max(largest, compared(got, want, dtype, each, what, scale if gradients else None))
        return f"error ≤ {largest:.1g}"


def compared(got: F64, want: F64, dtype: str, x: Problem, what: str = "out", scale: float | None = None) -> float:
    """Return the largest error relative to the largest expected value; raise :class:`Wrong` above the tolerance."""
    if got.shape != want.shape:
        raise Wrong(f"{what}: expected the shape {want.shape}, got {got.shape}; at {x}")
    if not want.size:
        return 0.0
    error, worst = largest_error(got, want, scale)
    if error > TOLERANCES[dtype]:
        digits = 15 if dtype == "float64" else 7
        numbers = f"expected {want[worst]:.{digits}g}, got {got[worst]:.{digits}g}"
        raise Wrong(f"{what}{list(worst)}: {numbers} in {dtype}; at {x}")
    return error
