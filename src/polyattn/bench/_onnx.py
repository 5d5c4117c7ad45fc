"""onnxruntime: the standard's Attention (opset 23) and its own MultiHeadAttention, forward only."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._case import Case
from ._contestant import Contestant, Peer, Results

__all__ = ["OnnxAttention", "OnnxMultiHeadAttention"]


class OnnxAttention(Peer):
    """``Attention`` of ONNX's opset 23, on (batch, heads, n, d)."""

    name = "onnx-attention"
    library, extra = "onnxruntime", "bench"
    kinds = ("forward",)
    dtypes = ("float32", "float16")
    operator, domain = "Attention", ""

    def missing(self) -> str | None:
        """Ask for onnx too, which writes the model."""
        if (reason := super().missing()) is not None:
            return reason
        there = importlib.util.find_spec("onnx") is not None
        return None if there else 'onnx is not installed: pip install "polyattn[bench]"'

    def scores_held(self, case: Case) -> int:
        """Count the scores, which become the weights; measured."""
        return 1

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Write a model of one node, and open a session."""
        import onnxruntime

        inputs = {
            name: self.laid_out(x).astype(case.dtype) for name, x in case.inputs().items() if name in ("q", "k", "v")
        }
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        model = self._model(case, {name: x.shape for name, x in inputs.items()})
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        def run() -> NDArray[Any]:
            (out,) = session.run(None, inputs)
            return out  # type: ignore[no-any-return]  # the library is Any to the type checker

        def fetch(out: NDArray[Any]) -> Results:
            return {"out": np.asarray(self.laid_back(out, case), dtype="float32")}

        return Contestant(run, fetch)

    def attributes(self, case: Case) -> dict[str, int]:
        """Return the attributes of the node."""
        return {"is_causal": int(case.causal)}

    def laid_out(self, x: NDArray[Any]) -> NDArray[Any]:
        """Lay out (batch, heads, n, d) as the operator takes it."""
        return x

    def laid_back(self, out: NDArray[Any], case: Case) -> NDArray[Any]:
        """Reverse :meth:`laid_out`."""
        return out

    def _model(self, case: Case, shapes: dict[str, tuple[int, ...]]) -> bytes:
        from onnx import TensorProto, helper

        kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[case.dtype]
        given = [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()]
        result = helper.make_tensor_value_info("out", kind, None)
        node = helper.make_node(self.operator, list(shapes), ["out"], domain=self.domain, **self.attributes(case))
        opsets = [helper.make_opsetid("", 23)]
        if self.domain:
            opsets.append(helper.make_opsetid(self.domain, 1))
        graph = helper.make_graph([node], "attention", given, [result])
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)  # 11 came with opset 23
        return bytes(model.SerializeToString())


class OnnxMultiHeadAttention(OnnxAttention):
    """``com.microsoft.MultiHeadAttention``, on (batch, n, heads·d)."""

    name = "onnx-mha"
    operator, domain = "MultiHeadAttention", "com.microsoft"

    def scores_held(self, case: Case) -> int:
        """Count none: it works in blocks."""
        return 0

    def attributes(self, case: Case) -> dict[str, int]:
        """Say ``unidirectional`` for causal."""
        return {"num_heads": case.shape.heads, "unidirectional": int(case.causal)}

    def laid_out(self, x: NDArray[Any]) -> NDArray[Any]:
        """(batch, heads, n, d) → (batch, n, heads·d)."""
        return np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(x.shape[0], x.shape[2], -1)

    def laid_back(self, out: NDArray[Any], case: Case) -> NDArray[Any]:
        """(batch, n, heads·d) → (batch, heads, n, d)."""
        return np.swapaxes(out.reshape(*out.shape[:2], case.shape.heads, -1), 1, 2)
