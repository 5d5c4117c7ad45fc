"""ONNX's own node tests of the operators in ``polyattn.interop.onnx``, with the tolerances of that suite."""

import functools
import warnings
from collections import Counter

import onnx
import pytest
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner
from onnx.reference import ReferenceEvaluator

import polyattn as pa
from polyattn.interop import onnx as door

# How many models of the suite consist of each of our operators, in onnx 1.23.2.
CASES = {
    "Attention": 93,
    "Gelu": 4,
    "LayerNormalization": 19,
    "LogSoftmax": 7,
    "RMSNormalization": 19,
    "RotaryEmbedding": 8,
    "Softmax": 7,
}


FUNCTIONS = {
    "Attention": "attention",
    "Gelu": "gelu",
    "LayerNormalization": "layer_norm",
    "LogSoftmax": "log_softmax",
    "RMSNormalization": "rms_norm",
    "RotaryEmbedding": "rotary_embedding",
    "Softmax": "softmax",
}
SCORES = [
    {"attention_forward": 1},
    {"attention_forward": 1},
    {"attention_forward": 1, "attention_weights": 1},
    {"attention_weights": 1},
]
"""What gives ``qk_matmul_output`` in each mode."""


@functools.cache
def cases():
    """Return the suite's models of our operators; those that expand one into others test the evaluator."""
    with warnings.catch_warnings():  # the suite's own arithmetic overflows, on purpose
        warnings.simplefilter("ignore")
        every = load_model_tests(kind="node")
    return [
        case for case in every if case.model and [node.op_type in CASES for node in case.model.graph.node] == [True]
    ]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases(), ids=lambda case: case.name.removeprefix("test_"))


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of each of polyattn's operations by ``polyattn.interop.onnx``."""
    counted = Counter()
    for name in ("attention_forward", "attention_weights", *FUNCTIONS.values()):
        inner = getattr(door, name)

        def call(*arguments, name=name, inner=inner, **more):
            counted[name] += 1
            return inner(*arguments, **more)

        monkeypatch.setattr(door, name, call)
    return counted


def expected_calls(node):
    """Return which of polyattn's operations a node must call, and how often."""
    counted = Counter([FUNCTIONS[node.op_type]])
    if node.op_type == "Attention" and len(node.output) > 3:
        counted.update(SCORES[next((a.i for a in node.attribute if a.name == "qk_matmul_output_mode"), 0)])
    return counted


def test_the_suite_is_whole():
    assert Counter(case.model.graph.node[0].op_type for case in cases()) == CASES


def test_case(case, backend, calls):
    run = ReferenceEvaluator(case.model, new_ops=door.operators(backend)).run
    names = [value.name for value in case.model.graph.input]
    for inputs, expected in case.data_sets:
        calls.clear()
        with pa.transfers() as account:
            outputs = run(None, dict(zip(names, map(host, inputs), strict=False)))
        Runner.assert_similar_outputs([host(x) for x in expected], outputs, case.rtol, case.atol)
        assert calls == expected_calls(case.model.graph.node[0])
        assert (account.count > 0) == (backend != "numpy"), "it was not computed where it should be"


def host(x):
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x
