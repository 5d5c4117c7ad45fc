"""Whether two contestants computed the same."""

from __future__ import annotations

import numpy as np

from ..errors import PolyattnError
from ._contestant import Results

__all__ = ["TOLERANCE", "difference"]

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
"""How far a result may be from ours, in units of our largest element of the same array."""


def difference(ours: Results, theirs: Results) -> float:
    """Return the largest |theirs − ours| / max|ours| over the arrays; NaN where only one of them is finite.

    Raises
    ------
    PolyattnError
        If they have not the same arrays in the same shapes.
    """
    if ours.keys() != theirs.keys():
        raise PolyattnError(f"expected the results {sorted(ours)}, got {sorted(theirs)}")
    worst = 0.0
    for name, x in ours.items():
        if theirs[name].shape != x.shape:
            raise PolyattnError(f"{name}: expected shape {x.shape}, got {theirs[name].shape}")
        with np.errstate(all="ignore"):
            error = np.max(np.abs(theirs[name] - x)) / max(float(np.max(np.abs(x))), np.finfo(x.dtype).tiny)
        worst = max(worst, float(error)) if not np.isnan(error) else np.nan
    return float(worst)
