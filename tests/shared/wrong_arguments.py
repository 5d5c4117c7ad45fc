"""Wrong values of attention's arguments, each as an expression over a valid problem, and the exceptions they raise."""

import math
from typing import Any, NamedTuple

import numpy as np

import polyattn as pa
from polyattn.testing.target import open_backend


class Wrong(NamedTuple):
    """An argument, the expression of its wrong value, and the exception."""

    name: str
    value: str
    error: type[Exception]


SHAPE, DTYPE, VALUE, ARRAY = pa.ShapeError, pa.DTypeError, pa.ArgumentError, pa.BackendMismatchError

WRONG = tuple(
    Wrong(name, value, error)
    for name, error, *values in (
        ("q", SHAPE, "make(np.zeros(4), dtype)"),
        (
            "q",
            DTYPE,
            "make(np.zeros(q.shape), 'int32')",
            "make(np.zeros(q.shape), 'bool')",
            "xp.astype(q, xp.complex64)",
        ),
        ("q", ARRAY, "[[0.0]]", "None", "0.0", "foreign(np.zeros(q.shape), dtype)"),
        ("k", SHAPE, "make(np.zeros((*k.shape[:-1], k.shape[-1] + 1)), dtype)"),
        ("k", DTYPE, "make(np.zeros(k.shape), other)"),
        ("k", ARRAY, "None", "'k'"),
        ("v", SHAPE, "make(np.zeros((*v.shape[:-2], v.shape[-2] + 1, v.shape[-1])), dtype)"),
        ("v", SHAPE, "make(np.zeros((5 * kv_heads, *v.shape[-2:])), dtype)"),
        ("v", DTYPE, "make(np.zeros(v.shape), other)", "make(np.zeros(v.shape), 'int64')"),
        ("v", ARRAY, "None", "foreign(np.zeros(v.shape), dtype)"),
        ("mask", DTYPE, "make(np.ones(scores), 'int32')", "make(np.ones(scores), dtype)", "[True]", "True"),
        ("mask", DTYPE, "pa.alibi_bias(heads)"),
        ("mask", SHAPE, "make(np.ones((*scores[:-1], scores[-1] + 2)), 'bool')", "make(np.ones((1, *scores)), 'bool')"),
        ("mask", SHAPE, "pa.block_mask(np.ones((1, 99), bool), 1)", "pa.prefix_mask(np.zeros((7, 5), int))"),
        ("bias", DTYPE, "make(np.ones(scores), 'bool')", "make(np.ones(scores), 'int32')", "pa.prefix_mask(1)"),
        ("bias", SHAPE, "make(np.ones((*scores[:-1], scores[-1] + 2)), dtype)", "pa.alibi_bias(heads + 1)"),
        ("bias", SHAPE, "pa.relative_position_bias(make(np.zeros((4, heads + 1)), dtype))"),
        ("bias", ARRAY, "0.5", "[0.5]", "foreign(np.zeros(()), dtype)"),
        ("causal", VALUE, "make(np.ones(scores), 'bool')", "'yes'", "None", "0.5"),
        (
            "q_offset",
            DTYPE,
            "0.5",
            "True",
            "make(np.zeros(()), 'float32')",
            "make(np.zeros(()), 'bool')",
            "'0'",
            "(0,)",
        ),
        ("q_offset", SHAPE, "make(np.zeros((7, 5, 3)), 'int32')"),
        (
            "key_lengths",
            VALUE,
            "n_k + 1",
            "-1",
            "make(np.full((), n_k + 1), 'int32')",
            "make(np.full((), -1), 'int64')",
        ),
        ("key_lengths", DTYPE, "1.0", "False", "make(np.zeros(()), 'float32')", "[0]"),
        ("key_lengths", SHAPE, "make(np.zeros((7, 5, 3)), 'int32')"),
        ("window", VALUE, "(-1, None)", "(0,)", "3", "'ab'", "(0, 1, 2)", "(None, -2)"),
        ("window", DTYPE, "(0.5, None)", "(make(np.zeros(()), 'int32'), 0)", "(True, None)"),
        ("segment_ids", SHAPE, "make(np.zeros(n_q), 'int32')", "()", "(make(np.zeros(n_q), 'int32'),)"),
        ("segment_ids", SHAPE, "(make(np.zeros(n_q + 1), 'int32'), make(np.zeros(n_k), 'int32'))"),
        ("segment_ids", SHAPE, "(make(np.zeros((7, 5, n_q)), 'int32'), make(np.zeros(n_k), 'int32'))"),
        ("segment_ids", DTYPE, "(make(np.zeros(n_q), 'float32'), make(np.zeros(n_k), 'float32'))", "(None, None)"),
        ("segment_ids", DTYPE, "(make(np.zeros(n_q), 'int32'), make(np.zeros(n_k), 'int64'))", "([0], [0])"),
        ("scale", VALUE, "math.inf", "math.nan", "'1'", "1j", "True", "make(np.ones(()), dtype)"),
        ("softcap", VALUE, "0.0", "-1", "math.inf", "math.nan", "'1'", "False", "make(np.ones(()), dtype)"),
        ("sinks", SHAPE, "make(np.zeros(heads + 1), dtype)", "make(np.zeros((1, heads)), dtype)"),
        ("sinks", DTYPE, "make(np.zeros(heads), 'int32')"),
        ("sinks", ARRAY, "[0.0]", "0.0", "foreign(np.zeros(heads), dtype)"),
        ("dropout", VALUE, "-0.1", "1.5", "math.nan", "'0.1'", "None", "True", "make(np.zeros(()), dtype)"),
        ("seed", VALUE, "2**64", "-(2**63) - 1"),
        ("seed", DTYPE, "0.5", "make(np.zeros(()), 'float32')", "'7'"),
        ("seed", SHAPE, "make(np.zeros(2), 'int32')"),
        ("kernel", pa.KernelUnsupportedError, "'none such'", "3"),
        ("backend", pa.UnknownBackendError, "'none such'", "3", "''"),
        ("dout", SHAPE, "make(np.zeros((*dout.shape, 1)), dtype)"),
        ("dout", DTYPE, "make(np.zeros(dout.shape), other)"),
        ("dout", ARRAY, "None", "1.0", "foreign(np.zeros(dout.shape), dtype)"),
        ("dlse", SHAPE, "make(np.zeros(dout.shape), wide)"),
        ("dlse", DTYPE, "make(np.zeros(dout.shape[:-1]), narrow)"),
        ("dlse", ARRAY, "0.0"),
        ("cache", ARRAY, "None", "dout", "pa.functional.relu_forward(q)[1]"),
    )
    for value in values
)


def call_with(target, problem, wrong) -> Any:
    """Call attention, forward and backward, with the wrong value of one argument."""
    (q, k, v), arguments, upstream = problem.native(target)
    sizes, dtype = problem.sizes, problem.inputs["q"].dtype
    wide = "float64" if dtype == "float64" else "float32"
    names = {
        "np": np, "pa": pa, "math": math, "xp": target.xp, "make": target.make,
        "foreign": open_backend("torch" if target.name == "numpy" else "numpy").make,
        "q": q, "k": k, "v": v, "dout": upstream["dout"], "scores": sizes.scores, "heads": sizes.heads,
        "kv_heads": sizes.kv_heads, "n_q": sizes.n_q, "n_k": sizes.n_k, "dtype": dtype,
        "other": "float32" if dtype != "float32" else "float64", "wide": wide,
        "narrow": "float64" if wide == "float32" else "float32",
    }  # fmt: skip
    value = eval(wrong.value, names)
    given = {"q": q, "k": k, "v": v, **arguments}
    if wrong.name == "seed":
        given["dropout"] = 0.5
    if wrong.name not in ("dout", "dlse", "cache"):
        return pa.attention_forward(**given | {wrong.name: value})
    _, cache = pa.attention_forward(**given)
    return pa.attention_backward(**{"cache": cache, **upstream, wrong.name: value})
