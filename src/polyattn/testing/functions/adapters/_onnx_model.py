"""Models of one ONNX node, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

__all__ = ["made", "on_runtime", "single_node"]


def made(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return an array of NumPy, in bfloat16 too."""
    import ml_dtypes

    return np.asarray(x, dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def single_node(
    operator: str, inputs: Mapping[str, NDArray[Any] | None], attributes: Mapping[str, Any], domain: str = ""
) -> ModelProto:
    """Return a model with one node; an input that is None is left out."""
    given = {name: x for name, x in inputs.items() if x is not None}
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in given.items()}
    infos = [helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in given.items()]
    names = [name if x is not None else "" for name, x in inputs.items()]
    while names and not names[-1]:
        names.pop()
    out = helper.make_tensor_value_info("out", next(iter(kinds.values())), None)
    node = helper.make_node(operator, names, ["out"], domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "attention", infos, [out])
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)  # the IR version of opset 23


def on_runtime(model: ModelProto, inputs: Mapping[str, NDArray[Any] | None]) -> NDArray[Any]:
    """Run a model by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {name: x for name, x in inputs.items() if x is not None})[0])


def standard(
    run: Callable[[ModelProto, Mapping[str, NDArray[Any] | None]], NDArray[Any]],
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], mask: NDArray[Any] | None, bias: NDArray[Any] | None,
    causal: bool, scale: float | None, softcap: float | None,
) -> NDArray[Any]:  # fmt: skip
    """Run the standard's Attention of opset 23, which has one input for masks and biases."""
    given = mask if bias is None else bias
    if mask is not None and bias is not None:
        given = np.where(mask, bias, np.asarray(-np.inf, dtype=bias.dtype))
    inputs = {"Q": q, "K": k, "V": v, "attn_mask": given}
    options = {"scale": scale, "softcap": softcap}
    attributes = {name: float(x) for name, x in options.items() if x is not None}
    return run(single_node("Attention", inputs, {"is_causal": int(causal), **attributes}), inputs)
