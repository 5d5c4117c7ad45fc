"""ALiBi, attention with linear biases: a penalty proportional to the distance, with one slope for each head."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError
from ._arrays import Array, cast
from ._masks import distances
from ._problem import Problem, Sizes
from ._structure import StructuredBias


@dataclass(frozen=True)
class AlibiBias(StructuredBias):
    """−slope · |position of the key − position of the query|."""

    slopes: tuple[float, ...]

    def expect_fit(self, sizes: Sizes) -> None:
        """Require a slope for each head."""
        if len(self.slopes) != sizes.heads:
            raise ShapeError(
                f"bias: expected ALiBi slopes for the {sizes.heads} heads of the queries, got {len(self.slopes)}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Return the bias in the dtype of the scores."""
        xp = problem.xp
        dtype = xp.float64 if problem.dtype == "float64" else xp.float32
        slopes = xp.asarray(self.slopes, dtype=dtype, device=problem.native_device)[:, None, None]  # (H, 1, 1)
        away = cast(xp, xp.abs(distances(problem)), dtype)  # (…, 1, n_q, n_k)
        return xp.negative(xp.multiply(slopes, away))
