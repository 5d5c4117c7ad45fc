"""How good a trained layer is, in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ._task import Pairs

__all__ = ["measure"]

CHUNK = 256  # samples at a time, which bounds the memory


def measure(predict: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], pairs: Pairs) -> dict[str, float | None]:
    """Return ``loss``, ``baseline_loss``, ``loss_ratio`` and ``pointer_accuracy`` in float64.

    The baseline predicts the mean row of the targets everywhere. The pointer
    accuracy is the fraction of positions at which the input row that is nearest to
    the prediction is the target row; None where the targets are not input rows.
    ``loss_ratio`` is None where all targets are equal, for then the baseline is 0.
    """
    x, y = pairs
    mean_row = np.mean(y, axis=(0, 1), dtype=np.float64)
    errors = baseline_errors = 0.0
    hits = 0
    pointing = True
    for start in range(0, len(x), CHUNK):
        inputs, targets = x[start : start + CHUNK], np.asarray(y[start : start + CHUNK], dtype=np.float64)
        outputs = np.asarray(predict(inputs), dtype=np.float64)
        errors += float(np.sum((outputs - targets) ** 2))
        baseline_errors += float(np.sum((targets - mean_row) ** 2))
        pointing = pointing and _points(inputs, targets)
        hits += _hits(np.asarray(inputs, dtype=np.float64), outputs, targets) if pointing else 0
    loss, baseline = errors / y.size, baseline_errors / y.size
    return {
        "loss": loss,
        "baseline_loss": baseline,
        "loss_ratio": loss / baseline if baseline > 0 else None,
        "pointer_accuracy": hits / (y.shape[0] * y.shape[1]) if pointing else None,
    }


def _points(inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> bool:
    """Say whether each target row is an input row of the same sample."""
    for sample, wanted in zip(inputs, targets, strict=True):
        equal = np.all(sample[None, :, :] == wanted[:, None, :], axis=-1)  # (sequence, sequence)
        if not np.all(np.any(equal, axis=-1)):
            return False
    return True


def _hits(inputs: np.ndarray[Any, Any], outputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> int:
    """Count the positions at which the nearest input row is the target row."""
    count = 0
    for sample, found, wanted in zip(inputs, outputs, targets, strict=True):
        distances = np.sum((found[:, None, :] - sample[None, :, :]) ** 2, axis=-1)  # (sequence, sequence)
        nearest = sample[np.argmin(distances, axis=-1)]  # (sequence, width)
        count += int(np.sum(np.all(nearest == wanted, axis=-1)))
    return count
