"""Gradients over the workers of a cluster: each computes those of some samples, and the mean comes back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import dask
import dask.array as da

from ...conversion import place_of
from ...errors import ArgumentError, EngineError, ShapeError
from ...kernels import Array
from .._gradients import Gradients
from ._arrays import current_client, expect_running

__all__ = ["Gradients", "mean_gradients"]

Function = Callable[[dict[str, Array], Array, Array], tuple[Array, dict[str, Array]]]


class Share(NamedTuple):
    """The gradients of some of the samples, times their number."""

    samples: int
    sums: Gradients


def mean_gradients(
    function: Function, params: Mapping[str, Array], x: Array, y: Array, *, parts: int | None = None, client: Any = None
) -> Gradients:
    """Return the loss and its gradients over a batch, of which every worker computes some samples.

    The parameters go out with the tasks and the mean comes back, so that the optimiser and its state stay in the
    process that calls this. Tasks have no other effect: one that is lost with its worker runs again, and its samples
    still count once.

    Parameters
    ----------
    function : callable
        ``function(params, x, y)`` returns the mean loss of samples and a dict of its gradients. It is pickled.
    params : dict of arrays
        Sent once to each worker that needs them.
    x, y : arrays (samples, …)
        The batch, which is cut into ``parts``; or Dask arrays, whose chunks along the first axis are the parts.
    parts : int, optional
        By default the number of workers.
    client : distributed.Client, optional
        By default the current one.

    Returns
    -------
    Gradients
        ``(loss, grads)``: the means over all samples, as ``function(params, x, y)`` has them up to rounding.

    Raises
    ------
    EngineError
        If there is no client, or it has lost its scheduler.
    ShapeError, ArgumentError
        If x and y have different numbers or chunks of samples, or there are fewer samples than parts.
    """
    client = current_client() if client is None else client
    if client is None:
        raise EngineError("client: there is no distributed.Client; make one first: client = distributed.Client()")
    expect_running(client)
    batches = (
        chunks_of(x, y) if isinstance(x, da.Array) else cut(x, y, parts or len(client.scheduler_info()["workers"]))
    )
    shared = dask.delayed(dict(params), traverse=False)
    shares = [dask.delayed(share, pure=False)(function, shared, *batch) for batch in batches]
    every = dask.config.get("split_every", 4)
    while len(shares) > 1:
        shares = [dask.delayed(added)(shares[i : i + every]) for i in range(0, len(shares), every)]
    samples, (loss, grads) = client.compute(shares[0]).result()
    return Gradients(loss / samples, {name: grad / samples for name, grad in grads.items()})


def chunks_of(x: Array, y: Array) -> list[tuple[Any, Any]]:
    """Return the chunks of samples of Dask arrays, which stay where they are."""
    if not isinstance(y, da.Array) or x.chunks[0] != y.chunks[0]:
        found = y.chunks[0] if isinstance(y, da.Array) else type(y).__name__
        raise ShapeError(f"y: expected the samples of x, in chunks {x.chunks[0]}, got {found}; use y.rechunk")
    x, y = (array.rechunk(dict.fromkeys(range(1, array.ndim), -1)) for array in (x, y))
    return list(zip(x.to_delayed().ravel(), y.to_delayed().ravel(), strict=True))


def cut(x: Array, y: Array, parts: int) -> list[tuple[Array, Array]]:
    """Return a batch in parts of nearly the same number of samples."""
    count = len(x)
    if len(y) != count:
        raise ShapeError(f"y: expected {count} samples like x, got {len(y)}")
    if not 1 <= parts <= count:
        raise ArgumentError(f"parts: expected from 1 to the {count} samples of the batch, got {parts}; make it larger")
    bounds = [count * i // parts for i in range(parts + 1)]
    return [(x[i:j], y[i:j]) for i, j in itertools.pairwise(bounds)]


def share(function: Function, params: dict[str, Array], x: Array, y: Array) -> Share:
    """Return the gradients of some samples, times their number."""
    loss, grads = function(params, x, y)
    return Share(len(x), Gradients(loss * len(x), {name: grad * len(x) for name, grad in grads.items()}))


def added(shares: Sequence[Share]) -> Share:
    """Return the sum of shares."""
    xp = place_of({"loss": shares[0].sums.loss}).backend.namespace()
    total = shares[0]
    for one in shares[1:]:
        grads = {name: xp.add(grad, one.sums.grads[name]) for name, grad in total.sums.grads.items()}
        total = Share(total.samples + one.samples, Gradients(total.sums.loss + one.sums.loss, grads))
    return total
