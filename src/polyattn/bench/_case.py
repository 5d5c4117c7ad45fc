"""One problem to time, and its inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..kernels import FLOAT_DTYPES

__all__ = ["TASKS", "Case", "Inputs", "Shape", "parse_shape"]

TASKS = {"attention": ("forward", "both"), "layer": ("forward", "both"), "train": ("step",)}
"""The parts of each task that can be timed; ``both`` is the forward and the backward together."""

Inputs = dict[str, NDArray[Any]]


class Shape(NamedTuple):
    """The axis lengths of a problem. Written ``batch,heads,n,d``, or ``batch,heads,n_q:n_k,d`` if these differ."""

    batch: int
    heads: int
    n_q: int
    n_k: int
    d: int

    def __str__(self) -> str:
        n = str(self.n_q) if self.n_q == self.n_k else f"{self.n_q}:{self.n_k}"
        return f"{self.batch},{self.heads},{n},{self.d}"

    @property
    def d_model(self) -> int:
        """The width of a layer with these heads."""
        return self.heads * self.d

    @property
    def scores(self) -> int:
        """The number of scores."""
        return self.batch * self.heads * self.n_q * self.n_k


def parse_shape(text: str) -> Shape:
    """Parse a shape like ``1,8,2048,64`` or ``1,8,1:4096,64``; raise ArgumentError if it is not valid."""
    found = re.fullmatch(r"(\d+),(\d+),(\d+)(?::(\d+))?,(\d+)", text.strip())
    if found is None or 0 in (numbers := [int(x) for x in found.groups(default=found[3])]):
        raise ArgumentError(
            f"shape: expected batch,heads,n,d like 1,8,2048,64, or 1,8,1:4096,64 for n_q:n_k, got {text!r}"
        )
    return Shape(*numbers)


@dataclass(frozen=True)
class Case:
    """A problem: the task, the part of it, and the shape. ``causal`` needs n_q = n_k, where all libraries agree."""

    task: str
    what: str
    shape: Shape
    causal: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ArgumentError(f"task: expected one of {', '.join(TASKS)}, got {self.task!r}")
        if self.what not in TASKS[self.task]:
            raise ArgumentError(f"what: expected {' or '.join(TASKS[self.task])} of {self.task}, got {self.what!r}")
        if self.dtype not in FLOAT_DTYPES:
            raise ArgumentError(f"dtype: expected one of {', '.join(FLOAT_DTYPES)}, got {self.dtype!r}")
        if self.shape.n_q != self.shape.n_k and (self.causal or self.task != "attention"):
            what = "with causal, because libraries differ in its alignment" if self.causal else f"in {self.task}"
            raise ArgumentError(f"shape: expected n_q = n_k {what}, got {self.shape}")

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def host_dtype(self) -> str:
        """The dtype in which inputs are generated and results are compared: float32, or float64."""
        return "float64" if self.dtype == "float64" else "float32"

    def inputs(self) -> Inputs:
        """Return the inputs of every contestant, the same at each call.

        Attention has ``q``, ``k``, ``v`` and ``dout``; a layer ``x`` and ``dy``, a training step ``x`` and ``target``,
        all (batch, n, d_model).
        """
        batch, heads, n_q, n_k, d = self.shape
        shapes: dict[str, tuple[int, ...]]
        if self.task == "attention":
            queries, keys = (batch, heads, n_q, d), (batch, heads, n_k, d)
            shapes = {"q": queries, "k": keys, "v": keys, "dout": queries}
        else:
            rows = (batch, n_q, self.shape.d_model)
            shapes = {"x": rows, ("dy" if self.task == "layer" else "target"): rows}
        generator, dtype = np.random.Generator(np.random.PCG64(20)), np.dtype(self.host_dtype).type
        return {name: generator.standard_normal(shape, dtype) for name, shape in shapes.items()}
