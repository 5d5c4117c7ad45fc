"""Dask arrays as a polyattn backend: lazy arrays in chunks, each of which the library of the chunk computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from polyattn.backend import Array, ArrayState, Backend, Kernel

__all__ = ["backend"]

Result = TypeVar("Result")
FORMULAS = [
    f"range.{name}" for name in ("norms", "activations", "linear", "sums_over_rows", "embedding", "rotary_embedding")
]
UPDATES = [
    f"optim.adamw_at_the_ends_of_the_range[{dtype}-one {size}]"
    for dtype in ("float32", "float64")
    for size in ("large", "larger", "of the largest")
]


class DaskBackend(Backend):
    """Arrays of ``dask.array``."""

    name = "dask"
    array_modules = ("dask.array", "dask")
    install = 'pip install "polyattn[dask]"'
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("float16", "bfloat16"), "its namespace has no floats of 16 bits; chunks may have them"),
        "shared_memory": "chunks are copies, and may be in other processes",
        "dlpack": "a chunk may be in another process, or not be computed yet",
        "devices": "Dask's workers have the devices",
        "in_place": "a task must not change its inputs",
        "values": "no value is known before a graph is computed",
        **dict.fromkeys(("autograd", "second_order", "forward_mode"), "Dask does not differentiate, polyattn does"),
        "vmap": "Dask has none; leading axes are batches",
        **dict.fromkeys(("jit", "scan"), "a graph of Dask is a program already"),
    }
    expected_failures: ClassVar[Mapping[str, str]] = {
        "contract.has_the_functions_of_the_standard": "dask.array has no from_dlpack",
        **dict.fromkeys(FORMULAS, "the formula for the ends of the range is chosen by values of the other one"),
        **dict.fromkeys(UPDATES, "a graph of many updates is too deep for Dask: persist the state of each step"),
    }

    @property
    def kernels(self) -> Sequence[Kernel]:  # type: ignore[override]  # read on each access: the kernel imports Dask
        """Return the kernel that builds a graph."""
        from polyattn.distributed.dask import GRAPH

        return (GRAPH,)

    def namespace(self) -> Any:
        """Return array-api-compat's namespace of ``dask.array``."""
        import array_api_compat.dask.array as xp

        return xp

    def owns(self, x: object) -> bool:
        """Recognise ``dask.array.Array``."""
        import dask.array as da

        return isinstance(x, da.Array)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Return a Dask array: a NumPy array in chunks of positions."""
        from polyattn.distributed.dask import chunked

        return chunked(x, copy)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Compute the array."""
        from polyattn.distributed.dask import computed

        return computed(x)

    def shares(self, x: Array) -> bool:
        """Share nothing: chunks are copies, or are in other processes."""
        return False

    def state(self, x: Array) -> ArrayState:
        """Refuse arrays with chunks of unknown size; values are never read."""
        unknown = any(n != n for n in x.shape)
        return ArrayState("has chunks of unknown sizes (x.compute_chunk_sizes() makes them known)" if unknown else None,
                          readable=False)  # fmt: skip

    def cond(self, predicate: Array, if_true: Callable[[], Result], if_false: Callable[[], Result]) -> Result:
        """Choose lazily, element by element, between the two results."""
        result: Result = chosen(predicate, if_true(), if_false())
        return result

    def operation(self, name: str, *arrays: Array | None, **options: Any) -> Any:
        """Compute linear maps of arrays with leading axes in their chunks: a reshape to matrices would change these."""
        x: Any = arrays[0]
        if name not in ("linear", "linear_backward") or x.ndim < 3 or x.dtype.itemsize < 4:
            return None
        return linear(*arrays) if name == "linear" else linear_backward(*arrays, **options)

    def synchronize(self, *arrays: Array) -> None:
        """Compute the arrays together, and keep their chunks where they were computed."""
        from polyattn.distributed.dask import keep

        keep(arrays)


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return x W + b."""
    import dask.array as da

    y = da.tensordot(x, weight, axes=1)
    return y if bias is None else y + bias


def linear_backward(
    dy: Array, x: Array, weight: Array, bias: Array | None, *, inputs: bool
) -> tuple[Array | None, Array, Array | None]:
    """Return the gradients of x, or None without ``inputs``, of the weight and of the bias."""
    import dask.array as da

    lead = tuple(range(dy.ndim - 1))
    dx = da.tensordot(dy, weight.T, axes=1) if inputs else None
    return dx, da.tensordot(x, dy, axes=(lead, lead)), None if bias is None else dy.sum(axis=lead)


def chosen(predicate: Array, one: Any, other: Any) -> Any:
    """Return ``one`` where the predicate is true, else ``other``: arrays, tuples of them, or None."""
    import dask.array as da

    if one is None:
        return None
    if isinstance(one, tuple):
        values = [chosen(predicate, a, b) for a, b in zip(one, other, strict=True)]
        return type(one)(*values) if hasattr(one, "_fields") else tuple(values)
    return da.where(predicate, one, other)


backend = DaskBackend()
