"""The interface of the cuBLAS kernel: which problems it supports. CuPy is imported only when the kernel runs."""

from __future__ import annotations

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, dtype_name

__all__ = ["CublasKernel"]

DTYPES = ("float16", "float32", "float64")


class CublasKernel:
    """Attention tile by tile: batched cuBLAS products, with one device function between two products.

    All work is queued on CuPy's current stream, without synchronisation. Products of float16
    are summed in float32, with weights rounded to float16, as in fused kernels; float32 is
    multiplied in float32, never in TF32.
    """

    name = "cublas"

    def supports(self, problem: Problem) -> str | None:
        """Refuse dropout, bfloat16, structured masks and biases, and partly broadcast batch axes of mask or bias."""
        if problem.dropout != 0:
            return "it has no dropout"
        if problem.dtype not in DTYPES:
            return f"it computes in {', '.join(DTYPES)}, not in {problem.dtype}"
        if problem.structured:
            return "structured masks and biases are left to the generic kernel"
        if problem.bias is not None:
            dtype = dtype_name(problem.bias.dtype)
            if dtype not in DTYPES or (dtype == "float64" != problem.dtype):
                return f"it adds no {dtype} bias to the scores of {problem.dtype} inputs"
        batch = problem.sizes.batch
        for name, x in (("mask", problem.mask), ("bias", problem.bias)):
            lead = () if x is None else tuple(x.shape[:-3])
            if set(lead) - {1} and (1,) * (len(batch) - len(lead)) + lead != batch:
                return f"the {name}'s leading axes {lead} are broadcast in part"
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return ``out`` and the row statistics."""
        from ._tiles import forward

        with q.device:
            return forward(q, k, v, problem)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients of q, k, v, bias and sinks."""
        from ._tiles import backward

        with q.device:
            return backward(dout, dlse, q, k, v, out, statistics, problem)
