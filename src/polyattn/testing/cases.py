"""The attention problems that every kernel of every backend is checked on.

Few shapes, because a compiling library compiles for each; many arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Array

__all__ = ["CASES", "NARROW", "AttentionCase", "Problem"]

Shape = tuple[int, ...]
Make = Callable[..., Array]


@dataclass(frozen=True)
class Problem:
    """One attention problem in NumPy: the inputs, the arguments, and the upstream gradients."""

    inputs: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
    arguments: dict[str, Any]
    dout: NDArray[Any]
    dlse: NDArray[Any]

    def native(self, make: Make, dtype: str) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """Return inputs and arguments as arrays of a library; sinks and bias in ``dtype`` as well."""
        q, k, v = (make(x, dtype) for x in self.inputs)
        return (q, k, v), {name: self._native(x, make, dtype) for name, x in self.arguments.items()}

    def rounded(self, to_np: Callable[[Array], NDArray[Any]], make: Make, dtype: str) -> Problem:
        """Return the problem with every value rounded to ``dtype``, so that a reference has the same inputs."""

        def round_to(x: Any) -> Any:
            is_float = isinstance(x, np.ndarray) and x.dtype.kind == "f"
            return to_np(make(x, dtype)).astype(np.float64) if is_float else x

        q, k, v = (round_to(x) for x in self.inputs)
        arguments = {name: round_to(x) for name, x in self.arguments.items()}
        return Problem((q, k, v), arguments, round_to(self.dout), self.dlse.astype(np.float32).astype(np.float64))

    @staticmethod
    def _native(x: Any, make: Make, dtype: str) -> Any:
        if isinstance(x, tuple) and any(isinstance(part, np.ndarray) for part in x):
            return tuple(Problem._native(part, make, dtype) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        return make(x, dtype if x.dtype.kind == "f" else x.dtype.name)


@dataclass(frozen=True)
class AttentionCase:
    """A named problem: the shapes, and a function that generates the arguments for the shape of the scores."""

    name: str
    arguments: Callable[[np.random.Generator, Shape], dict[str, Any]]
    q: Shape = (2, 4, 5, 8)
    k: Shape = (2, 4, 7, 8)
    v: Shape = (2, 4, 7, 6)

    def problem(self) -> Problem:
        """Return the problem, the same at each call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        q, k, v = (rng.standard_normal(shape) for shape in (self.q, self.k, self.v))
        lead = np.broadcast_shapes(self.q[:-3], self.k[:-3], self.v[:-3])
        rows = (*lead, *self.q[-3:-1])
        arguments = self.arguments(rng, (*rows, self.k[-2]))
        return Problem((q, k, v), arguments, rng.standard_normal((*rows, self.v[-1])), rng.standard_normal(rows))


def _static(**arguments: Any) -> Callable[[np.random.Generator, Shape], dict[str, Any]]:
    return lambda rng, shape: dict(arguments)


def _mask(*shape: int, **others: Any) -> Callable[[np.random.Generator, Shape], dict[str, Any]]:
    """Generate a mask of that shape in which two thirds of the pairs may attend."""
    return lambda rng, _: {"mask": rng.random(shape) < 2 / 3, **others}


def _bias(*shape: int, **others: Any) -> Callable[[np.random.Generator, Shape], dict[str, Any]]:
    return lambda rng, _: {"bias": rng.standard_normal(shape), **others}


def _sinks(**others: Any) -> Callable[[np.random.Generator, Shape], dict[str, Any]]:
    return lambda rng, shape: {"sinks": rng.standard_normal(shape[-3]), **others}


def _excluding_bias(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    """Generate a bias in which a third of the elements, and one whole row, is −inf."""
    bias = np.where(rng.random(shape) < 1 / 3, -np.inf, rng.standard_normal(shape))
    bias[..., 1, :] = -np.inf
    return {"bias": bias}


def _empty_rows(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    mask = rng.random(shape) < 2 / 3
    mask[..., 2, :] = False
    return {"mask": mask}


def _packed(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    """Three sequences packed into one row of queries; the last has no keys in the second item."""
    of_query = np.array([[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]], dtype=np.int32)
    of_key = np.array([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1]], dtype=np.int32)
    return {"segment_ids": (of_query, of_key)}


def _everything(rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    lengths, offsets = np.array([6, 5], dtype=np.int32), np.array([2, 1], dtype=np.int32)
    return {
        **_packed(rng, shape),
        **_sinks()(rng, shape),
        **_bias(4, 1, 7)(rng, shape),
        **_mask(2, 1, 5, 7)(rng, shape),
        "causal": True,
        "q_offset": offsets,
        "window": (3, None),
        "key_lengths": lengths,
        "scale": 0.3,
        "softcap": 1.5,
    }


_PER_ITEM = np.array([7, 3], dtype=np.int32)
_OFFSETS = np.array([0, -2], dtype=np.int32)

CASES = (
    AttentionCase("plain", _static()),
    AttentionCase("scale", _static(scale=0.7)),
    AttentionCase("softcap", _static(softcap=0.8)),
    AttentionCase("large-scores", _static(scale=40.0)),
    AttentionCase("causal", _static(causal=True)),
    AttentionCase("causal-upper-left", _static(causal=True, q_offset=0)),
    AttentionCase("causal-negative-offset", _static(causal=True, q_offset=-2)),
    AttentionCase("causal-offset-per-item", _static(causal=True, q_offset=_OFFSETS)),
    AttentionCase("causal-more-queries", _static(causal=True), q=(2, 4, 7, 8), k=(2, 4, 5, 8), v=(2, 4, 5, 6)),
    AttentionCase("window-left", _static(window=(1, None))),
    AttentionCase("window-right", _static(window=(None, 0))),
    AttentionCase("window-both", _static(window=(2, 1))),
    AttentionCase("window-none", _static(window=(None, None))),
    AttentionCase("window-causal", _static(window=(2, None), causal=True)),
    AttentionCase("window-empty-rows", _static(window=(1, 0), q_offset=5)),
    AttentionCase("key-lengths", _static(key_lengths=4)),
    AttentionCase("key-lengths-per-item", _static(key_lengths=_PER_ITEM)),
    AttentionCase("key-lengths-causal", _static(key_lengths=_PER_ITEM, causal=True)),
    AttentionCase("key-lengths-zero", _static(key_lengths=np.array([0, 5], dtype=np.int32))),
    AttentionCase("segment-ids", _packed),
    AttentionCase("mask", _mask(2, 4, 5, 7)),
    AttentionCase("mask-of-queries", _mask(5, 1)),
    AttentionCase("mask-of-keys", _mask(7)),
    AttentionCase("mask-of-items", _mask(2, 1, 1, 7)),
    AttentionCase("mask-causal", _mask(2, 1, 1, 7, causal=True)),
    AttentionCase("mask-empty-rows", _empty_rows),
    AttentionCase("bias", _bias(2, 4, 5, 7)),
    AttentionCase("bias-of-heads", _bias(4, 1, 1)),
    AttentionCase("bias-of-keys", _bias(7, causal=True)),
    AttentionCase("bias-excluding", _excluding_bias),
    AttentionCase("bias-softcap", _bias(1, 4, 5, 7, softcap=1.2)),
    AttentionCase("sinks", _sinks()),
    AttentionCase("sinks-empty-rows", _sinks(causal=True, q_offset=-2)),
    AttentionCase("grouped-heads", _static(causal=True), k=(2, 2, 7, 8), v=(2, 2, 7, 6)),
    AttentionCase("one-kv-head", _bias(4, 5, 7), k=(2, 1, 7, 8), v=(2, 1, 7, 6)),
    AttentionCase("broadcast-items", _static(), k=(1, 4, 7, 8), v=(4, 7, 6)),
    AttentionCase("broadcast-axes", _mask(3, 1, 1, 5, 7), q=(2, 4, 5, 8), k=(3, 1, 2, 7, 8), v=(3, 2, 2, 7, 6)),
    AttentionCase("two-axes", _static(causal=True), q=(5, 8), k=(7, 8), v=(7, 6)),
    AttentionCase("one-query", _static(causal=True), q=(2, 4, 1, 8)),
    AttentionCase("everything", _everything),
)

NARROW = tuple(case for case in CASES if case.name in {"plain", "mask-empty-rows", "everything"})
"""The cases that are repeated in every dtype."""
