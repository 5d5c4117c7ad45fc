"""Compare texts a second of polyattn on a backend, transformers on torch, and onnxruntime, on the same batches.

    python examples/minilm/bench.py --backend numpy

Needs transformers and torch and the requirements of embed.py. onnxruntime is included if it is installed, together with
onnxscript, which exports the model. Run no other programs at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from finetune import passages
from minilm import MiniLM, folder
from transformers import BertModel

import polyattn as pa

REST = 0.3  # seconds after which the threads of the previous run are idle


def normalised(hidden: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the mean over the tokens that are not padding, scaled to norm 1."""
    mean = (hidden * there[..., None]).sum(axis=1) / there.sum(axis=1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


class Torch(MiniLM):
    """The same texts and batches with transformers' model and torch's fused attention."""

    def __init__(self) -> None:
        super().__init__(folder())
        self.bert = BertModel.from_pretrained(folder(), attn_implementation="sdpa", add_pooling_layer=False).eval()

    def forward(self, ids: np.ndarray, lengths: np.ndarray, keep: bool = False) -> tuple[np.ndarray, dict]:
        there = np.arange(ids.shape[1]) < lengths[:, None]
        with torch.inference_mode():
            hidden = self.bert(torch.from_numpy(ids).long(), torch.from_numpy(there).long()).last_hidden_state
        return normalised(hidden.numpy(), there), {}


class Onnx(MiniLM):
    """The same with onnxruntime, from the graph that torch exports."""

    def __init__(self, bert: torch.nn.Module) -> None:
        import onnxruntime

        super().__init__(folder())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as place:
            path = exported(bert, Path(place))
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(self, ids: np.ndarray, lengths: np.ndarray, keep: bool = False) -> tuple[np.ndarray, dict]:
        there = np.arange(ids.shape[1]) < lengths[:, None]
        hidden, *_ = self.session.run(None, {"ids": ids.astype("int64"), "there": there.astype("int64")})
        return normalised(hidden, there), {}


def exported(bert: torch.nn.Module, place: Path) -> str:
    """Write the model as an ONNX graph for any number of texts and tokens; return the path."""

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
            return self.bert(ids, there).last_hidden_state

    anything = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = torch.zeros((4, 16), dtype=torch.long), torch.ones((4, 16), dtype=torch.long)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Hidden().eval(), example, dynamo=True, dynamic_shapes=(anything, anything), input_names=["ids", "there"]
        )
    program.save(place / "minilm.onnx")
    return str(place / "minilm.onnx")


def seconds(run: Callable[[], object]) -> float:
    time.sleep(REST)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    texts = [passage for pair in passages() for passage in pair][: options.texts]
    models: dict[str, MiniLM] = {"polyattn": MiniLM(folder(), options.backend), "torch": Torch()}
    try:
        models["onnxruntime"] = Onnx(models["torch"].bert)
    except ImportError as error:
        print(f"without onnxruntime: {error}")
    vectors = {name: model.embed(texts) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, model in models.items():
            times[name].append(seconds(lambda model=model: model.embed(texts)))
    medians = {name: statistics.median(of) for name, of in times.items()}
    characters = sum(map(len, texts)) // len(texts)
    print(f"{len(texts)} texts of about {characters} characters, {torch.get_num_threads()} threads")
    print(f"polyattn {pa.__version__} on {options.backend}: {len(texts) / medians['polyattn']:.1f} texts a second")
    for name in list(models)[1:]:
        ratio, difference = medians[name] / medians["polyattn"], np.abs(vectors["polyattn"] - vectors[name]).max()
        rate = len(texts) / medians[name]
        print(f"{name}: {rate:.1f} texts a second, of which polyattn has {ratio:.2f}; vectors {difference:.0e} off")


if __name__ == "__main__":
    main()
