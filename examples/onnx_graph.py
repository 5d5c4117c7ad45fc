"""Run an ONNX graph on any backend: a transformer's attention with a key-value cache, built with onnx.helper.

The graph is the attention sublayer of a Llama block: RMSNormalization, projections, RotaryEmbedding, Attention with
grouped heads and cached keys and values, and the residual connection. The first call computes seven tokens; two more
calls compute one token each, with the keys and values of the earlier tokens. The result is compared with onnx's own
reference evaluator on the same graph.

    python examples/onnx_graph.py --backend torch
    python examples/onnx_graph.py --backend jax --save block.onnx

For a model of your own: ``ReferenceEvaluator("model.onnx", new_ops=operators("torch"))``. The evaluator itself computes
all operators but attention, norms, rotary embedding, softmax and GELU. Needs onnx: pip install "polyattn[onnx]"
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import polyattn as pa
from polyattn.interop.onnx import operators

WIDTH, HEADS, KV_HEADS, SIZE, LONGEST = 32, 4, 2, 8, 64
PROMPT, MORE = 7, 2

Arrays = dict[str, np.ndarray]


def weights(seed: int) -> Arrays:
    """Return the parameters, and the cosines and sines of the rotary embedding."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (WIDTH, HEADS * SIZE), "k": (WIDTH, KV_HEADS * SIZE), "v": (WIDTH, KV_HEADS * SIZE)}
    shapes["out"] = (HEADS * SIZE, WIDTH)
    drawn = {f"{name}.weight": rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    angles = np.arange(LONGEST)[:, None] * 10000.0 ** -(np.arange(0, SIZE, 2) / SIZE)  # (positions, size / 2)
    drawn |= {"norm.weight": rng.uniform(0.5, 1.5, WIDTH), "cos": np.cos(angles), "sin": np.sin(angles)}
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def graph(parameters: Arrays) -> onnx.ModelProto:
    """Return the model: from x (batch, n, width), positions, and cached keys and values, to y and the new cache."""
    node = helper.make_node
    heads = {"q_num_heads": HEADS, "kv_num_heads": KV_HEADS}
    nodes = [
        node("RMSNormalization", ["x", "norm.weight"], ["h"], epsilon=1e-6),
        *(node("MatMul", ["h", f"{name}.weight"], [name]) for name in "qkv"),
        node("RotaryEmbedding", ["q", "cos", "sin", "positions"], ["rotated_q"], num_heads=HEADS),
        node("RotaryEmbedding", ["k", "cos", "sin", "positions"], ["rotated_k"], num_heads=KV_HEADS),
        node(
            "Attention", ["rotated_q", "rotated_k", "v", "", "past_key", "past_value"],
            ["attended", "present_key", "present_value"], is_causal=1, **heads,
        ),
        node("MatMul", ["attended", "out.weight"], ["projected"]),
        node("Add", ["x", "projected"], ["y"]),
    ]  # fmt: skip

    def info(name: str, *axes: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, axes)

    cached = ("batch", KV_HEADS, None, SIZE)
    inputs = [info("x", "batch", "n", WIDTH), info("positions", "batch", "n", dtype=TensorProto.INT64)]
    inputs += [info("past_key", *cached), info("past_value", *cached)]
    outputs = [info("y", "batch", "n", WIDTH), info("present_key", *cached), info("present_value", *cached)]
    constants = [numpy_helper.from_array(x, name) for name, x in parameters.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "block", inputs, outputs, constants), opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    return model


def run(evaluator: ReferenceEvaluator, x: np.ndarray) -> list[np.ndarray]:
    """Compute the first tokens in one call and the others one by one; return y of each call."""
    batch, length, _ = x.shape
    key = value = np.zeros((batch, KV_HEADS, 0, SIZE), dtype=np.float32)
    calls, results = [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, length))], []
    for start, stop in calls:
        positions = np.broadcast_to(np.arange(start, stop), (batch, stop - start))
        inputs = {"x": x[:, start:stop], "positions": positions, "past_key": key, "past_value": value}
        y, key, value = evaluator.run(None, inputs)
        results.append(y)
    return results


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Run an ONNX graph on any backend.")
    parser.add_argument("--backend", help="default: POLYATTN_BACKEND, or numpy")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the model to this file")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)

    model = graph(weights(options.seed))
    if options.save:
        onnx.save(model, options.save)
    x = np.random.default_rng(options.seed + 1).standard_normal((2, PROMPT + MORE, WIDTH), dtype=np.float32)
    ours = run(ReferenceEvaluator(model, new_ops=operators(options.backend)), x)
    theirs = run(ReferenceEvaluator(model), x)
    apart = [float(np.abs(y - want).max()) for y, want in zip(ours, theirs, strict=True)]
    print(f"{PROMPT} tokens at once: within {apart[0]:.1e} of onnx's own evaluator")
    print(f"{MORE} more, one by one: within {max(apart[1:]):.1e}")
    return max(apart)


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"onnx_graph: {error}")
