"""MLX as a backend of polyattn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import Array, Backend, DTypeError, dtype_name

__all__ = ["backend"]


class MlxBackend(Backend):
    """Arrays of MLX, in memory that the host and Apple's GPU share; MLX's own setting selects where it computes."""

    name = "mlx"
    array_modules = ("mlx.core", "mlx")  # the first is imported to see whether the library is there
    install = 'pip install "mlx[cpu]"'
    lacks: ClassVar[Mapping[str, str]] = {
        "in_place": "MLX's arrays never change",
    }
    expected_failures: ClassVar[Mapping[str, str]] = {
        "caches.threads_do_not_meet": "what one thread has left uncomputed, MLX does not compute in another",
        "errors.dtypes_that_are_not_real_floats[complex128]": "MLX's one complex dtype is complex64",
        "transformer.block_is_taken_over_whole": "MLX pickles float64 as float32",
    }

    def namespace(self) -> Any:
        """Return mlx.core with the missing parts of the standard; loading this plugin does not import the library."""
        from . import _namespace

        return _namespace

    def owns(self, x: object) -> bool:
        """Recognise the type of the library's arrays."""
        import mlx.core as mx

        return isinstance(x, mx.array)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Return an array of the library: x itself if it is one, else a copy of a NumPy array."""
        import mlx.core as mx

        if isinstance(x, mx.array):
            return mx.array(x) if copy else x
        if copy is False:
            raise ValueError("MLX copies NumPy arrays")
        name = dtype_name(x.dtype)  # type: ignore[attr-defined]
        if name == "bfloat16":  # a NumPy dtype of ml_dtypes, which MLX does not know
            return mx.array(x.view(np.uint16)).view(mx.bfloat16)  # type: ignore[attr-defined]
        return mx.array(x, dtype=self.dtype(name))

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return the array on the host, through DLPack; it may be a view."""
        import mlx.core as mx

        if x.dtype != mx.bfloat16:
            return np.asarray(np.from_dlpack(x))
        try:
            import ml_dtypes
        except ImportError as error:
            raise DTypeError("bfloat16 can leave MLX only with ml_dtypes: pip install ml_dtypes") from error
        return np.asarray(np.from_dlpack(x.view(mx.uint16)).view(ml_dtypes.bfloat16))

    def dtype(self, name: str) -> Any:
        """Return MLX's dtype; it computes in float64 only on the CPU."""
        import mlx.core as mx

        if name == "float64" and mx.default_device().type != mx.cpu:
            raise DTypeError("MLX has float64 only on the CPU: mlx.core.set_default_device(mlx.core.cpu)")
        return super().dtype(name)

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Read the predicate; under vmap and compile, where MLX hides values, compute both branches and select."""
        import mlx.core as mx
        from mlx.utils import tree_map

        try:
            chosen = bool(predicate)
        except ValueError:
            return tree_map(lambda a, b: None if a is None else mx.where(predicate, a, b), if_true(), if_false())
        return if_true() if chosen else if_false()

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Use MLX's function for one start; a start for each entry uses the fallback."""
        import mlx.core as mx

        if getattr(start, "ndim", 0) == 1:
            return super().update_slice(x, value, start, axis)
        return mx.slice_update(x, value, mx.array([start]), (axis % x.ndim,))

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Use MLX's function, which sums repeated rows."""
        return x.at[index].add(value)

    def differentiable(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
    ) -> Callable[..., Array]:
        """Let ``mlx.core.grad`` call the backward, by a custom function."""
        from ._gradients import differentiable

        return differentiable(forward, backward)

    def synchronize(self, *arrays: Array) -> None:
        """Evaluate lazy arrays."""
        import mlx.core as mx

        mx.eval(*arrays)


backend = MlxBackend()
