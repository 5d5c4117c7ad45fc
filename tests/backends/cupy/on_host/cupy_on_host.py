"""A stand-in for the part of CuPy that its kernel uses, on host memory: NumPy, a C++ compiler, and cuBLAS's formula.

Arrays are NumPy's, with the address where CuPy has it; what a new one holds is NaN until it
is written. ``RawKernel`` compiles the device code with the host's compiler and runs it thread
by thread (``cuda_on_host.h``). The product reads and writes raw memory as cuBLAS documents it.
"""

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import threading
import types
from pathlib import Path

import numpy as np

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
HEADER = Path(__file__).with_name("cuda_on_host.h")


class Array(np.ndarray):
    """An array whose values nobody may look at: on a device that would mean to wait."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self):
        return contextlib.nullcontext()

    def __bool__(self):
        raise AssertionError("the kernel looked at a value")

    item = tolist = get = __float__ = __int__ = __index__ = __bool__


def array(x):
    return np.asarray(x).view(Array) if isinstance(x, np.ndarray | np.generic) else x


class Cupy(types.ModuleType):
    """The module: what is not here is NumPy's."""

    ndarray = Array

    def __init__(self, folder):
        super().__init__("cupy")
        self.RawKernel = functools.partial(RawKernel, folder)
        self.cuda = types.SimpleNamespace(
            cublas=types.SimpleNamespace(gemmStridedBatchedEx=self._gemm, **CUBLAS),
            device=types.SimpleNamespace(get_cublas_handle=lambda: "handle"),
            runtime=types.SimpleNamespace(CUDA_R_32F=0, CUDA_R_64F=1, CUDA_R_16F=2),
        )
        self.products = []

    def __getattr__(self, name):
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **kwargs: array(found(*args, **kwargs))

    def empty(self, shape, dtype):
        return np.full(shape, np.nan, dtype=dtype).view(Array)

    def _gemm(self, *arguments):
        self.products.append(gemm(*arguments))


# ---- cuBLAS: https://docs.nvidia.com/cuda/cublas/#cublasgemmstridedbatchedex ---------------------------------------

CUBLAS = {
    "CUBLAS_OP_N": 0,
    "CUBLAS_OP_T": 1,
    "CUBLAS_COMPUTE_32F": 68,
    "CUBLAS_COMPUTE_64F": 70,
    "CUBLAS_GEMM_DEFAULT": -1,
}
DTYPES = {0: np.float32, 1: np.float64, 2: np.float16}
COMPUTES = {68: np.float32, 70: np.float64}
ALLOWED = {(68, 0, 0, 0), (68, 2, 2, 0), (70, 1, 1, 1)}


def memory(address, kind, leading, step, rows, columns, count):
    """Return the matrices at an address, (count, rows, columns): an element follows the one above it."""
    dtype = np.dtype(DTYPES[kind])
    assert address % dtype.itemsize == 0
    assert leading >= rows > 0
    length = (count - 1) * step + (columns - 1) * leading + rows
    flat = np.frombuffer((ctypes.c_char * (length * dtype.itemsize)).from_address(address), dtype=dtype)
    strides = tuple(n * dtype.itemsize for n in (step, 1, leading))
    return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), strides)


def gemm(
    handle, op_a, op_b, m, n, k, alpha, a, a_type, a_leading, a_step, b, b_type, b_leading, b_step, beta, c, c_type,
    c_leading, c_step, count, compute, algorithm,
):  # fmt: skip
    assert handle == "handle"
    assert algorithm == -1
    assert (compute, a_type, b_type, c_type) in ALLOWED
    dtype = COMPUTES[compute]
    alpha, beta = (ctypes.cast(x, ctypes.POINTER(np.ctypeslib.as_ctypes_type(dtype)))[0] for x in (alpha, beta))
    a = memory(a, a_type, a_leading, a_step, *((k, m) if op_a else (m, k)), count).astype(dtype)
    b = memory(b, b_type, b_leading, b_step, *((n, k) if op_b else (k, n)), count).astype(dtype)
    c = memory(c, c_type, c_leading, c_step, m, n, count)
    total = (a.swapaxes(1, 2) if op_a else a) @ (b.swapaxes(1, 2) if op_b else b) * dtype(alpha)
    c[...] = total if beta == 0 else total + dtype(beta) * c
    return count, m, n, k


# ---- device code -------------------------------------------------------------------------------------------------


ONE_AT_A_TIME = threading.Lock()


class RawKernel:
    def __init__(self, folder, code, name, options):
        self.launch = getattr(compiled(folder, code, options), f"launch_{name}")
        self.launch.restype = ctypes.c_bool

    def __call__(self, grid, block, args):
        """Pass the addresses of pointers, of 64-bit integers and of one structure."""
        (blocks,), (threads,) = grid, block
        assert threads % 32 == 0
        assert 0 < threads <= 1024
        held = [np.array(x.data.ptr) if isinstance(x, Array) else np.array(x) for x in args]
        assert all(x.size == 1 and x.itemsize in (8, 8 * len(x.dtype.names or "1")) for x in held)
        addresses = (ctypes.c_void_p * len(held))(*(x.ctypes.data for x in held))
        with ONE_AT_A_TIME:
            assert self.launch(blocks, threads, addresses), "threads of a block are at different barriers"


@functools.cache
def compiled(folder, code, options):
    """Return the library of all kernels in the code, compiled with these options."""
    launchers = [
        f'extern "C" bool launch_{name}(unsigned blocks, unsigned threads, void** arguments) '
        f"{{ return launch({name}, blocks, threads, arguments); }}"
        for name in re.findall(r"__global__ void (\w+)\(", code)
    ]
    source = "\n".join((HEADER.read_text(), code, *launchers))
    here = folder / hashlib.sha256(repr((source, options)).encode()).hexdigest()
    if not here.exists():
        here.mkdir()
        (here / "cuda_fp16.h").touch()  # its __half is in the header
        (here / "code.cpp").write_text(source)
        command = [COMPILER, *options, "-O1", "-fPIC", "-shared", "-I", here, here / "code.cpp", "-o", here / "code.so"]
        subprocess.run(command, check=True, timeout=100)
    return ctypes.CDLL(here / "code.so")
