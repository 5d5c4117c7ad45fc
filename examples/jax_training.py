"""Train a small transformer of polyattn's layers in JAX: layers are pytrees, and the training step is compiled.

The task is to reverse a text of twelve letters. Embeddings of letter and position go through two blocks in a
``lax.scan``, then through a projection to the logits of the letters. ``jax.grad`` differentiates the loss with respect
to the model and calls polyattn's backward passes.

    python examples/jax_training.py

Needs JAX: pip install "polyattn[jax]"
"""

import argparse
import time
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import polyattn as pa
from polyattn import functional as F

LETTERS, LENGTH, WIDTH, HEADS, BLOCKS = 26, 12, 32, 4, 2
BATCH, LEARNING_RATE, MOMENTUM = 64, 0.1, 0.9

Array = Any
Model = dict[str, pa.layers.Layer]


def new_model(seed: int = 0) -> Model:
    """Return the layers by name. The blocks are stacked: one layer whose parameters have an additional first axis."""
    here = {"backend": "jax"}
    blocks = [pa.TransformerBlock(WIDTH, HEADS, seed=seed * 10 + i, **here) for i in range(BLOCKS)]
    return {
        "letters": pa.Embedding(LETTERS, WIDTH, seed=seed * 10 + 7, **here),
        "places": pa.Embedding(LENGTH, WIDTH, seed=seed * 10 + 8, **here),
        "blocks": jax.tree.map(lambda *each: jnp.stack(each), *blocks),
        "classify": pa.Projection(WIDTH, LETTERS, seed=seed * 10 + 9, **here),
    }


def predict(model: Model, text: Array) -> Array:
    """Return the logits (batch, 12, 26) for texts (batch, 12)."""
    h = model["letters"](text) + model["places"](jnp.arange(LENGTH))  # (batch, 12, width)
    h, _ = lax.scan(lambda h, block: (block(h), None), h, model["blocks"])
    return model["classify"](h)


def loss_of(model: Model, text: Array) -> Array:
    return F.cross_entropy(predict(model, text), jnp.flip(text, axis=1))


@partial(jax.jit, donate_argnums=(0, 1))
def step(model: Model, velocity: Model, text: Array) -> tuple[Model, Model, Array]:
    """Return the model after one step of gradient descent with momentum. Gradients have the shape of the model."""
    loss, grads = jax.value_and_grad(loss_of)(model, text)
    velocity = jax.tree.map(lambda v, dp: MOMENTUM * v + dp, velocity, grads)
    model = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, model, velocity)
    return model, velocity, loss


def gradients_by_hand(model: Model, text: Array) -> Model:
    """Return the gradients of ``jax.grad`` by calling every layer's forward, then their backwards in reverse order."""
    letters, letters_cache = model["letters"].forward(text)
    places, places_cache = model["places"].forward(jnp.arange(LENGTH))
    h, block_caches = letters + places, []
    blocks = [jax.tree.map(lambda each, i=i: each[i], model["blocks"]) for i in range(BLOCKS)]
    for block in blocks:
        h, cache = block.forward(h)
        block_caches.append(cache)
    scores, classify_cache = model["classify"].forward(h)
    loss, loss_cache = F.cross_entropy_forward(scores, jnp.flip(text, axis=1))

    dscores = F.cross_entropy_backward(jnp.ones_like(loss), loss_cache).logits
    (dh,), dclassify = model["classify"].backward(dscores, classify_cache)
    dblocks = []
    for block, cache in zip(reversed(blocks), reversed(block_caches), strict=True):
        (dh, *_), dblock = block.backward(dh, cache)
        dblocks.insert(0, block.with_parameters(dblock))
    _, dplaces = model["places"].backward(jnp.sum(dh, axis=0), places_cache)
    _, dletters = model["letters"].backward(dh, letters_cache)
    return {
        "letters": model["letters"].with_parameters(dletters),
        "places": model["places"].with_parameters(dplaces),
        "blocks": jax.tree.map(lambda *each: jnp.stack(each), *dblocks),
        "classify": model["classify"].with_parameters(dclassify),
    }


def texts(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, LETTERS, (count, LENGTH), dtype=np.int32)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Train polyattn's layers in JAX to reverse a text.")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="for parameters and texts; default: %(default)s")
    options = parser.parse_args(arguments)

    began, rng = time.perf_counter(), np.random.default_rng(options.seed)
    model = new_model(options.seed)
    velocity = jax.tree.map(jnp.zeros_like, model)
    for number in range(1, options.steps + 1):
        model, velocity, loss = step(model, velocity, texts(rng, BATCH))
        if number % 100 == 0:
            print(f"step {number:4d}  loss {float(loss):.4f}", flush=True)
    unseen = texts(rng, 256)
    guesses = np.argmax(jax.jit(predict)(model, unseen), axis=-1)
    accuracy = float(np.mean(guesses == np.flip(unseen, axis=1)))
    print(f"{accuracy:.2%} of the letters of unseen texts are right, after {time.perf_counter() - began:.1f} s")
    return accuracy


if __name__ == "__main__":
    main()
