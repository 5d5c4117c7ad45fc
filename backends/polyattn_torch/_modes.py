"""The kernels for second derivatives and for torch.compile. This module does not import torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from polyattn.backend import Array, AttentionGrads, Kernel, Problem, RowStatistics, TiledKernel, constant_result
from polyattn_native import NativeKernel

from ._kernel import FusedKernel
from ._tracing import opaque

__all__ = ["COMPILED", "PLAIN", "RECORDED", "ignore_our_log"]


NATIVE, FUSED, TILED = NativeKernel(opaque), FusedKernel(), TiledKernel()


class Recorded:
    """A kernel whose forward and backward are autograd nodes, so that autograd does not record their tiles."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.kernel = kernel.name, kernel
        self.joins_statistics: bool = getattr(kernel, "joins_statistics", False)

    def supports(self, problem: Problem) -> str | None:
        """Support what the kernel does."""
        return self.kernel.supports(problem)

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return out and the row statistics, with derivatives by explicit formulas."""
        from ._nodes import attention

        return attention(self.kernel, q, k, v, problem)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients; their derivatives include those through out and the statistics."""
        from ._nodes import attention_backward

        return attention_backward(self.kernel, dout, dlse, q, k, v, out, statistics, problem)


class Compiled:
    """A kernel as one operator of a compiled program, so that torch.compile does not trace the kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.kernel = kernel.name, kernel
        self.joins_statistics: bool = getattr(kernel, "joins_statistics", False)

    def supports(self, problem: Problem) -> str | None:
        """Support what the kernel does."""
        return self.kernel.supports(problem)

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Call the operator of the forward."""
        from ._operators import attention

        return attention(self.name, q, k, v, problem)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Call the operator of the backward."""
        from ._operators import attention_backward

        return attention_backward(self.name, dout, dlse, q, k, v, out, statistics, problem)


PLAIN: Sequence[Kernel] = (NATIVE, FUSED)
RECORDED: Sequence[Kernel] = (Recorded(NATIVE), Recorded(FUSED), Recorded(TILED))
COMPILED: Sequence[Kernel] = (Compiled(NATIVE), Compiled(FUSED), Compiled(TILED))


@constant_result
def ignore_our_log() -> None:
    """Make torch.compile ignore polyattn's log messages, which would break the graph."""
    config: Any = sys.modules["torch._dynamo.config"]
    getattr(config, "ignore_logging_functions", config.ignore_logger_methods).add(logging.getLogger("polyattn").debug)
