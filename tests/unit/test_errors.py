"""Exceptions: the class hierarchy, and messages with the argument, what was expected and what was given."""

import copy
import inspect
import pickle
import re

import numpy as np
import pytest

import polyattn as pa
from polyattn import errors
from polyattn import functional as F

Q = np.zeros((2, 4, 6, 8))
X = np.zeros((2, 3))

BUILT_IN = {
    "UnknownBackendError": ValueError,
    "BackendUnavailableError": ImportError,
    "BackendMismatchError": TypeError,
    "KernelUnsupportedError": NotImplementedError,
    "ShapeError": ValueError,
    "DTypeError": TypeError,
    "ArgumentError": ValueError,
    "EngineError": RuntimeError,
    "CheckpointError": ValueError,
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_tree(name):
    """Each is a PolyattnError and the built-in exception that a caller expects; it can be pickled."""
    kind = getattr(pa, name)
    assert kind.__bases__ == (pa.PolyattnError, BUILT_IN[name])
    assert re.search(rf"── {name} +\({BUILT_IN[name].__name__}\)", errors.__doc__)
    error = kind("k: expected this, got that")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind
        assert str(other) == "k: expected this, got that"


def test_no_exception_is_left_out():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == {"PolyattnError", *BUILT_IN} == set(errors.__all__)
    assert classes <= set(pa.__all__)


def attend(q=Q, k=Q, v=Q, **arguments):
    return lambda: pa.attention(q, k, v, **arguments)


# Each call, its exception, and what its message has to say.
FAULTS = {
    # shapes
    "q rank": (attend(q=Q[0, 0, 0]), pa.ShapeError, r"q: expected at least 2 axes, got shape \(8,\)"),
    "d_k": (attend(k=Q[..., :5]), pa.ShapeError, r"k: expected \(…, n_k, 8\) to match q's d_k=8, got \(2, 4, 6, 5\)"),
    "key and value length": (attend(v=Q[:, :, :5]), pa.ShapeError, r"v: expected \(…, 6, d_v\) .* got \(2, 4, 5, 8\)"),
    "key and value heads": (attend(v=Q[:, :2]), pa.ShapeError, r"v: expected 4 heads like k, got 2"),
    "heads that do not divide": (attend(k=Q[:, :3], v=Q[:, :3]), pa.ShapeError, r"q: .* multiple of k's 3, got 4"),
    "leading axes": (attend(k=np.zeros((3, 4, 6, 8)), v=np.zeros((3, 4, 6, 8))), pa.ShapeError, r"q \(2, .* k \(3, "),
    "mask shape": (attend(mask=np.ones((5, 6), bool)), pa.ShapeError, r"mask: .* = \(2, 4, 6, 6\), got \(5, 6\)"),
    "bias shape": (attend(bias=np.ones((6, 7))), pa.ShapeError, r"bias: .* = \(2, 4, 6, 6\), got \(6, 7\)"),
    "sinks shape": (attend(sinks=np.ones(3)), pa.ShapeError, r"sinks: .* the 4 heads, got \(3,\)"),
    "segments": (attend(segment_ids=(np.zeros(5, int), np.zeros(6, int))), pa.ShapeError, r"segment_ids: expected 6 q"),
    "one segment": (attend(segment_ids=np.zeros(6, int)), pa.ShapeError, r"segment_ids: expected a pair"),
    "weight shape": (lambda: F.linear(X, X), pa.ShapeError, r"weight: expected \(3, out_features\) .* got \(2, 3\)"),
    "target shape": (lambda: F.mse_loss(X, X[:1]), pa.ShapeError, r"target: expected shape \(2, 3\), got \(1, 3\)"),
    "axis": (lambda: F.softmax(X, axis=2), pa.ShapeError, r"axis: expected one of the 2 axes of x, got 2"),
    "axis kind": (lambda: F.softmax(X, axis="last"), pa.ShapeError, r"axis: .* 2 axes of x, got 'last'"),
    "d_model": (lambda: pa.MultiHeadAttention(10, 4), pa.ShapeError, r"num_heads: .* divisor of d_model=10, got 4"),
    "layer width": (lambda: pa.LayerNorm(4, dtype="float64")(X), pa.ShapeError, r"\(2, 3\)"),
    # dtypes
    "integer q": (attend(q=Q.astype(int)), pa.DTypeError, r"q: expected a floating dtype .* got int64"),
    "complex q": (attend(q=Q.astype(complex)), pa.DTypeError, r"q: expected a floating dtype .* got complex128"),
    "boolean x": (lambda: F.relu(X > 0), pa.DTypeError, r"x: expected a floating dtype .* got bool"),
    "object x": (lambda: F.relu(X.astype(object)), pa.DTypeError, r"x: expected a floating dtype .* got object"),
    "long double": (lambda: F.relu(X.astype(np.longdouble)), pa.DTypeError, r"x: expected a floating dtype"),
    "mixed": (attend(k=Q.astype("f4")), pa.DTypeError, r"expected one dtype, got q float64, k float32, v float64"),
    "integer mask": (attend(mask=np.ones((6, 6), int)), pa.DTypeError, r"mask: expected booleans.* got int64; .*bias="),
    "float mask": (attend(mask=np.ones((6, 6))), pa.DTypeError, r"mask: expected booleans.* got float64; .*bias="),
    "mask in a list": (attend(mask=[True]), pa.DTypeError, r"mask: expected booleans.* got list"),
    "mask without an array": (attend(mask=True), pa.DTypeError, r"mask: expected booleans in an array.* got bool"),
    "boolean bias": (attend(bias=np.ones((6, 6), bool)), pa.DTypeError, r"bias: expected a floating dtype .* got bool"),
    "float lengths": (attend(key_lengths=2.5), pa.DTypeError, r"key_lengths: expected an integer or integers, got 2.5"),
    "boolean lengths": (attend(key_lengths=True), pa.DTypeError, r"key_lengths: expected an integer .* got True"),
    "labels": (lambda: F.cross_entropy(X, X[:, 0]), pa.DTypeError, r"labels: expected integers, got float64"),
    "layer dtype": (lambda: pa.Projection(3, 2)(X), pa.DTypeError, r"x: expected float32, .* got float64"),
    "parameter dtype": (lambda: pa.Projection(3, 2, dtype="int8"), pa.DTypeError, r"dtype: .* got 'int8'"),
    # values
    "lengths": (attend(key_lengths=np.array([3, 7])), pa.ArgumentError, r"key_lengths: .* 0 to n_k=6, got 7"),
    "negative length": (attend(key_lengths=-1), pa.ArgumentError, r"key_lengths: .* 0 to n_k=6, got -1"),
    "window": (attend(window=3), pa.ArgumentError, r"window: expected a pair .* got 3"),
    "negative window": (attend(window=(-1, 0)), pa.ArgumentError, r"window: .* not negative, got \(-1, 0\)"),
    "scale": (attend(scale=float("nan")), pa.ArgumentError, r"scale: expected a finite number, got nan"),
    "boolean scale": (attend(scale=True), pa.ArgumentError, r"scale: expected a finite number, got True"),
    "softcap": (attend(softcap=0.0), pa.ArgumentError, r"softcap: expected a positive number, got 0.0"),
    "softcap kind": (attend(softcap="30"), pa.ArgumentError, r"softcap: expected a positive number, got '30'"),
    "dropout": (attend(dropout=1.5), pa.ArgumentError, r"dropout: .* from 0 to 1, got 1.5"),
    "dropout kind": (attend(dropout=None), pa.ArgumentError, r"dropout: .* from 0 to 1, got None"),
    "seed size": (attend(dropout=0.5, seed=2**64), pa.ArgumentError, r"seed: .* 64 bits, got 18446744073709551616"),
    "seed": (attend(dropout=0.5), pa.ArgumentError, r"seed: expected an integer with dropout.* got None"),
    "causal": (attend(causal=np.ones((6, 6), bool)), pa.ArgumentError, r"causal: .* got ndarray; .* mask="),
    "causal in words": (attend(causal="yes"), pa.ArgumentError, r"causal: expected True or False, got 'yes'"),
    "label": (lambda: F.cross_entropy(X, np.array([0, 3])), pa.ArgumentError, r"labels: expected .* \[0, 3\), got 3"),
    "reduction": (lambda: F.cross_entropy(X, np.array([0, 1]), reduction="max"), pa.ArgumentError, r"reduction: .*max"),
    "eps": (lambda: F.layer_norm(X, eps=-1), pa.ArgumentError, r"eps: expected a number .* got -1"),
    "axes": (lambda: F.layer_norm(X, axes=3), pa.ShapeError, r"axes: .* last axes of x, from 1 to 2, got 3"),
    "gated shape": (lambda: F.swiglu(X, X[:1]), pa.ShapeError, r"up: expected shape \(2, 3\), got \(1, 3\)"),
    "indices": (lambda: F.embedding(X, X), pa.DTypeError, r"indices: expected integers, got float64"),
    "index": (lambda: F.embedding(np.array([0, -1]), X), pa.ArgumentError, r"indices: .* \[0, 2\), got -1"),
    "eps kind": (lambda: F.layer_norm(X, eps="small"), pa.ArgumentError, r"eps: expected a number .* got 'small'"),
    "activation": (lambda: pa.FeedForward(4, 8, activation="tanh"), pa.ArgumentError, r"activation: .* got 'tanh'"),
    "feed forward width": (lambda: pa.FeedForward(4, 8, dtype="float64")(X), pa.ShapeError, r"x: .*4\), got \(2, 3\)"),
    "rms eps": (lambda: pa.RMSNorm(4, eps=-1), pa.ArgumentError, r"eps: expected a number .* got -1"),
    "rms width": (lambda: pa.RMSNorm(4, dtype="float64")(X), pa.ShapeError, r"x: .*4\), got \(2, 3\)"),
    "layer index": (lambda: pa.Embedding(4, 2)(np.array([4])), pa.ArgumentError, r"indices: .* \[0, 4\), got 4"),
    "no rows": (lambda: pa.Embedding(0, 2), pa.ShapeError, r"count: expected a positive integer, got 0"),
    "layer eps": (lambda: pa.LayerNorm(4, eps="small"), pa.ArgumentError, r"eps: expected a number .* got 'small'"),
    "no parts": (lambda: pa.attention_merge([]), pa.ArgumentError, r"parts: expected a list of \(out, lse\)"),
    "half a part": (lambda: pa.attention_merge([(X,)]), pa.ArgumentError, r"parts\[0\]: expected a pair \(out, lse\)"),
    "init": (lambda: pa.Projection(3, 2, init="ones"), pa.ArgumentError, r"init: .*'ones'"),
    "layer scale": (lambda: pa.MultiHeadAttention(8, 2, scale="big"), pa.ArgumentError, r"scale: .* got 'big'"),
    "attention layer scale": (
        lambda: pa.ScaledDotProductAttention(scale="model"), pa.ArgumentError, r"scale: .* got 'model'"
    ),
    "layer scale nan": (lambda: pa.MultiHeadAttention(8, 2, scale=float("nan")), pa.ArgumentError, r"scale: .* nan"),
    # what is missing
    "no v": (attend(v=None), pa.BackendMismatchError, r"v: expected an array, got NoneType"),
    "no weight": (lambda: F.linear(X, None), pa.BackendMismatchError, r"weight: expected an array, got NoneType"),
    "no target": (lambda: F.mse_loss(X, None), pa.BackendMismatchError, r"target: expected an array, got NoneType"),
    "no query": (lambda: pa.MultiHeadAttention(4, 2)(None), pa.BackendMismatchError, r"query: expected an array, got"),
    # caches
    "no cache": (lambda: F.softmax_backward(X, None), pa.BackendMismatchError, r"cache: .* softmax_forward, got N"),
    "another's cache": (
        lambda: F.softmax_backward(X, F.relu_forward(X)[1]), pa.BackendMismatchError,
        r"cache: expected the cache of softmax_forward, got the cache of relu_forward",
    ),
    "dy shape": (lambda: F.relu_backward(X[:1], F.relu_forward(X)[1]), pa.ShapeError, r"dy: .* \(2, 3\), got \(1, 3\)"),
    "dy dtype": (lambda: F.relu_backward(X.astype("f4"), F.relu_forward(X)[1]), pa.DTypeError, r"dy: .* got float32"),
    "dlse": (
        lambda: pa.attention_backward(Q, pa.attention_forward(Q, Q, Q)[1], dlse=Q), pa.ShapeError,
        r"dlse: expected shape \(2, 4, 6\), got \(2, 4, 6, 8\)",
    ),
    # parameters
    "names": (
        lambda: pa.Projection(3, 2).load_parameters({"weights": X}), pa.CheckpointError,
        r"missing weight, bias; unexpected weights",
    ),
    "shapes": (
        lambda: pa.Projection(3, 2, bias=False, dtype="float64").with_parameters({"weight": X}), pa.CheckpointError,
        r"weight: expected \(3, 2\) float64, got \(2, 3\) float64",
    ),
    "no dict": (lambda: pa.Projection(3, 2).with_parameters([X]), pa.CheckpointError, r"parameters: .* got list"),
    "value length": (
        lambda: pa.MultiHeadAttention(8, 2, dtype="float64")(Q[0, 0, :3], Q[0, 0, :4], Q[0, 0, :5]),
        pa.ShapeError, r"value: .*n_k=4 rows, got \(5, 8\)",
    ),
    "optimiser dict": (lambda: pa.optim.SGD(0.1).init([X]), pa.CheckpointError, r"params: .* got list"),
    "copy": (lambda: pa.to_backend(X, "numpy", copy="no"), pa.ArgumentError, r"copy: .* got 'no'"),
    # kernels
    "kernel": (attend(kernel="fast"), pa.KernelUnsupportedError, r"kernel: .*'fast'.* it has .*'direct', .*'plain'"),
}  # fmt: skip


def test_sizes_and_axes_may_be_numpy_integers():
    layer = pa.MultiHeadAttention(np.int64(8), np.int32(2), dtype="float64")
    assert layer.config() == pa.MultiHeadAttention(8, 2).config()
    assert all(type(layer.config()[name]) is int for name in ("d_model", "num_heads", "head_dim"))
    assert F.softmax(X, axis=np.int64(0)).sum(axis=0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input(fault):
    call, kind, message = FAULTS[fault]
    with pytest.raises(pa.PolyattnError, match=message) as caught:
        call()
    assert type(caught.value) is kind


@pytest.mark.parametrize("name", ["backend", "scale", "colour"])
def test_arguments_that_a_layers_call_does_not_take(name):
    """The place and the scale are arguments of the constructor."""
    layer = pa.MultiHeadAttention(4, 2, dtype="float64")
    with pytest.raises(TypeError, match=rf"MultiHeadAttention: a call takes no argument '{name}'; it takes mask, bias"):
        layer(np.zeros((3, 4)), **{name: None})
