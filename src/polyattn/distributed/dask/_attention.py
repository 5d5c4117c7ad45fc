"""Attention on Dask arrays: the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import dask
import dask.array as da
import numpy as np

from ... import registry
from ...backend import Cache, Place
from ...errors import ArgumentError, BackendMismatchError
from ...functional._arguments import checked_call
from ...functional._attention import attention_backward as backward
from ...functional._attention import forward, with_head
from ...functional._checks import shown
from ...functional._dispatch import Placed, finish
from ...kernels import Array, AttentionGrads
from ._grid import expect_fit, expect_known, grid_of

__all__ = ["attention", "attention_backward", "attention_forward"]

HOST = ("q_offset", "key_lengths")
"""Integers whose values, in a NumPy array, tell which chunks are excluded."""


def attention(q: Array, k: Array, v: Array, *, split_every: int | None = None, **arguments: Any) -> Array:
    r"""Return :func:`polyattn.attention` of Dask arrays, lazily: one task for each chunk of the scores.

    .. math:: o = \sum_j e^{\ell_j - \ell}\, o_j, \qquad \ell = \log \sum_j e^{\ell_j}

    where chunk :math:`j` of the keys has the result :math:`o_j` and the log-sum-exp :math:`\ell_j`. The chunks of keys
    are merged in a tree. Chunks of scores that ``causal``, ``window``, ``key_lengths`` or a structured mask exclude get
    no task.

    Parameters
    ----------
    q : dask array (…, H, n_q, d_k)
        Queries, in chunks of any axis but the last.
    k : dask array (…, H_kv, n_k, d_k)
        Keys. The chunks of the heads are those of q divided by H / H_kv; those of the batch are those of q.
    v : dask array (…, H_kv, n_k, d_v)
        Values, in the chunks of k.
    split_every : int, optional
        How many partial results a task merges, as in Dask's reductions; by default Dask's setting, else 4.
    **arguments
        All arguments of :func:`polyattn.attention` except ``backend`` and ``kernel``: the library of each chunk
        computes, with the kernel that it chooses. Arrays are Dask's or NumPy's; they are rechunked to the chunks of
        q and k. ``q_offset`` and ``key_lengths`` exclude chunks if they are integers or NumPy arrays.

    Returns
    -------
    dask array (…, H, n_q, d_v)
        In the chunks of q.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        As :func:`polyattn.attention`; and if chunks do not fit, with the call of ``rechunk`` that corrects them.
    BackendMismatchError
        If q, k or v is not a Dask array.

    Notes
    -----
    Chunks may hold arrays of NumPy, CuPy, JAX or torch. The graph has no task whose result is larger than its inputs.
    Scores beyond the range of their dtype are not supported across chunks of keys.

    References
    ----------
    Rabe and Staats, "Self-attention does not need O(n²) memory" (2021).

    Examples
    --------
    >>> import dask.array as da, numpy as np, polyattn as pa
    >>> from polyattn.distributed import dask as over_dask
    >>> x = np.random.default_rng(0).normal(size=(4, 100, 8))
    >>> chunked = da.from_array(x, chunks=(4, 25, 8))
    >>> out = over_dask.attention(chunked, chunked, chunked, causal=True)
    >>> out.chunks
    ((4,), (25, 25, 25, 25), (8,))
    >>> bool(np.allclose(out, pa.attention(x, x, x, causal=True)))
    True
    """
    return attention_forward(q, k, v, split_every=split_every, **arguments)[0]


def attention_forward(
    q: Array, k: Array, v: Array, *, split_every: int | None = None, **arguments: Any
) -> tuple[Array, Cache]:
    """Return ``(attention(q, k, v, …), cache)``; the row statistics of the cache are Dask arrays, too."""
    for name, x in {"q": q, "k": k, "v": v}.items():
        expect_chunked(name, x)
    for name in ("backend", "kernel"):
        if arguments.pop(name, None) is not None:
            raise ArgumentError(
                f"{name}: expected none, because the library of each chunk computes it; leave it out, or convert the "
                "chunks with map_blocks"
            )
    arrays, options = checked_call(q, k, v, **in_chunks(arguments))
    if not options["sizes"].empty:
        grid = grid_of(options["sizes"], *map(with_head, (q, k, v)))
        for name, x in {"q": q, "k": k, "v": v}.items():
            expect_fit(name, with_head(x), grid)
    place = Place(registry.ready("dask"), "cpu")
    with tree(split_every):
        out, saved = forward(place.backend, **arrays, **options)
    return finish("attention", Placed(arrays, place, place), out, saved, saved.statistics)


def attention_backward(
    dout: Array, cache: Cache, dlse: Array | None = None, *, split_every: int | None = None
) -> AttentionGrads:
    """Return the gradients as Dask arrays, each in the chunks of its argument: a second graph over the same cells.

    Parameters
    ----------
    dout : dask array (…, H, n_q, d_v)
        Gradient of the result, in its chunks.
    cache : Cache
        From :func:`attention_forward`.
    dlse : dask array (…, H, n_q), optional
        Gradient of ``cache.lse``.
    split_every : int, optional
        How many partial sums a task adds.

    Notes
    -----
    Compute the result and the gradients in one call of ``dask.compute``, so that the forward runs once.
    """
    expect_chunked("dout", dout)
    with tree(split_every):
        return backward(dout, cache, dlse)


def in_chunks(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with Dask arrays in place of NumPy arrays, except integers that tell what is excluded."""
    return {name: x if name in HOST else _chunked(x) for name, x in arguments.items()}


def _chunked(x: Any) -> Any:
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return tuple(map(_chunked, x))
    return da.from_array(x, chunks=-1) if isinstance(x, np.ndarray) else x


def expect_chunked(name: str, x: Any) -> None:
    """Require a Dask array with chunks of known sizes."""
    if not isinstance(x, da.Array):
        raise BackendMismatchError(
            f"{name}: expected a dask.array, got {type(x).__module__}.{type(x).__qualname__}; make one with "
            f"dask.array.from_array({name}, chunks=…)"
        )
    expect_known(name, x)


def tree(split_every: int | None) -> AbstractContextManager[Any]:
    """Return a context in which trees have this many branches."""
    if split_every is None:
        return nullcontext()
    if not isinstance(split_every, int) or isinstance(split_every, bool) or split_every < 2:
        raise ArgumentError(f"split_every: expected an integer of at least 2, got {shown(split_every)}")
    return dask.config.set(split_every=split_every)  # type: ignore[no-any-return]  # Dask is Any here
