"""The evaluation of a trained layer, in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._samples import Pairs

__all__ = ["measure", "positions"]

CHUNK = 256  # samples at a time, to bound the memory


def measure(predict: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], pairs: Pairs) -> dict[str, float | None]:
    """Return ``loss``, ``baseline_loss``, ``loss_ratio`` and ``pointer_accuracy`` in float64.

    The baseline predicts the mean row of the targets everywhere. The pointer
    accuracy is the fraction of positions at which the input row nearest to the
    prediction equals the target row; None if the targets are not input rows.
    ``loss_ratio`` is None if all targets are equal, because the baseline is 0.
    """
    x, y = pairs
    mean_row = np.mean(y, axis=(0, 1), dtype=np.float64)
    errors = baseline_errors = 0.0
    hits: int | None = 0
    for start in range(0, len(x), CHUNK):
        inputs, targets = (np.asarray(array[start : start + CHUNK], dtype=np.float64) for array in (x, y))
        outputs = np.asarray(predict(x[start : start + CHUNK]), dtype=np.float64)
        errors += float(np.sum((outputs - targets) ** 2))
        baseline_errors += float(np.sum((targets - mean_row) ** 2))
        for sample, found, wanted in zip(inputs, outputs, targets, strict=True):
            if hits is None or positions(sample, wanted) is None:
                hits = None
                break
            distances = np.sum((found[:, None, :] - sample[None, :, :]) ** 2, axis=-1)  # (sequence, sequence)
            nearest = sample[np.argmin(distances, axis=-1)]  # (sequence, width)
            hits += int(np.sum(np.all(nearest == wanted, axis=-1)))
    loss, baseline = errors / y.size, baseline_errors / y.size
    return {
        "loss": loss,
        "baseline_loss": baseline,
        "loss_ratio": loss / baseline if baseline > 0 else None,
        "pointer_accuracy": None if hits is None else hits / (y.shape[0] * y.shape[1]),
    }


def positions(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return for each row of ``y`` its position in ``x``, both ``(sequence, width)``; None if ``x`` lacks a row."""
    equal = np.all(x[None, :, :] == y[:, None, :], axis=-1)  # (queries, keys)
    return np.argmax(equal, axis=-1) if bool(np.all(np.any(equal, axis=-1))) else None
