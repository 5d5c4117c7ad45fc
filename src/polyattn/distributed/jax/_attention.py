"""Attention over a mesh axis: the public function, its checks, and its derivatives for JAX."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.sharding import Mesh, PartitionSpec

from ...conversion import place_of
from ...errors import ArgumentError, BackendMismatchError, ShapeError
from ...functional._arguments import Arguments, checked_call
from ...functional._attention import with_head
from ...kernels import Array, Sizes, StructuredBias
from ...kernels._jvp import Tangents
from .._layout import Layout, expect_layout, expect_no_pairs, lengths_of, pieces_of
from ._ring import SHARDED, Inputs, Ring

__all__ = ["attention", "positions"]


def attention(
    q: Array, k: Array, v: Array, *, mesh: Mesh, axis: str, layout: Layout = "contiguous", mask: None = None,
    bias: StructuredBias | None = None, causal: bool = False, q_offset: int | Array | None = None,
    window: tuple[int | None, int | None] | None = None, key_lengths: int | Array | None = None,
    segment_ids: tuple[Array, Array] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Array | None = None, dropout: float = 0.0, seed: int | Array | None = None,
) -> Array:  # fmt: skip
    """:func:`polyattn.attention` on arrays whose sequence is sharded along an axis of a mesh.

    Keys and values go round the devices by ``ppermute`` (ring attention), forward, backward and in forward mode, under
    ``jit``, ``grad`` and ``jvp``. No device ever has all keys; results equal those of one device up to rounding.

    Parameters
    ----------
    q, k, v : array
        As in :func:`polyattn.attention`: the whole arrays, of any number of processes. Where they are not sharded along
        ``axis`` at their axis before the last, JAX moves them.
    mesh : jax.sharding.Mesh
        The devices.
    axis : str
        The axis of the mesh that shares the sequence. Its size divides n_q and n_k.
    layout : "contiguous" or "zigzag"
        The order of the positions in the arrays: that of the sequence, or that of :func:`positions`, which shares
        causal work evenly. For it twice the size of the axis divides n_q and n_k.
    segment_ids : pair of integer arrays (…, n_q), (…, n_k), optional
        In the order of the layout.
    bias : structured bias, optional
        :func:`polyattn.alibi_bias` or :func:`polyattn.relative_position_bias`.
    causal, q_offset, window, key_lengths, scale, softcap, sinks, dropout, seed
        As in :func:`polyattn.attention`, by the position in the sequence.

    Returns
    -------
    array (…, H, n_q, d_v)
        Sharded along ``axis``, in the order of the layout.

    Raises
    ------
    PolyattnError
        What :func:`polyattn.attention` raises; ShapeError for lengths that cannot be shared, ArgumentError for an axis
        that the mesh does not have, for a mask, and for a bias that is an array.

    Notes
    -----
    Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023).

    Examples
    --------
    >>> import jax, numpy as np
    >>> from polyattn.distributed.jax import attention
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("context",))
    >>> q = jax.numpy.ones((1, 2, 6, 8))
    >>> attention(q, q, q, mesh=mesh, axis="context", causal=True).shape
    (1, 2, 6, 8)
    """
    expect_layout(layout)
    expect_no_pairs(mask, bias)
    arguments = checked_call(
        q, k, v, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed,
    )  # fmt: skip
    place = place_of(arguments.arrays)
    if place.backend.name != "jax":
        raise BackendMismatchError(f"q: expected a JAX array, got an array of {place}; to_backend(q, 'jax') is one")
    _expect_mesh(mesh, axis, layout, arguments.options["sizes"], dropout)
    return _called(arguments, mesh, axis, layout)


def positions(n: int, ranks: int, layout: Layout = "contiguous") -> np.ndarray[Any, Any]:
    """Return the position of each entry of an array in a layout.

    Parameters
    ----------
    n : int
        The length of the sequence.
    ranks : int
        The size of the mesh axis.
    layout : "contiguous" or "zigzag"
        As in :func:`attention`.

    Returns
    -------
    numpy.ndarray (n,)
        ``x[..., positions, :]`` is in the order of the layout; ``np.argsort(positions)`` is the way back.

    Examples
    --------
    >>> from polyattn.distributed.jax import positions
    >>> positions(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    pieces = pieces_of(lengths_of(n, ranks, layout), layout)
    return np.concatenate([np.arange(x.start, x.start + x.length) for spans in pieces for x in spans])


def _expect_mesh(mesh: Any, axis: str, layout: Layout, sizes: Sizes, dropout: float) -> None:
    """Require an axis of the mesh that can share the sequence."""
    if not isinstance(mesh, Mesh) or axis not in mesh.shape:
        there = tuple(mesh.shape) if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ArgumentError(f"axis: expected the name of an axis of a jax.sharding.Mesh, got {axis!r} and {there}")
    pieces = mesh.shape[axis] * (1 if layout == "contiguous" else 2)
    for name, n in (("q", sizes.n_q), ("k", sizes.n_k)):
        if n == 0 or n % pieces:
            raise ShapeError(
                f"{name}: expected a positive length that {pieces} pieces divide, got {n}; pad it, and give the length "
                "without padding as key_lengths"
            )
    if dropout and sizes.n_k // pieces % 4:
        raise ShapeError(
            f"k: expected pieces of a multiple of 4 keys with dropout, got {sizes.n_k // pieces}; pad it, and give the "
            "length without padding as key_lengths"
        )


class Call(NamedTuple):
    """What one compiled function depends on: the ring, the mesh, and the numbers of axes of the arrays."""

    ring: Ring
    mesh: Mesh
    axes: Any


def _called(arguments: Arguments, mesh: Mesh, axis: str, layout: Layout) -> Array:
    """Run the compiled function of a call."""
    arrays = {**dict.fromkeys(Inputs._fields), **arguments.arrays}
    one_head = all(arrays[name].ndim == 2 for name in "qkv")
    x = Inputs(**{name: with_head(y) if name in "qkv" else y for name, y in arrays.items()})
    options = {name: value for name, value in arguments.options.items() if name != "kernel"}
    ring = Ring(axis, mesh.shape[axis], layout, tuple(sorted(options.items())))
    axes = tuple(None if y is None else y.ndim for y in x)
    out = _compiled(Call(ring, mesh, axes))(x)
    return out[0] if one_head else out


@functools.lru_cache(maxsize=256)
def _compiled(call: Call) -> Any:
    """Return the function of the inputs, over the mesh."""

    def spec(name: str, ndim: int | None) -> Any:
        if ndim is None:
            return None
        if name not in SHARDED:
            return PartitionSpec()
        after = 0 if name.endswith("segments") else 1
        return PartitionSpec(*(None,) * (ndim - 1 - after), call.ring.axis, *(None,) * after)

    specs = Inputs(*(spec(name, ndim) for name, ndim in zip(Inputs._fields, call.axes, strict=True)))
    result = PartitionSpec(*(None,) * (max(call.axes[:3]) - 2), call.ring.axis, None)
    # The varying axes of the types are not checked: replicated inputs have no collective before their gradients' sum.
    function = functools.partial(_on_device, call.ring)
    return jax.jit(jax.shard_map(function, mesh=call.mesh, in_specs=(specs,), out_specs=result, check_vma=False))


def _on_device(ring: Ring, x: Inputs) -> Array:
    """Return the rows of a device, with the derivatives of :class:`Ring`."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
    def op(x: Inputs) -> Array:
        return ring.forward(x).out.astype(x.q.dtype)

    def jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x,), (x_dot,) = primals, tangents
        rows = ring.forward(x)
        moved = {name: y for name, y in x_dot._asdict().items() if name in Tangents._fields and _moves(y)}
        out_dot = linear_call(
            functools.partial(_forward_mode, ring), functools.partial(_reverse_mode, ring, tuple(moved)), (x, rows),
            moved,
        )  # fmt: skip
        return rows.out.astype(x.q.dtype), out_dot

    op.defjvp(jvp, symbolic_zeros=True)
    return op(x)


def _moves(tangent: Any) -> bool:
    return tangent is not None and not isinstance(tangent, SymbolicZero)


def _forward_mode(ring: Ring, residuals: Any, moved: dict[str, Array]) -> Array:
    x, rows = residuals
    return ring.tangents(Tangents(**moved), x, rows).astype(x.q.dtype)


def _reverse_mode(ring: Ring, names: tuple[str, ...], residuals: Any, dout: Array) -> dict[str, Array]:
    x, rows = residuals
    grads = ring.backward(dout, x, rows)._asdict()
    return {name: jnp.asarray(grads[name]) for name in names}
