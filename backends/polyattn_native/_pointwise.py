"""Pointwise and row operations on NumPy arrays by the native library.

:func:`operation` is what ``Backend.operation`` describes. It returns None, so that polyattn's formula is computed, for
arrays other than float32 and float64, arrays whose rows are not contiguous, and whenever the library finds that a
result is not finite or that an intermediate result has left the range in which the plain formula is accurate.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyattn.backend import Array

from ._arrays import CODES, aligned, is_matrix, is_whole, is_wide, layout_of, wide
from ._library import library, status, succeeded
from ._structures import AdamWStep, Status
from ._threads import thread_count
from ._views import address_of, memory_of, strides_of

__all__ = ["LEAST_ROWS", "operation", "operations"]

GELU = {"none": 0, "tanh": 1}  # enum Activation of cpp/pointwise.cpp
SILU = 2
NULL = None
LEAST_ROWS, LEAST_COLUMNS = 96, 32  # of the smallest matrix product that is faster than NumPy's BLAS


def operation(name: str, *arrays: Array | None, **options: Any) -> Any:
    """Return the results of an operation on NumPy arrays, or None: see ``polyattn.backend.Backend.operation``."""
    function = operations("numpy").get(name)
    if function is None:
        return None
    results = function(*arrays, **options)
    if results is None:
        for x in arrays:
            if x is not None and not x.flags.aligned:
                return function(*map(aligned, arrays), **options)
    return results


@functools.cache
def operations(backend: str) -> Mapping[str, Callable[..., Any]]:
    """Return the operations of the library by name, with the number of threads of a backend; none without a library.

    All of them take and return NumPy arrays; those of bfloat16 are its bits, of dtype ``BFLOAT16``.
    """
    functions = library()
    if isinstance(functions, str):
        return {}
    own = Operations(functions, backend)
    return {name: getattr(own, name) for name in vars(Operations) if not name.startswith("_")}


def instruction_set() -> str:
    """Return the instruction set of the library, or an empty string."""
    found = status()
    return "" if isinstance(found, str) else found.instruction_set


def _rows(x: Array, width: int) -> Array:
    """(…, width) → (rows, width)."""
    return x.reshape(x.size // width if width else 0, width)


class Operations:
    """The operations, under the names that they have in ``Backend.operation``."""

    def __init__(self, functions: ctypes.CDLL, backend: str) -> None:
        self._backend = backend
        # Elsewhere NumPy's BLAS is as fast, or it was not measured.
        self._multiplies = instruction_set().startswith("x86-64-v4")
        code, count, pointer, real = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        codes: list[type[Any]] = [code] * 3
        sizes: list[type[Any]] = [count] * 2
        rows: list[type[Any]] = [pointer, count]
        matrix: list[type[Any]] = [pointer, count, count]
        self._activation = functions.polyattn_activation
        self._activation.argtypes = [*codes, *sizes, *rows * 2, pointer]
        self._activation_backward = functions.polyattn_activation_backward
        self._activation_backward.argtypes = [*codes, *sizes, *rows * 3, *[pointer] * 2]
        self._softmax = functions.polyattn_softmax
        self._softmax.argtypes = [*codes, *sizes, *rows, pointer]
        self._softmax_backward = functions.polyattn_softmax_backward
        self._softmax_backward.argtypes = [*codes, *sizes, *rows * 2, pointer]
        self._norm = functions.polyattn_norm
        self._norm.argtypes = [*codes, *sizes, real, *rows, *[pointer] * 5]
        self._norm_backward = functions.polyattn_norm_backward
        self._norm_backward.argtypes = [*codes, *sizes, *rows * 2, *[pointer] * 6]
        self._norm_parts = functions.polyattn_norm_parts
        self._norm_parts.restype, self._norm_parts.argtypes = count, sizes
        self._matmul = functions.polyattn_matmul
        self._matmul.argtypes = [code, code, *sizes, count, *matrix * 2, pointer, pointer]
        self._sum_rows = functions.polyattn_sum_rows
        self._sum_rows.argtypes = [code, code, *sizes, *rows, pointer]
        self._adamw = functions.polyattn_adamw
        self._adamw.argtypes = [code, code, count, ctypes.POINTER(AdamWStep), pointer, pointer]
        self._rotary = functions.polyattn_rotary
        self._rotary.argtypes = [
            *codes, *[count] * 5, pointer, ctypes.POINTER(count), pointer, pointer, count, pointer
        ]  # fmt: skip
        for function in (
            self._activation, self._activation_backward, self._softmax, self._softmax_backward, self._norm,
            self._norm_backward, self._matmul, self._sum_rows, self._rotary, self._adamw,
        ):  # fmt: skip
            function.restype = Status

    # ---- activations ---------------------------------------------------------------------------------------------

    def gelu(self, x: Array, *, approximate: str) -> Array | None:
        return self._activated(GELU[approximate], x)

    def gelu_backward(self, dy: Array, x: Array, *, approximate: str) -> Array | None:
        return self._activated_backward(GELU[approximate], dy, x)

    def silu(self, x: Array) -> Array | None:
        return self._activated(SILU, x)

    def silu_backward(self, dy: Array, x: Array) -> Array | None:
        return self._activated_backward(SILU, dy, x)

    def geglu(self, gate: Array, up: Array, *, approximate: str) -> Array | None:
        return self._activated(GELU[approximate], gate, up)

    def geglu_backward(self, dy: Array, gate: Array, up: Array, *, approximate: str) -> tuple[Array, Array] | None:
        return self._gated_backward(GELU[approximate], dy, gate, up)

    def swiglu(self, gate: Array, up: Array) -> Array | None:
        return self._activated(SILU, gate, up)

    def swiglu_backward(self, dy: Array, gate: Array, up: Array) -> tuple[Array, Array] | None:
        return self._gated_backward(SILU, dy, gate, up)

    def _activated(self, activation: int, x: Array, up: Array | None = None) -> Array | None:
        layout = layout_of(self._backend, 0, x) if up is None else layout_of(self._backend, 0, x, up)
        if layout is None:
            return None
        dtype, rows, n, steps, threads = layout
        y = np.empty(x.shape, x.dtype)
        done = self._activation(
            dtype, activation, threads, rows, n, address_of(x), steps[0], address_of(up), steps[-1], memory_of(y)
        )
        return y if succeeded(done) else None

    def _activated_backward(self, activation: int, dy: Array, x: Array) -> Array | None:
        layout = layout_of(self._backend, 0, dy, x)
        if layout is None:
            return None
        dtype, rows, n, steps, threads = layout
        dx = np.empty(x.shape, x.dtype)
        done = self._activation_backward(
            dtype, activation, threads, rows, n, address_of(dy), steps[0], address_of(x), steps[1], NULL, 0,
            memory_of(dx), NULL,
        )  # fmt: skip
        return dx if succeeded(done) else None

    def _gated_backward(self, activation: int, dy: Array, gate: Array, up: Array) -> tuple[Array, Array] | None:
        layout = layout_of(self._backend, 0, dy, gate, up)
        if layout is None:
            return None
        dtype, rows, n, steps, threads = layout
        dgate, dup = np.empty(gate.shape, gate.dtype), np.empty(up.shape, up.dtype)
        done = self._activation_backward(
            dtype, activation, threads, rows, n, address_of(dy), steps[0], address_of(gate), steps[1], address_of(up),
            steps[2], memory_of(dgate), memory_of(dup),
        )  # fmt: skip
        return (dgate, dup) if succeeded(done) else None

    # ---- rows ----------------------------------------------------------------------------------------------------

    def softmax(self, x: Array, *, axis: int) -> Array | None:
        return self._normalised(0, x, axis)

    def softmax_backward(self, dy: Array, y: Array, *, axis: int) -> Array | None:
        return self._normalised_backward(0, dy, y, axis)

    def log_softmax(self, x: Array, *, axis: int) -> Array | None:
        return self._normalised(1, x, axis)

    def log_softmax_backward(self, dy: Array, y: Array, *, axis: int) -> Array | None:
        return self._normalised_backward(1, dy, y, axis)

    def _normalised(self, logarithm: int, x: Array, axis: int) -> Array | None:
        layout = layout_of(self._backend, 1, x) if axis in (-1, x.ndim - 1) else None
        if layout is None:
            return None
        dtype, rows, n, steps, threads = layout
        y = np.empty(x.shape, x.dtype)
        done = self._softmax(dtype, logarithm, threads, rows, n, address_of(x), steps[0], memory_of(y))
        return y if succeeded(done) else None

    def _normalised_backward(self, logarithm: int, dy: Array, y: Array, axis: int) -> Array | None:
        layout = layout_of(self._backend, 1, dy, y) if axis in (-1, y.ndim - 1) else None
        if layout is None:
            return None
        dtype, rows, n, steps, threads = layout
        dx = np.empty(y.shape, y.dtype)
        done = self._softmax_backward(
            dtype, logarithm, threads, rows, n, address_of(dy), steps[0], address_of(y), steps[1], memory_of(dx)
        )
        return dx if succeeded(done) else None

    def layer_norm(
        self, x: Array, weight: Array | None, bias: Array | None, *, eps: float, axes: int
    ) -> tuple[Array, Array, Array] | None:
        return self._normed(1, x, weight, bias, eps, axes)

    def rms_norm(self, x: Array, weight: Array | None, *, eps: float, axes: int) -> tuple[Array, Array] | None:
        results = self._normed(0, x, weight, None, eps, axes)
        return None if results is None else (results[0], results[2])

    def layer_norm_backward(
        self, dy: Array, xhat: Array, root: Array, weight: Array | None, bias: Array | None, *, axes: int
    ) -> tuple[Array, Array | None, Array | None] | None:
        return self._normed_backward(1, dy, xhat, root, weight, bias, axes)

    def rms_norm_backward(
        self, dy: Array, x: Array, root: Array, weight: Array | None, *, axes: int
    ) -> tuple[Array, Array | None] | None:
        grads = self._normed_backward(0, dy, x, root, weight, None, axes)
        return None if grads is None else grads[:2]

    def _normed(
        self, centred: int, x: Array, weight: Array | None, bias: Array | None, eps: float, axes: int
    ) -> tuple[Array, Array, Array] | None:
        """Return y, x̂ and the root; x̂ is y for RMS norm, and without weight and bias if it has the dtype of y."""
        layout = layout_of(self._backend, axes, x)
        if layout is None:
            return None
        dtype, rows, n, (step,), threads = layout
        if not (is_whole(weight, x.dtype, n) and is_whole(bias, x.dtype, n)):
            return None
        of_sums = wide(x.dtype)
        y = xhat = np.empty(x.shape, x.dtype)
        root = np.empty((*x.shape[: x.ndim - axes], *(1,) * axes), of_sums)
        if centred and not (weight is None and bias is None and x.dtype == of_sums):
            xhat = np.empty(x.shape, of_sums)
        done = self._norm(
            dtype, centred, threads, rows, n, eps, address_of(x), step, address_of(weight), address_of(bias),
            memory_of(y), NULL if xhat is y else memory_of(xhat), memory_of(root),
        )  # fmt: skip
        return (y, xhat, root) if succeeded(done) else None

    def _normed_backward(
        self, centred: int, dy: Array, x: Array, root: Array, weight: Array | None, bias: Array | None, axes: int
    ) -> tuple[Array, Array | None, Array | None] | None:
        of_sums, given = wide(dy.dtype), dy.dtype
        apart = bool(centred) and given != of_sums  # x̂ is wider than dy
        layout = layout_of(self._backend, axes, *((dy,) if apart else (dy, x)))
        if layout is None or (apart and not is_whole(x, of_sums, dy.size)):
            return None
        dtype, rows, n, steps, threads = layout
        if not (is_whole(weight, given, n) and is_whole(bias, given, n) and is_whole(root, of_sums, rows)):
            return None
        dx = np.empty(dy.shape, given)
        dweight, dbias = (None if p is None else np.empty(p.shape, p.dtype) for p in (weight, bias))
        wanted = (dweight is not None) + (dbias is not None)
        parts = np.empty(wanted * self._norm_parts(rows, n), of_sums) if wanted else None
        done = self._norm_backward(
            dtype, centred, threads, rows, n, address_of(dy), steps[0], address_of(x), n if apart else steps[1],
            address_of(root), address_of(weight), memory_of(dx), address_of(dweight), address_of(dbias),
            address_of(parts),
        )  # fmt: skip
        return (dx, dweight, dbias) if succeeded(done) else None

    # ---- linear maps ---------------------------------------------------------------------------------------------

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array | None:
        if math.prod(x.shape[:-1]) < LEAST_ROWS:
            return None
        y = self._product(_rows(x, weight.shape[0]), weight, bias)
        return None if y is None else y.reshape(*x.shape[:-1], weight.shape[1])

    def linear_backward(
        self, dy: Array, x: Array, weight: Array, bias: Array | None, *, inputs: bool
    ) -> tuple[Array | None, Array, Array | None] | None:
        x_rows, dy_rows = _rows(x, weight.shape[0]), _rows(dy, weight.shape[1])
        dweight = self._product(x_rows.T, dy_rows)
        if dweight is None:
            return None
        dx = self._product(dy_rows, weight.T) if inputs else None
        dbias = None if bias is None else self._sum_of_rows(dy_rows)
        if (inputs and dx is None) or (bias is not None and dbias is None):
            return None
        return None if dx is None else dx.reshape(x.shape), dweight, dbias

    def _product(self, a: Array, b: Array, bias: Array | None = None) -> Array | None:
        """Return a b + bias for matrices with any strides; None where NumPy's product is faster."""
        (m, k), n = a.shape, b.shape[1]
        if not self._multiplies or m < LEAST_ROWS or min(k, n) < LEAST_COLUMNS:
            return None
        if not (is_matrix(a, a) and is_matrix(b, a) and b.shape[0] == k and is_whole(bias, a.dtype, n)):
            return None
        y = np.empty((m, n), a.dtype)
        done = self._matmul(
            CODES[a.dtype], thread_count(self._backend), m, k, n, address_of(a), *strides_of(a), address_of(b),
            *strides_of(b), address_of(bias), memory_of(y),
        )  # fmt: skip
        return y if succeeded(done) else None

    def _sum_of_rows(self, x: Array) -> Array | None:
        layout = layout_of(self._backend, 1, x)
        if layout is None:
            return None
        total = np.empty(layout.n, x.dtype)
        done = self._sum_rows(
            layout.dtype, layout.threads, layout.rows, layout.n, address_of(x), layout.steps[0], memory_of(total)
        )
        return total if succeeded(done) else None

    # ---- rotary embedding ----------------------------------------------------------------------------------------

    def rotary(self, x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array | None:
        of_sums, (n, half) = wide(x.dtype), cos.shape[-2:]
        if x.dtype not in CODES or not 2 <= x.ndim <= 4 or x.size == 0 or half == 0 or not x.flags.aligned:
            return None
        entries, heads = (1,) * (4 - x.ndim) + x.shape[:-2]
        each = cos.size // (n * half)  # entries with angles of their own
        if type(x) is not np.ndarray or each not in (1, entries) or cos.shape[-3:-2] not in ((), (1,)):
            return None
        if not (is_whole(cos, of_sums, each * n * half) and is_whole(sin, of_sums, each * n * half)):
            return None
        steps = (0,) * (4 - x.ndim) + strides_of(x)
        if steps[-1] != 1 or any(step % x.itemsize for step in x.strides):
            return None
        y = np.empty(x.shape, x.dtype)
        done = self._rotary(
            CODES[x.dtype], interleaved, thread_count(self._backend), entries, heads, n, x.shape[-1], half,
            address_of(x), (ctypes.c_int64 * 3)(*steps[:3]), address_of(cos), address_of(sin),
            n * half if each > 1 else 0, memory_of(y),
        )  # fmt: skip
        return y if succeeded(done) else None

    # ---- AdamW ---------------------------------------------------------------------------------------------------

    def adamw(
        self, theta: Array, grad: Array, mean: Array, square: Array, *numbers: Array, betas: tuple[float, float],
        squares: tuple[float, float],
    ) -> tuple[Array, Array, Array] | None:  # fmt: skip
        """Return the new parameter and moments; ``numbers`` are factor, inside, outside and decay."""
        layout = layout_of(self._backend, 0, theta, grad, mean, square) if is_wide(theta) else None
        step = AdamWStep(*betas, *map(float, numbers), *squares)
        if layout is None or layout.rows != 1 or not (step.inside == 0 or squares[0] <= step.inside <= squares[1]):
            return None
        updated = np.empty(theta.shape, theta.dtype), np.empty(theta.shape, theta.dtype), np.empty_like(square)
        inputs = (ctypes.c_void_p * 4)(*map(address_of, (theta, grad, mean, square)))
        outputs = (ctypes.c_void_p * 3)(*map(address_of, updated))
        done = self._adamw(layout.dtype, layout.threads, layout.n, step, inputs, outputs)
        return updated if succeeded(done) else None
