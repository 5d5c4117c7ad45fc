"""Texts a second: polyattn on a backend, and transformers on torch, in turns on the same batches.

    python examples/minilm/bench.py --backend numpy

Needs transformers and torch beside what embed.py needs. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from finetune import passages
from minilm import MiniLM, folder
from transformers import BertModel

import polyattn as pa

REST = 0.3  # seconds after which the threads of whoever ran before sleep


class Peer(MiniLM):
    """The same texts in the same batches, through transformers' model and torch's fused attention."""

    def __init__(self) -> None:
        super().__init__(folder())
        self.bert = BertModel.from_pretrained(folder(), attn_implementation="sdpa", add_pooling_layer=False).eval()

    def forward(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, dict]:
        there = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
        with torch.inference_mode():
            hidden = self.bert(torch.from_numpy(ids).long(), there.long()).last_hidden_state
            mean = (hidden * there[..., None]).sum(1) / there.sum(1, keepdim=True)
            return torch.nn.functional.normalize(mean, dim=-1).numpy(), {}


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
    ours, peer = MiniLM(folder(), options.backend), Peer()
    difference = float(np.abs(ours.embed(texts) - peer.embed(texts)).max())
    times: dict[str, list[float]] = {"polyattn": [], "torch": []}
    for _ in range(options.rounds):
        times["polyattn"].append(seconds(lambda: ours.embed(texts)))
        times["torch"].append(seconds(lambda: peer.embed(texts)))
    medians = {name: statistics.median(of) for name, of in times.items()}
    characters = sum(map(len, texts)) // len(texts)
    print(f"{len(texts)} texts of about {characters} characters, {torch.get_num_threads()} threads")
    for name, median in medians.items():
        print(f"{name:10} {len(texts) / median:7.1f} texts a second")
    ratio = medians["torch"] / medians["polyattn"]
    print(f"polyattn {pa.__version__} on {options.backend}: {ratio:.2f} of torch's rate")
    print(f"the vectors differ by {difference:.1e} at most")


if __name__ == "__main__":
    main()
