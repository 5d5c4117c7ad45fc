"""Fine-tune MiniLM with the hand-written backward, so that texts of one topic have similar vectors.

    python examples/minilm/finetune.py --backend numpy --steps 10

The texts are Python's own help (``pydoc_data.topics``). Two passages of a topic are a positive pair; the passages of
the other topics in the batch are the negatives (the in-batch softmax of Henderson et al., 2017).
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from minilm import MiniLM, folder

import polyattn as pa
from polyattn import functional as F

SHARPNESS = 20.0  # the factor of the cosines in the softmax, as in sentence-transformers
PASSAGE = 300  # characters
Array = Any


def passages() -> list[tuple[str, str]]:
    """Return two passages from each help topic that is long enough, the second from its middle."""
    found = []
    for name in sorted(topics):
        text = re.sub(r"\s+", " ", re.sub(r"[*`=\-+|]{2,}", " ", topics[name])).strip()
        if len(text) >= 4 * PASSAGE:
            middle = text.index(" ", len(text) // 2) + 1
            found.append((text[:PASSAGE], text[middle : middle + PASSAGE]))
    return found


def batches(pairs: list[tuple[str, str]], size: int, seed: int) -> Iterator[list[tuple[str, str]]]:
    """Yield batches indefinitely, in a new random order for each pass over the pairs."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(pairs))
        for start in range(0, len(order) - size + 1, size):
            yield [pairs[index] for index in order[start : start + size]]


def loss_and_gradients(model: MiniLM, pairs: Sequence[tuple[str, str]]) -> tuple[float, dict[str, Array]]:
    """Return the loss of a batch, and the gradient of every parameter."""
    firsts, seconds = zip(*pairs, strict=True)
    a, a_caches = model.forward(*model.tokens(firsts))
    b, b_caches = model.forward(*model.tokens(seconds))
    xp = array_namespace(a)
    logits = xp.matmul(a, xp.matrix_transpose(b)) * SHARPNESS  # (pairs, pairs); the positive pairs are on the diagonal
    labels = xp.arange(len(pairs), dtype=xp.int32, device=device(a))
    loss, cache = F.cross_entropy_forward(logits, labels)
    dlogits = F.cross_entropy_backward(xp.ones_like(loss), cache).logits
    # logits = a bᵀ · sharpness
    da = xp.matmul(dlogits, b) * SHARPNESS
    db = xp.matmul(xp.matrix_transpose(dlogits), a) * SHARPNESS
    of_a, of_b = model.backward(da, a_caches), model.backward(db, b_caches)
    return float(loss), {name: gradient + of_b[name] for name, gradient in of_a.items()}


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="pairs of texts")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = MiniLM(folder(), options.backend, options.device)
    optimiser = pa.optim.AdamW(options.lr)
    state, losses = optimiser.init(model.parameters()), []
    for step, pairs in zip(range(options.steps), batches(passages(), options.batch, options.seed), strict=False):
        begin = time.perf_counter()
        loss, grads = loss_and_gradients(model, pairs)
        parameters, state = optimiser.update(grads, state, model.parameters())
        model.set_parameters(parameters)
        losses.append(loss)
        print(f"step {step + 1:3}  loss {loss:.4f}  {time.perf_counter() - begin:.2f} s", flush=True)
    return losses


if __name__ == "__main__":
    main()
    sys.exit(0)
