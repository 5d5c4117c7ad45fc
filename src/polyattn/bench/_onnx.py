"""onnxruntime: the standard's Attention (opset 23) and its own MultiHeadAttention, forward only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._case import Case
from ._contestant import Contestant, contestant

__all__ = ["own", "standard"]


def standard(case: Case, device: str, threads: int) -> Contestant:
    """Prepare ``Attention`` of ONNX's opset 23, on (batch, heads, n, d)."""
    inputs = {name: x for name, x in case.inputs().items() if name != "dout"}
    session = _session(case, inputs, threads, "Attention", "", is_causal=int(case.causal))
    return contestant(session, _cast(inputs, case), lambda x: np.asarray(x, dtype="float32"))


def own(case: Case, device: str, threads: int) -> Contestant:
    """Prepare ``com.microsoft.MultiHeadAttention``, on (batch, n, heads·d)."""
    heads, causal = case.shape.heads, int(case.causal)
    inputs = {
        name: np.ascontiguousarray(np.swapaxes(x, 1, 2)).reshape(x.shape[0], x.shape[2], -1)  # (batch, n, heads·d)
        for name, x in case.inputs().items()
        if name != "dout"
    }
    session = _session(
        case, inputs, threads, "MultiHeadAttention", "com.microsoft", num_heads=heads, unidirectional=causal
    )

    def to_host(x: NDArray[Any]) -> NDArray[Any]:
        return np.swapaxes(np.asarray(x, dtype="float32").reshape(*x.shape[:2], heads, -1), 1, 2)

    return contestant(session, _cast(inputs, case), to_host)


def _cast(inputs: dict[str, NDArray[Any]], case: Case) -> dict[str, NDArray[Any]]:
    return {name: x.astype(case.dtype) for name, x in inputs.items()}


def _session(
    case: Case, inputs: dict[str, NDArray[Any]], threads: int, operator: str, domain: str, **attributes: int
) -> Any:
    """Return a contestant that runs a session of a model with one node."""
    import onnxruntime
    from onnx import TensorProto, helper

    kind = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}[case.dtype]
    given = [helper.make_tensor_value_info(name, kind, x.shape) for name, x in inputs.items()]
    node = helper.make_node(operator, list(inputs), ["out"], domain=domain, **attributes)
    graph = helper.make_graph([node], "attention", given, [helper.make_tensor_value_info("out", kind, None)])
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)  # the IR version of opset 23
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda **arrays: {"out": session.run(None, arrays)[0]}
