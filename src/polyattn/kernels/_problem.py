"""The attention problem: everything that a kernel is told besides q, k and v, and the kernel's own contract."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from ._arrays import Array
from ._records import Record
from ._structure import StructuredBias, StructuredMask


class RowStatistics(NamedTuple):
    """What the softmax of each row was divided by, as two numbers: a row's log-sum-exp without loss of digits.

    A weight is ``exp((score − largest) − log_total)``. Their sum alone would lose digits where scores are large. In a
    row that may attend to nothing they are 0 and −inf.
    """

    largest: Array
    """The largest score of the row, the sink included, or 0 where scores are so small that no digit is lost.

    (…, H, n_q), in float32 or wider.
    """
    log_total: Array
    """The logarithm of Σ exp(score − largest), the sink included: (…, H, n_q), float32 or wider."""

    @property
    def lse(self) -> Array:
        """The log-sum-exp of each row: the sum of the two."""
        return self.largest + self.log_total

    def reshaped(self, xp: Any, shape: tuple[int, ...]) -> RowStatistics:
        """Return them in another shape."""
        return RowStatistics(xp.reshape(self.largest, shape), xp.reshape(self.log_total, shape))


class AttentionGrads(NamedTuple):
    """The gradients of :func:`polyattn.attention`; None for absent sinks, and for a bias without an array of its own.

    Of a bias of relative positions it is the table's.
    """

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None


class Sizes(NamedTuple):
    """The axis lengths of an attention problem. ``batch`` is what q, k and v broadcast to before the head axis."""

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
        """Whether there is no score at all."""
        return 0 in self.scores


@dataclass(frozen=True, eq=False)
class Problem(Record):
    """One attention problem, as :func:`polyattn.attention` documents its arguments. Immutable.

    ``backend`` is handed over for its namespace and its hooks; kernels know none by name.
    Array arguments are native; ``q_offset``, ``key_lengths`` and ``seed`` are Python integers where they are static.
    A kernel that does not know structured masks and biases declines where ``structured`` is true.
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
    """Where this problem's queries and keys start, if it is a tile; keys at a multiple of 4. Dropout counts from it."""
    rows: int | None = None
    """The queries of the whole problem, if this is a tile of it."""
    table: Array | None = None
    """What a structured bias takes its values from; the gradient of the bias is then its own."""

    ARRAYS: ClassVar[tuple[str, ...]] = (
        "q_offset", "key_lengths", "seed", "mask", "bias", "sinks", "q_segments", "k_segments", "origin", "table",
        "scale", "softcap",
    )  # fmt: skip

    @property
    def structured(self) -> bool:
        """Whether the mask or the bias is an object that computes it, in place of an array."""
        return isinstance(self.mask, StructuredMask) or isinstance(self.bias, StructuredBias)

    @property
    def bias_array(self) -> Array | None:
        """The array that the gradient of the bias is of: the bias, or the table of a structured one."""
        return self.table if isinstance(self.bias, StructuredBias) else self.bias

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far before and after its own position a query sees: the window, cut short by causality."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def xp(self) -> Any:
        """The array API namespace."""
        return self.backend.namespace()

    @property
    def native_device(self) -> Any:
        """The library's device object, for creations."""
        return self.backend.native_device(self.device)


class Kernel(Protocol):
    """An algorithm for attention.

    A kernel sees native arrays of its backend's library with a head axis, after
    validation and conversion, and never an empty axis. Its backward accepts the
    ``(out, statistics)`` of any kernel.

    A kernel whose library gives it one rounded log-sum-exp a row says so by an attribute ``joins_statistics = True``:
    its own backward knows that, and :func:`with_statistics` makes the digits up for what else looks at them.
    """

    name: str

    def supports(self, problem: Problem) -> str | None:
        """Return None, or the reason why this kernel does not compute the problem."""
        ...

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return ``out (…, H, n_q, d_v)`` in the inputs' dtype and the statistics of its rows."""
        ...

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients; None for what the problem does not have."""
        ...
