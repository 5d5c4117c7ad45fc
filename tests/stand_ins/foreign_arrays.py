"""An array library that nobody knows: the standard over NumPy, in a type of its own, without a plugin."""

import operator

import numpy as np

__version__ = "0.1"


class Array:
    __slots__ = ("_x",)

    def __init__(self, x):
        self._x = np.asarray(x)

    def __array_namespace__(self, *, api_version=None):
        import foreign_arrays

        return foreign_arrays

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()

    def __getitem__(self, key):
        return Array(self._x[_unwrap(key)])

    def __bool__(self):
        return operator.truth(self._x)

    def __int__(self):
        return int(self._x)

    def __float__(self):
        return float(self._x)

    dtype = property(lambda self: self._x.dtype)
    shape = property(lambda self: self._x.shape)
    ndim = property(lambda self: self._x.ndim)
    size = property(lambda self: self._x.size)
    device = property(lambda self: "cpu")
    T = property(lambda self: Array(self._x.T))
    mT = property(lambda self: Array(self._x.mT))


def _unwrap(x):
    if isinstance(x, (tuple, list)):
        return type(x)(_unwrap(part) for part in x)
    return x._x if isinstance(x, Array) else x


def _wrap(x):
    if isinstance(x, (tuple, list)):
        return tuple(_wrap(part) for part in x)
    return Array(x) if isinstance(x, (np.ndarray, np.generic)) else x


def _wrapped(function):
    def call(*args, **kwargs):
        with np.errstate(all="ignore"):
            return _wrap(function(*(_unwrap(x) for x in args), **{k: _unwrap(x) for k, x in kwargs.items()}))

    return call


_BINARY = """
    add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le gt ge eq ne radd rsub
    rmul rtruediv
"""
for _name in (*_BINARY.split(), "neg", "invert", "abs"):
    setattr(Array, f"__{_name}__", _wrapped(getattr(np.ndarray, f"__{_name}__")))

_FUNCTIONS = """
    abs add all any arange argmax asarray astype bitwise_and bitwise_left_shift bitwise_or
    bitwise_right_shift bitwise_xor broadcast_arrays broadcast_to ceil clip concat copysign cos
    cumulative_sum divide equal exp expand_dims expm1 flip floor floor_divide full full_like greater
    greater_equal isfinite isinf isnan less less_equal log log1p log2 logical_and logical_not logical_or
    matmul matrix_transpose max maximum mean min minimum moveaxis multiply negative not_equal ones
    ones_like permute_dims pow prod remainder repeat reshape round sign sin sqrt square squeeze
    stack subtract sum take tanh tril triu vecdot where zeros zeros_like from_dlpack result_type
    isdtype empty finfo iinfo
"""
for _name in _FUNCTIONS.split():
    globals()[_name] = _wrapped(getattr(np, _name))

_DTYPES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128
"""
for _name in _DTYPES.split():
    globals()[_name] = np.dtype(_name)

inf, nan, pi, newaxis = np.inf, np.nan, np.pi, None
