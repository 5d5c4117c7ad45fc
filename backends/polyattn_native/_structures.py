"""The structures of cpp/abi.h, cpp/attention.h and cpp/adamw.h for ctypes, with the same names and fields."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int32, c_int64, c_uint32, c_void_p

__all__ = [
    "BATCH_AXES",
    "STRUCTURES",
    "UNLIMITED",
    "AdamWStep",
    "Array",
    "Attention",
    "AttentionBackward",
    "Integers",
    "Status",
]

BATCH_AXES = 4
UNLIMITED = 2**40
Status = c_int64
"""The result of every function: 0, -1 if the results are not valid, or the bytes for which there is no memory."""
Batch = c_int64 * BATCH_AXES


class Array(ctypes.Structure):
    """An array (batch…, heads, rows, features), or one of fewer axes, with strides in elements."""

    _fields_ = (("data", c_void_p), ("batch", Batch), ("head", c_int64), ("row", c_int64), ("feature", c_int64))


class Integers(ctypes.Structure):
    """An integer for each entry of the batch: int64 values, or one value."""

    _fields_ = (("data", c_void_p), ("batch", Batch), ("value", c_int64))


class Attention(ctypes.Structure):
    """An attention problem with its arrays and results."""

    _fields_ = (
        ("dtype", c_int32),
        ("threads", c_int32),
        ("batch", Batch),
        *((name, c_int64) for name in ("heads", "kv_heads", "n_q", "n_k", "d_k", "d_v")),
        *((name, Array) for name in ("q", "k", "v", "out")),
        ("largest", c_void_p),
        ("log_total", c_void_p),
        ("scale", c_double),
        ("softcap", c_double),
        ("left", c_int64),
        ("right", c_int64),
        *((name, Integers) for name in ("q_offset", "key_lengths", "prefix")),
        *((name, Array) for name in ("mask", "q_segments", "k_segments", "blocks")),
        ("block_q", c_int64),
        ("block_k", c_int64),
        ("bias_dtype", c_int32),
        ("wide_dtype", c_int32),
        ("bias", Array),
        ("slopes", c_void_p),
        ("distances", Array),
        ("sinks", c_void_p),
        ("drop_below", c_int32),
        ("seed", c_uint32 * 2),
        ("reserved", c_int32),
        ("keep_scale", c_double),
    )


class AttentionBackward(ctypes.Structure):
    """The backward of an attention problem."""

    _fields_ = (
        ("forward", Attention),
        *((name, Array) for name in ("dout", "dlse", "dq", "dk", "dv", "dbias", "ddistances")),
        ("dsinks", c_void_p),
    )


class AdamWStep(ctypes.Structure):
    """The numbers of AdamW's update."""

    _fields_ = tuple(
        (name, c_double)
        for name in ("mean_decay", "square_decay", "factor", "inside", "outside", "decay", "least", "most")
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (Array, Integers, Attention, AttentionBackward, AdamWStep)
