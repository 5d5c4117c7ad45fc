"""A report on an attention call without computing it: device, kernel, refused kernels, work and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..account import permit
from ..backend import Array, Place
from ..errors import DTypeError
from ..kernels import candidates, choose, dtype_name, refusal
from ._arguments import checked_call, make_problem
from ._checks import ShapeDtype, is_integer
from ._dispatch import places

__all__ = ["Explanation", "explain"]

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`. ``refusals`` maps every other kernel to the reason why it would not run.

    ``notes`` are the backend's: whether it has native kernels, or why not.
    """

    backend: str
    device: str | None
    moved_from: str | None
    kernel: str
    refusals: dict[str, str]
    forward_flops: int
    backward_flops: int
    bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        moved = f", inputs moved from {self.moved_from}" if self.moved_from else ""
        lines = [
            f"kernel    {self.kernel}, on {self.backend} ({self.device}){moved}",
            *(f"not       {name}: {reason}" for name, reason in self.refusals.items()),
            *(f"note      {note}" for note in self.notes),
            f"work      {self.forward_flops / 1e9:.3g} GFLOP forward, {self.backward_flops / 1e9:.3g} GFLOP backward",
            f"memory    {self.bytes / 2**20:.3g} MiB in and out",
        ]
        return "\n".join(lines)


def explain(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> Explanation:  # fmt: skip
    """Report what :func:`attention` would do with these arguments, without computing or moving anything.

    Returns
    -------
    Explanation
        The kernel that would run, the reason why each other kernel would not, and the work if no excluded score
        is skipped: 2·(d_k + d_v) floating-point operations for each score in the forward, and 2.5 times that in the
        backward. ``print`` shows it as text.

    Raises
    ------
    PolyattnError
        The error that :func:`attention` would raise for these arguments.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q = np.zeros((1, 8, 1024, 64), dtype=np.float32)
    >>> pa.explain(q, q, q).forward_flops
    2147483648
    """
    arrays, options = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    home, place = places(arrays, backend)
    there = arrays if place == home else _moved(arrays, home, place)
    del options["kernel"]
    called = {name: x for name, x in there.items() if name not in ("k", "v")}
    problem = make_problem(place.backend, called.pop("q"), place.device, **called, **options)
    chosen = choose(place.backend.kernels, problem, kernel)
    refusals = {}
    for candidate in candidates(place.backend.kernels):
        if candidate is not chosen:
            refusals[candidate.name] = refusal(candidate, problem) or f"supported, but {chosen.name} comes before it"
    sizes = problem.sizes
    flops = 2 * math.prod(sizes.scores) * (sizes.d_k + sizes.d_v)
    results = math.prod(sizes.scores[:-1]) * sizes.d_v
    elements = sum(math.prod(x.shape) for x in (q, k, v)) + results
    return Explanation(
        place.backend.name, place.device, None if place == home else str(home), chosen.name, refusals,
        flops, flops * 5 // 2, elements * ITEMSIZE[dtype_name(q.dtype)], place.backend.notes(place.device),
    )  # fmt: skip


def _moved(arrays: Mapping[str, Array], home: Place, place: Place) -> dict[str, Any]:
    """Return the shapes and dtypes of the arrays after a move to ``place``, or raise what the move would raise."""

    def moved(name: str, x: Array) -> ShapeDtype:
        permit(x, name, home, place)
        try:
            return ShapeDtype(tuple(x.shape), place.backend.dtype(dtype_name(x.dtype)))
        except DTypeError:
            if not is_integer(x):
                raise
            return ShapeDtype(tuple(x.shape), place.backend.dtype("int32"))  # the move narrows them to it

    return {name: moved(name, x) for name, x in arrays.items()}
