"""The attention problem, which is all arguments of a kernel except q, k and v, and the protocol of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ._arrays import Array
from ._records import Record
from ._structure import StructuredBias, StructuredMask


class RowStatistics(NamedTuple):
    """The log-sum-exp of each row as two numbers, without loss of digits.

    A weight is ``exp((score − largest) − log_total)``. The sum of the two would lose digits where scores are large.
    In a row that may attend to nothing they are 0 and −inf.
    """

    largest: Array
    """The largest score of the row, the sink included; or 0 where scores are so small that the sum loses no digit.

    (…, H, n_q), in float32 or wider.
    """
    log_total: Array
    """The logarithm of Σ exp(score − largest), the sink included: (…, H, n_q), float32 or wider."""

    @property
    def lse(self) -> Array:
        """The log-sum-exp of each row: the sum of the two."""
        return self.largest + self.log_total

    def reshaped(self, xp: Any, shape: tuple[int, ...]) -> RowStatistics:
        """Return both arrays in another shape."""
        return RowStatistics(xp.reshape(self.largest, shape), xp.reshape(self.log_total, shape))


class AttentionGrads(NamedTuple):
    """The gradients of :func:`polyattn.attention`; None for absent sinks, and for a bias without an array.

    For a relative position bias, ``bias`` is the gradient of its table.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None


class Sizes(NamedTuple):
    """The axis lengths of an attention problem. ``batch`` is the broadcast shape of the axes before the head axis."""

    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d_k: int
    d_v: int

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of the scores, ``(…, H, n_q, n_k)``, to which masks and biases broadcast."""
        return (*self.batch, self.heads, self.n_q, self.n_k)

    @property
    def empty(self) -> bool:
        """Whether the problem has no scores."""
        return 0 in self.scores


@dataclass(frozen=True, eq=False)
class Problem(Record):
    """One attention problem, as :func:`polyattn.attention` documents its arguments. Immutable.

    Kernels use the namespace and the hooks of ``backend``, and name no backend themselves.
    Array arguments are native; ``q_offset``, ``key_lengths`` and ``seed`` are Python integers where they are static.
    A kernel without structured masks and biases does not support a problem where ``structured`` is true.
    """

    backend: Any
    sizes: Sizes
    dtype: str
    device: str | None
    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout: float = 0.0
    q_offset: int | Array = 0
    key_lengths: int | Array | None = None
    seed: int | Array | None = None
    mask: Array | None = None
    """An array, or a :class:`StructuredMask`."""
    bias: Array | None = None
    """An array, or a :class:`StructuredBias`."""
    sinks: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None
    origin: tuple[int | Array, int | Array] = (0, 0)
    """The first query and key of a tile in the whole problem."""
    phase: int = 0
    """The first key modulo 4 where it is traced, for dropout."""
    rows: int | None = None
    """For a tile, the number of queries of the whole problem."""
    numbers: Array | None = None
    """For a part of the batch or of the heads, the numbers of its heads in the whole problem, for dropout.

    int32 (batch·H,): batch entry · H + head of the whole problem.
    """
    table: Array | None = None
    """The array of values of a structured bias. The gradient of the bias is then the gradient of this table."""
    tile: tuple[int, int] | None = None
    """The most queries and keys of a tile of the generic kernel; None: chosen from the sizes."""

    ARRAYS: ClassVar[tuple[str, ...]] = (
        "q_offset", "key_lengths", "seed", "mask", "bias", "sinks", "q_segments", "k_segments", "origin", "table",
        "numbers", "scale", "softcap",
    )  # fmt: skip

    @property
    def structured(self) -> bool:
        """Whether the mask or the bias is a structured object, not an array."""
        return isinstance(self.mask, StructuredMask) or isinstance(self.bias, StructuredBias)

    @property
    def bias_array(self) -> Array | None:
        """The array that receives the gradient of the bias: the bias, or the table of a structured bias."""
        return self.table if isinstance(self.bias, StructuredBias) else self.bias

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far before and after its own position a query sees: the window, with 0 on the right if causal."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def xp(self) -> Any:
        """The array API namespace."""
        return self.backend.namespace()

    @property
    def native_device(self) -> Any:
        """The device object of the library, for the creation of arrays."""
        return self.backend.native_device(self.device)


class Kernel(Protocol):
    """An algorithm for attention.

    A kernel receives native arrays of its backend's library with a head axis, after
    validation and conversion; no axis is empty. Its backward accepts the
    ``(out, statistics)`` of any kernel.

    A kernel with only a rounded log-sum-exp for each row has an attribute ``joins_statistics = True``. Its own backward
    accepts these statistics; for other uses, :func:`with_statistics` computes them again without loss of digits.
    """

    name: str

    def supports(self, problem: Problem) -> str | None:
        """Return None if the kernel supports the problem, else the reason why not."""
        ...

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return ``out (…, H, n_q, d_v)`` in the inputs' dtype, and the row statistics."""
        ...

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients; None for arguments that the problem does not have."""
        ...
