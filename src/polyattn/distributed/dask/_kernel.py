"""The kernel of Dask arrays: a graph whose tasks run the kernels of the library of the chunks."""

from __future__ import annotations

from ...kernels import Array, AttentionGrads, Problem, RowStatistics
from ._graph import backward_arrays, call_of, forward_arrays
from ._grid import expect_known

__all__ = ["GRAPH", "GraphKernel"]


class GraphKernel:
    """Attention over chunks. Nothing is computed until the results are."""

    name = "graph"

    def supports(self, problem: Problem) -> str | None:
        """Support everything: what is in chunks that do not fit raises."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return the result and the row statistics as Dask arrays in the chunks of the queries."""
        return forward_arrays(call_of(problem, {"q": q, "k": k, "v": v}))

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients as Dask arrays in the chunks of their arguments."""
        arrays = {"q": q, "k": k, "v": v, "out": out, **statistics._asdict(), "dout": dout}
        call = call_of(problem, arrays if dlse is None else arrays | {"dlse": dlse})
        expect_known("dout", dout)
        grads = backward_arrays(call)
        dq, dk, dv = (grads[name] for name in "qkv")
        return AttentionGrads(dq, dk, dv, grads.get("table", grads.get("bias")), grads.get("sinks"))


GRAPH = GraphKernel()
