"""Classify handwritten digits with one attention block, trained by polyattn's own backward passes.

An image of eight by eight pixels is a sequence of eight tokens: each row of pixels, with its position.
The model is trained on 1,437 images and tested on the other 360. The program draws the attention
weights of its heads.

    python examples/digits.py --backend torch

Needs scikit-learn (for the images, which it ships) and matplotlib.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn import functional as F
from polyattn import registry

ROWS, CLASSES = 8, 10
BATCH, LEARNING_RATE, TEST_IMAGES = 64, 3e-3, 360

Array = Any
Parameters = dict[str, Array]


class DigitReader:
    """Self-attention over the rows, a feed-forward layer, and a classifier of the mean over the rows.

    With h = embed(x), both sublayers have a residual connection and a norm after the sum,
    as in Vaswani et al. (2017)::

        a = norm1(h + attention(h))
        b = norm2(a + contract(relu(expand(a))))
        logits = classify(mean(b over the rows))
    """

    def __init__(self, width: int = 64, heads: int = 4, seed: int = 0, dtype: str = "float32") -> None:
        seeds = iter(range(seed * 10, seed * 10 + 10))  # every layer has its own

        def projection(inputs: int, outputs: int) -> pa.Projection:
            return pa.Projection(inputs, outputs, seed=next(seeds), dtype=dtype)

        self.layers: dict[str, Any] = {
            "embed": projection(2 * ROWS, width),
            "attention": pa.MultiHeadAttention(width, heads, seed=next(seeds), dtype=dtype),
            "norm1": pa.LayerNorm(width, dtype=dtype),
            "expand": projection(width, 2 * width),
            "contract": projection(2 * width, width),
            "norm2": pa.LayerNorm(width, dtype=dtype),
            "classify": projection(width, CLASSES),
        }

    @property
    def backend(self) -> str:
        return self.layers["embed"].backend

    def place(self, x: np.ndarray) -> Array:
        """Move an array to the library and device of the parameters."""
        return pa.to_backend(x, self.backend, self.layers["embed"].device)

    def parameters(self) -> Parameters:
        return {f"{name}.{key}": p for name, layer in self.layers.items() for key, p in layer.parameters().items()}

    def with_parameters(self, parameters: Parameters) -> "DigitReader":
        model = object.__new__(DigitReader)
        model.layers = {
            name: layer.with_parameters({key: parameters[f"{name}.{key}"] for key in layer.parameters()})
            for name, layer in self.layers.items()
        }
        return model

    def forward(self, x: Array) -> tuple[Array, dict[str, Any]]:
        """Return the logits (batch, 10) of the images (batch, 8 rows, 16 features), and the cache."""
        xp, run, caches = array_namespace(x), self._forward, {}
        h = run("embed", x, caches)  # (batch, 8, width)
        a = run("norm1", h + run("attention", h, caches), caches)
        hidden, caches["relu"] = F.relu_forward(run("expand", a, caches))  # (batch, 8, 2 width)
        b = run("norm2", a + run("contract", hidden, caches), caches)  # (batch, 8, width)
        return run("classify", xp.mean(b, axis=1), caches), caches  # (batch, 10)

    def backward(self, dlogits: Array, caches: dict[str, Any]) -> Parameters:
        """Return the gradient of every parameter: the lines of the forward, from the last to the first."""
        xp, run, grads = array_namespace(dlogits), self._backward, {}
        dmean = run("classify", dlogits, caches, grads)  # (batch, width)
        db = xp.broadcast_to(xp.expand_dims(dmean / ROWS, axis=1), (dmean.shape[0], ROWS, dmean.shape[1]))
        dsum2 = run("norm2", db, caches, grads)
        (dexpanded,) = F.relu_backward(run("contract", dsum2, caches, grads), caches["relu"])
        da = dsum2 + run("expand", dexpanded, caches, grads)
        dsum1 = run("norm1", da, caches, grads)
        dh = dsum1 + run("attention", dsum1, caches, grads)
        run("embed", dh, caches, grads)
        return grads

    def attention_weights(self, x: Array) -> Array:
        """Return the attention weights, (batch, heads, 8 query rows, 8 key rows)."""
        return self.layers["attention"].attention_weights(self.layers["embed"](x))

    def _forward(self, name: str, x: Array, caches: dict[str, Any]) -> Array:
        y, caches[name] = self.layers[name].forward(x)
        return y

    def _backward(self, name: str, dy: Array, caches: dict[str, Any], grads: Parameters) -> Array:
        inputs, own = self.layers[name].backward(dy, caches[name])
        grads.update({f"{name}.{key}": gradient for key, gradient in own.items()})
        return inputs[0]


def digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (features, labels) of training and of test images; the features are pixels and position."""
    images, labels = load_digits(return_X_y=True)
    pixels = images.reshape(-1, ROWS, 8).astype(np.float32) / 16.0
    position = np.broadcast_to(np.eye(ROWS, dtype=np.float32), pixels.shape)
    features = np.concatenate([pixels, position], axis=-1)  # (images, 8, 16)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    labels = labels.astype(np.int32)
    return (features[train], labels[train]), (features[test], labels[test])


def training_step(model: DigitReader, optimiser: Any) -> Callable[..., tuple[Parameters, Any, Array]]:
    """Return ``parameters, state, loss = step(parameters, state, x, labels)``, a pure function."""

    def step(parameters: Parameters, state: Any, x: Array, labels: Array) -> tuple[Parameters, Any, Array]:
        current = model.with_parameters(parameters)
        logits, caches = current.forward(x)
        loss, loss_cache = F.cross_entropy_forward(logits, labels)
        dlogits = F.cross_entropy_backward(array_namespace(loss).ones_like(loss), loss_cache).logits
        parameters, state = optimiser.update(current.backward(dlogits, caches), state, parameters)
        return parameters, state, loss

    return step


def batches(count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the indices of each batch of one epoch, in random order; an incomplete last batch is omitted."""
    order = rng.permutation(count)
    yield from (order[start : start + BATCH] for start in range(0, count - BATCH + 1, BATCH))


def train(x: np.ndarray, labels: np.ndarray, epochs: int, seed: int) -> DigitReader:
    """Train on the selected backend, NumPy by default."""
    model, rng = DigitReader(seed=seed), np.random.default_rng(seed)
    optimiser = pa.optim.AdamW(pa.optim.cosine(LEARNING_RATE, total_steps=epochs * (len(x) // BATCH)))
    parameters = model.parameters()
    state = optimiser.init(parameters)
    step = registry.load(model.backend).jit(training_step(model, optimiser))
    for epoch in range(1, epochs + 1):
        for chosen in batches(len(x), rng):
            parameters, state, loss = step(parameters, state, model.place(x[chosen]), model.place(labels[chosen]))
        if epoch % 5 == 0:
            print(f"epoch {epoch:3d}  loss {float(loss):.4f}", flush=True)
    return model.with_parameters(parameters)


def draw(images: np.ndarray, titles: list[str], weights: np.ndarray, path: Path) -> None:
    """Draw images next to the attention weights of their rows, (images, heads, 8, 8)."""
    heads = weights.shape[1]
    figure = Figure(figsize=(2.1 * (heads + 1) + 0.6, 2.15 * len(images) + 0.5), layout="constrained")
    grid = figure.subplots(len(images), heads + 1, squeeze=False)
    for (picture, *maps), image, title, weight in zip(grid, images, titles, weights, strict=True):
        picture.imshow(image, cmap="gray_r", vmin=0, vmax=1)
        picture.set(title=title, xticks=[], yticks=range(ROWS), ylabel="row")
        for axes, head in zip(maps, weight, strict=True):
            shown = axes.imshow(head, cmap="viridis", vmin=0, vmax=float(weights.max()))
            axes.set(xticks=range(ROWS), yticks=range(ROWS))
        maps[0].set_ylabel("query row")
    for number, (top, bottom) in enumerate(zip(grid[0, 1:], grid[-1, 1:], strict=True), start=1):
        top.set_title(f"head {number}")
        bottom.set_xlabel("key row")
    figure.colorbar(shown, ax=grid, shrink=0.5, label="weight")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def run(epochs: int, seed: int, output: Path) -> tuple[str, float]:
    """Train, test and draw; return the name of the backend and the accuracy on the test images."""
    (x, labels), (test_x, test_labels) = digits(seed)
    model = train(x, labels, epochs, seed)
    native = model.place(test_x)
    guesses = np.argmax(pa.to_backend(model.forward(native)[0], "numpy"), axis=-1)
    shown = [int(np.flatnonzero(test_labels == digit)[0]) for digit in (0, 2, 4, 7)]
    titles = [f"a {test_labels[i]}, read as {guesses[i]}" for i in shown]
    weights = pa.to_backend(model.attention_weights(native), "numpy")
    draw(test_x[shown, :, :8], titles, weights[shown], output)
    return model.backend, float(np.mean(guesses == test_labels))


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Classify handwritten digits with one attention block.")
    parser.add_argument("--backend", help="default: POLYATTN_BACKEND, or numpy")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for parameters, split and order; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/digits.png"), help="picture; default: %(default)s")
    options = parser.parse_args(arguments)

    began = time.perf_counter()
    selection = pa.use_backend(options.backend) if options.backend else nullcontext(pa.get_backend())
    # Threads do not speed up matrices of this size. The limit applies to the libraries that are loaded at this point.
    with selection, threadpool_limits(1):
        backend, accuracy = run(options.epochs, options.seed, options.output)
    print(f"{backend}: test accuracy {accuracy:.4f} in {time.perf_counter() - began:.1f} s; see {options.output}")
    return accuracy


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"digits: {error}")
