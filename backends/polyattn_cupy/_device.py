"""cuBLAS and this package's device code, as functions of CuPy arrays. This module imports CuPy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from polyattn.backend import Array

__all__ = ["TILE", "launch", "product"]

INTEGERS = """
    kv_heads groups n_q n_k batch query key all_q all_k offset left right length
    offsets lengths q_segments k_segments mask mask_batch mask_head mask_query mask_key
    bias bias_batch bias_head bias_query bias_key
"""
TILE = np.dtype([*((name, "i8") for name in INTEGERS.split()), ("scale", "f8"), ("softcap", "f8"), ("plain", "i8")])
"""The device code's struct Tile; pointers are integers here."""

C_TYPES = {"float16": "__half", "float32": "float", "float64": "double"}


@functools.cache
def _function(name: str, dtype: str, bias: str) -> Any:
    """Return a device function for these dtypes of inputs and bias; CuPy compiles it at its first call on a device."""
    score = "double" if dtype == "float64" else "float"
    types = (f"-DSCORE={score}", f"-DWEIGHT={C_TYPES[dtype]}", f"-DBIAS={C_TYPES[bias]}")
    options = ("-std=c++17", *types, f"-DHALF={int('float16' in (dtype, bias))}")
    return cupy.RawKernel(Path(__file__).with_name("_tile.cu").read_text(encoding="ascii"), name, options)


def launch(name: str, types: tuple[str, str], blocks: int, warps: int, *arguments: Any) -> None:
    """Launch a device function on the current stream; integers are passed as 64-bit integers."""
    kinds = {int: np.int64, float: np.float64}
    passed = tuple(kinds[type(x)](x) if type(x) in kinds else x for x in arguments)
    _function(name, *types)((blocks,), (32 * warps,), passed)


@functools.cache
def _factors(dtype: str) -> tuple[Any, int]:
    """Return the factors 0 and 1 as a NumPy array, and its address."""
    numbers = np.array([0, 1], dtype=dtype)
    return numbers, numbers.ctypes.data


def product(
    a: Array, b: Array, out: Array, *, transpose_a: bool = False, transpose_b: bool = False, add: bool = False
) -> None:
    """Write ``a @ b`` into ``out``, or add it to ``out``: arrays ``(N, rows, columns)`` of C-contiguous matrices.

    ``cupy.matmul`` would convert float16 to float32 and so not use the tensor cores, would copy slices and
    transposes, and cannot accumulate. cuBLAS is column-major, so it computes outᵀ = bᵀ aᵀ.
    """
    cublas = cupy.cuda.cublas
    double = out.dtype == np.float64
    numbers, address = _factors(out.dtype.name)
    operations = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
    cublas.gemmStridedBatchedEx(
        cupy.cuda.device.get_cublas_handle(),
        operations[transpose_b],
        operations[transpose_a],
        out.shape[-1],
        out.shape[-2],
        a.shape[-2] if transpose_a else a.shape[-1],
        address + numbers.itemsize,
        *_matrices(b),
        *_matrices(a),
        address + numbers.itemsize * add,
        *_matrices(out),
        out.shape[0],
        cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


def _matrices(x: Array) -> tuple[int, int, int, int]:
    """Return the pointer, the type, the row stride and the matrix stride of some matrices."""
    runtime = cupy.cuda.runtime
    types = {"float16": runtime.CUDA_R_16F, "float32": runtime.CUDA_R_32F, "float64": runtime.CUDA_R_64F}
    return x.data.ptr, types[x.dtype.name], x.shape[-1], x.strides[0] // x.itemsize
