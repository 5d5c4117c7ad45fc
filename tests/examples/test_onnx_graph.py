"""The example of an ONNX graph: on every backend what the evaluator of onnx itself gives, at once and with a cache."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import polyattn as pa

onnx = pytest.importorskip("onnx", reason='the graph is onnx\'s: pip install "polyattn[onnx]"')

READY = [info.name for info in pa.list_backends() if info.state == "ready"]


@pytest.mark.parametrize("backend", READY)
def test_as_the_evaluator_itself(example: ModuleType, backend: str) -> None:
    assert example.main(["--backend", backend, "--seed", "3"]) < 3e-6


def test_the_graph_is_attention_by_the_formula(example: ModuleType) -> None:
    """The last token alone, in float64 and by hand: every key before it, a key head for each two of the queries'."""
    parameters = {name: x.astype(np.float64) for name, x in example.weights(0).items()}
    x = np.random.default_rng(5).standard_normal((1, 9, example.WIDTH))
    h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * parameters["norm.weight"]

    def heads(name: str, count: int, turned: bool) -> np.ndarray:
        y = (h @ parameters[f"{name}.weight"]).reshape(9, count, example.SIZE)
        if not turned:
            return y
        cos, sin = (parameters[of][:9, None] for of in ("cos", "sin"))
        a, b = np.split(y, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k = heads("q", example.HEADS, True), np.repeat(heads("k", example.KV_HEADS, True), 2, axis=1)
    scores = np.einsum("hd,nhd->hn", q[-1], k) / np.sqrt(example.SIZE)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    attended = np.einsum("hn,nhd->hd", p, np.repeat(heads("v", example.KV_HEADS, False), 2, axis=1))
    want = x[0, -1] + attended.reshape(-1) @ parameters["out.weight"]

    evaluator = example.ReferenceEvaluator(example.graph(example.weights(0)), new_ops=example.operators("numpy"))
    np.testing.assert_allclose(example.run(evaluator, x.astype(np.float32))[-1][0, 0], want, rtol=1e-5, atol=1e-5)


def test_the_model_is_written(example: ModuleType, tmp_path: Path) -> None:
    example.main(["--backend", "numpy", "--save", str(tmp_path / "block.onnx")])
    assert onnx.load(tmp_path / "block.onnx").graph.name == "block"


def test_a_misspelt_backend_is_named(example: ModuleType) -> None:
    with pytest.raises(pa.UnknownBackendError, match="numpi"):
        example.main(["--backend", "numpi"])
