"""The blocked kernel: which problems it computes, and which the generic kernel computes instead.

If a result is not finite, the generic kernel computes the problem, because it
isolates excluded keys. The test for that is a pass over the results, not over the scores.
"""

from __future__ import annotations

from polyattn.backend import (
    AlibiBias,
    Array,
    AttentionGrads,
    Problem,
    RowStatistics,
    StructuredBias,
    StructuredMask,
    TiledKernel,
)

from ._blocked import NotFinite, forward, wide
from ._blocked_backward import backward

__all__ = ["BlockedKernel"]

TILED = TiledKernel()


class BlockedKernel:
    """Attention on NumPy arrays of any size, in linear memory."""

    name = "blocked"

    def supports(self, problem: Problem) -> str | None:
        """Support all but a dropout of 1, structures other than ALiBi, and a float64 bias of narrower inputs."""
        if problem.dropout == 1:
            return "a dropout of 1 is left to the generic kernel"
        if problem.dropout and problem.rows is not None:
            return "dropout of a part of a problem is left to the generic kernel, which knows the part's place"
        if isinstance(problem.mask, StructuredMask):
            return "a structured mask is left to the generic kernel, which skips its tiles"
        if isinstance(problem.bias, StructuredBias):
            return None if isinstance(problem.bias, AlibiBias) else "a table of biases is left to the generic kernel"
        if problem.bias is not None and problem.bias.dtype.itemsize > wide(problem).itemsize:
            return "a float64 bias of narrower inputs is left to the generic kernel"
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Sum exp(score) · v and exp(score) over the tiles of each row, and divide once."""
        try:
            return forward(q, k, v, problem)
        except NotFinite:
            return TILED.forward(q, k, v, problem)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Compute the weights of each tile again, and then the lines of the forward in reverse."""
        try:
            return backward(dout, dlse, q, k, v, out, statistics.lse, problem)
        except NotFinite:
            return TILED.backward(dout, dlse, q, k, v, out, statistics, problem)
