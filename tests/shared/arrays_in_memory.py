"""Arrays of any library in many memory layouts, each written as source text that a failure message can print."""

import functools
import math
import os
from importlib.metadata import version
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  # NumPy then knows bfloat16
import numpy as np

from polyattn.testing.target import open_backend

EVERYWHERE = ("contiguous", "contiguous", "contiguous", "swapped", "fortran", "sliced", "rows", "strided", "reversed",
              "broadcast")  # fmt: skip
OF_ONE_LIBRARY = {"numpy": ("read-only", "unaligned", "reversed rows", "byte order"), "torch": ("negative view",)}


def opened(backend):
    """Return a library, JAX with a compiler that saves time where a program runs once."""
    if backend == "jax":
        known = tuple(int(part) for part in version("jax").split(".")[:2]) < (0, 12)
        flags = "--xla_backend_optimization_level=0" + " --xla_cpu_use_fusion_emitters=false" * known
        os.environ.setdefault("XLA_FLAGS", flags)
    return open_backend(backend)


class Given(NamedTuple):
    """An array of a problem: its values on the host, exact in its dtype, the dtype, and the layout in memory."""

    values: np.ndarray
    dtype: str
    layout: str = "contiguous"

    @property
    def base(self):
        """The values in the order in which they are stored, of which :attr:`view` makes the array."""
        x = self.values
        if self.layout == "swapped":
            return np.swapaxes(x, -1, -2)
        if self.layout == "fortran":
            return x.T
        if self.layout == "reversed":
            return x[..., ::-1]
        if self.layout == "reversed rows":
            return x[::-1]
        if self.layout == "broadcast":
            return x[..., :1]
        if self.layout == "negative view":
            return -x
        around = {"sliced": ((1, 2), -1), "rows": ((1, 1), -2)}
        if self.layout in around:
            widths, axis = around[self.layout]
            return np.pad(x, [widths if i == x.ndim + axis else (0, 0) for i in range(x.ndim)], constant_values=junk(x))
        if self.layout == "strided":
            return np.stack([x, np.full_like(x, junk(x))], axis=-1).reshape(*x.shape[:-1], 2 * x.shape[-1])
        return x

    @property
    def view(self):
        """The Python expression that makes the array of the stored one, ``x``."""
        return {
            "swapped": "xp.matrix_transpose(x)",
            "fortran": f"xp.permute_dims(x, {tuple(reversed(range(self.values.ndim)))})",
            "reversed": "xp.flip(x, axis=-1)",
            "reversed rows": "x[::-1]",
            "broadcast": f"xp.broadcast_to(x, {self.values.shape})",
            "sliced": "x[..., 1:-2]",
            "rows": "x[..., 1:-1, :]",
            "strided": "x[..., ::2]",
            "read-only": "np.broadcast_to(x, x.shape)",
            "unaligned": "np.frombuffer(b'0' + x.tobytes(), x.dtype, offset=1).reshape(x.shape)",
            "byte order": "x.astype(x.dtype.newbyteorder())",
            "negative view": "xp.complex(0 * x, x).conj().imag",
        }.get(self.layout, "x")

    def native(self, target):
        """Return the array of a library."""
        x = target.make(self.base, self.dtype)
        return x if self.layout == "contiguous" else made(self.view)(x, target.xp)

    def source(self):
        """Return the expression that makes the array."""
        base = self.base
        numbers = f"np.zeros({base.shape})" if base.size == 0 else repr(base.tolist())
        x = f"make({numbers}, {self.dtype!r})"
        return x if self.view == "x" else f"(lambda x: {self.view})({x})"


def junk(x):
    """Return what stands in memory beside an array."""
    return math.nan if x.dtype.kind == "f" else 1


@functools.cache
def made(view):
    """Return the function of a layout's expression."""
    return eval(f"lambda x, xp: {view}", {"np": np})


def layouts(name, dtype, shape):
    """Return the layouts that an array of this library, dtype and shape can have."""
    if len(shape) == 0:
        return ("contiguous",)
    found = [*EVERYWHERE, *OF_ONE_LIBRARY.get(name, ())]
    left_out = set()
    if len(shape) < 2:
        left_out |= {"swapped", "rows"}
    if 0 in shape:
        left_out |= {"unaligned", "broadcast"}
    if dtype not in ("float32", "float64"):
        left_out |= {"negative view"}
    if name == "torch" and dtype.startswith("uint"):  # it has no flip of these
        left_out |= {"reversed"}
    if dtype == "bfloat16":  # of ml_dtypes
        left_out |= {"byte order"}
    return tuple(layout for layout in found if layout not in left_out)


def rounded(x, dtype):
    """Return numbers rounded to a floating dtype, in float64; others unchanged."""
    return x.astype(dtype).astype(np.float64) if x.dtype.kind == "f" else x


def given(draw, target, x, dtype, layout=None):
    """Return an array of numbers in a dtype and in a random layout."""
    with np.errstate(over="ignore"):
        x = rounded(np.asarray(x), dtype)
    layout = draw.choice(layouts(target.name, dtype, x.shape)) if layout is None else layout
    if layout == "broadcast":
        x = np.broadcast_to(x[..., :1], x.shape)
    return Given(x, dtype, layout)


def values(x: Any) -> Any:
    """Return arguments with the values of their arrays."""
    if isinstance(x, Given):
        return x.values
    if isinstance(x, dict):
        return {name: values(y) for name, y in x.items()}
    if isinstance(x, tuple):
        parts = [values(y) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x
