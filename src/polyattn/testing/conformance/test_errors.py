"""Bad input raises at the call, with the argument, what was expected and what was given."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa

GOOD = {"q": (2, 4, 3, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 6)}
BAD: dict[str, Any] = {
    "rank": ({"q": (8,)}, {}, pa.ShapeError, "q"),
    "depth": ({"k": (2, 4, 5, 7)}, {}, pa.ShapeError, "k"),
    "key-value-lengths": ({"v": (2, 4, 6, 6)}, {}, pa.ShapeError, "v"),
    "batch": ({"k": (3, 4, 5, 8), "v": (3, 4, 5, 6)}, {}, pa.ShapeError, "k"),
    "heads": ({"k": (2, 3, 5, 8), "v": (2, 3, 5, 6)}, {}, pa.ShapeError, "head"),
    "kv-heads": ({"v": (2, 2, 5, 6)}, {}, pa.ShapeError, "v"),
    "mask-columns": ({}, {"mask": ((3, 6), "bool")}, pa.ShapeError, "mask"),
    "mask-rank": ({}, {"mask": ((1, 1, 1, 3, 5), "bool")}, pa.ShapeError, "mask"),
    "mask-dtype": ({}, {"mask": ((3, 5), "int32")}, pa.DTypeError, "bias"),
    "bias-shape": ({}, {"bias": ((3, 4), "float64")}, pa.ShapeError, "bias"),
    "bias-dtype": ({}, {"bias": ((3, 5), "bool")}, pa.DTypeError, "bias"),
    "sinks": ({}, {"sinks": ((3,), "float64")}, pa.ShapeError, "sinks"),
    "key-lengths": ({}, {"key_lengths": ((3,), "int32")}, pa.ShapeError, "key_lengths"),
    "key-lengths-dtype": ({}, {"key_lengths": ((2,), "float64")}, pa.DTypeError, "key_lengths"),
    "q-offset-dtype": ({}, {"q_offset": ((2,), "float64"), "causal": True}, pa.DTypeError, "q_offset"),
    "window": ({}, {"window": (1,)}, (TypeError, ValueError), "window"),
    "softcap": ({}, {"softcap": 0.0}, ValueError, "softcap"),
    "dropout": ({}, {"dropout": 1.5, "seed": 1}, ValueError, "dropout"),
    "seed": ({}, {"dropout": 0.5}, (TypeError, ValueError), "seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_attention(make: Any, case: Any) -> None:
    shapes, arguments, error, words = BAD[case]
    q, k, v = (make(np.zeros(shape)) for shape in (GOOD | shapes).values())
    native = {
        name: make(np.zeros(x[0]), x[1]) if isinstance(x, tuple) and isinstance(x[0], tuple) else x
        for name, x in arguments.items()
    }
    for function in (pa.attention, pa.attention_forward):
        with pytest.raises(error, match=words):
            function(q, k, v, **native)


@pytest.mark.parametrize("kind", ["int64", "bool", "complex128"])
def test_dtypes_that_are_not_real_floats(make: Any, kind: Any) -> None:
    x = make(np.ones((2, 3)), kind)
    functions = pa.functional
    for call in (
        *(functions.softmax, functions.log_softmax, functions.relu, functions.gelu, functions.silu),
        *(functions.layer_norm, functions.rms_norm),
    ):
        with pytest.raises(pa.DTypeError, match=rf"x: .*{kind}"):
            call(x)
    with pytest.raises(pa.DTypeError, match=kind):
        pa.attention(x, x, x)


def test_mixed_dtypes(make: Any) -> None:
    x, y = make(np.ones((2, 3))), make(np.ones((2, 3)), "float32")
    with pytest.raises(pa.DTypeError, match="float32"):
        pa.attention(x, x, y)
    with pytest.raises(pa.DTypeError, match="float32"):
        pa.functional.linear(x, make(np.ones((3, 2)), "float32"))


def test_functional_shapes(make: Any) -> None:
    x = make(np.ones((2, 3)))
    with pytest.raises(pa.ShapeError, match="weight"):
        pa.functional.linear(x, make(np.ones((4, 2))))
    with pytest.raises(pa.ShapeError, match="bias"):
        pa.functional.linear(x, make(np.ones((3, 2))), make(np.ones(3)))
    with pytest.raises(pa.ShapeError, match="weight"):
        pa.functional.layer_norm(x, make(np.ones(2)))
    with pytest.raises(pa.ShapeError, match="weight"):
        pa.functional.rms_norm(x, make(np.ones(3)), axes=2)
    norms: Any = (pa.functional.layer_norm, pa.functional.rms_norm)
    for norm in norms:
        for axes in (0, 3, -1, True, 1.0):
            with pytest.raises(pa.ShapeError, match="axes"):
                norm(x, axes=axes)
        with pytest.raises(pa.ArgumentError, match="eps"):
            norm(x, eps=-1e-5)
    for softmax in (pa.functional.softmax, pa.functional.log_softmax):
        with pytest.raises((pa.ShapeError, ValueError), match="axis"):
            softmax(x, axis=2)
    for gated in (pa.functional.swiglu, pa.functional.geglu):
        with pytest.raises(pa.ShapeError, match="up"):
            gated(x, x[:1, :])
        with pytest.raises(pa.DTypeError, match="up float32"):
            gated(x, make(np.ones((2, 3)), "float32"))
    with pytest.raises(ValueError, match="approximate"):
        pa.functional.geglu(x, x, approximate="sigmoid")
    with pytest.raises(ValueError, match="approximate"):
        pa.functional.gelu(x, approximate="sigmoid")


def test_what_is_no_array(make: Any) -> None:
    for wrong in ([[1.0]], 1.0, None, "x"):
        with pytest.raises((pa.PolyattnError, TypeError)):
            pa.functional.softmax(wrong)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"d_model": 10, "num_heads": 4}, pa.ShapeError),
        ({"d_model": 8, "num_heads": 4, "num_kv_heads": 3}, pa.ShapeError),
        ({"d_model": 8, "num_heads": 4, "d_key": 0}, pa.ShapeError),
        ({"d_model": 8, "num_heads": 4, "init": "zeros"}, ValueError),
        ({"d_model": 8, "num_heads": 4, "scale": "head"}, ValueError),
        ({"d_model": 8, "num_heads": 4, "dtype": "int32"}, pa.DTypeError),
    ],
    ids=["heads", "kv-heads", "d-key", "init", "scale", "dtype"],
)
def test_layer_settings(contract: Any, backend: Any, settings: Any, error: Any) -> None:
    with pytest.raises(error):
        pa.MultiHeadAttention(**settings, backend=backend)


def test_unknown_backend(contract: Any, make: Any) -> None:
    with pytest.raises(pa.UnknownBackendError, match="numpy"):
        pa.to_backend(make([1.0]), "numpyy")


def test_read_only_arrays_are_never_written(contract: Any, backend: Any, tmp_path: Any) -> None:
    """Case 23: a read-only array, a broadcast view and a read-only memory map, moved to the selected backend."""
    base = np.random.default_rng(0).standard_normal((2, 3, 4))
    base.tofile(tmp_path / "x.bin")
    locked = base.copy()
    locked.flags.writeable = False
    for x in (
        locked,
        np.broadcast_to(base[:1, :1], base.shape),
        np.memmap(tmp_path / "x.bin", dtype=np.float64, mode="r", shape=base.shape),
    ):
        before = np.array(x)
        with pa.use_backend(backend):
            out, cache = pa.attention_forward(x, x, x, causal=True)
            grads = pa.attention_backward(x, cache)
            normed = pa.functional.layer_norm(x)
        assert type(out) is type(normed) is type(grads.q) is np.ndarray
        np.testing.assert_array_equal(x, before)
        out[...] = 0.0  # the result is writable, and shares no memory with the input
