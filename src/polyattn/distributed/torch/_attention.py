"""Attention on shards of the sequence: the public function, its checks, and its node in torch's graph."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from ... import registry
from ...conversion import place_of
from ...errors import ArgumentError, BackendMismatchError, ShapeError
from ...functional._arguments import Arguments, checked_call, checked_options, make_problem
from ...functional._attention import with_head
from ...kernels import Problem, RowStatistics, StructuredBias, dtype_name
from .._layout import Layout, expect_layout, expect_no_pairs, pieces_of
from ._agreement import agreed
from ._heads import Heads, expect_divisible
from ._ring import Ring
from ._transfer import Ranks

__all__ = ["attention"]

Tensor = Any
METHODS = ("ring", "all-to-all")
ENGINES = {"ring": Ring, "all-to-all": Heads}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, method: Literal["ring", "all-to-all"] = "ring",
    layout: Layout = "contiguous", mask: None = None, bias: StructuredBias | None = None, causal: bool = False,
    q_offset: int | Tensor | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Tensor | None = None, segment_ids: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:  # fmt: skip
    """:func:`polyattn.attention` on a sequence that the ranks of a process group share.

    Every rank calls it with its positions of q, k and v, and gets the result of its queries. Results and gradients
    equal those of one process up to rounding, dropout included. A rank's memory is proportional to n / P for P ranks.

    Parameters
    ----------
    q, k, v : Tensor or DTensor
        This rank's positions of (…, H, n_q, d_k), (…, H_kv, n_k, d_k) and (…, H_kv, n_k, d_v). The numbers of
        positions may differ from rank to rank, and be 0. DTensors are sharded along the sequence; so is the result.
    group : ProcessGroup or DeviceMesh, optional
        The ranks, in the order of their positions; a mesh has one dimension. Default: the mesh of the DTensors, else
        all processes.
    method : "ring" or "all-to-all"
        Keys and values go round the ranks while these compute; or each rank gets all positions of H / P heads, for
        which P must divide H and H_kv.
    layout : "contiguous" or "zigzag"
        Whether a rank has one piece of the sequence, or two as :func:`shard` gives them, which share causal work
        evenly.
    q_offset, key_lengths, window
        As in :func:`polyattn.attention`, in positions of the whole sequence; the same on all ranks.
    segment_ids : pair of integer tensors (…, n_q), (…, n_k), optional
        Of this rank's positions.
    bias : structured bias, optional
        :func:`polyattn.alibi_bias` or :func:`polyattn.relative_position_bias`, the same on all ranks.
    sinks : Tensor (H,), optional
        The same on all ranks. The gradient on a rank, as that of the table of a bias, is the rank's contribution: the
        sum over the ranks is the gradient.
    causal, scale, softcap, dropout, seed
        As in :func:`polyattn.attention`, the same on all ranks.

    Returns
    -------
    Tensor or DTensor
        The result of this rank's queries (…, H, n_q, d_v), differentiable once.

    Raises
    ------
    PolyattnError
        What :func:`polyattn.attention` raises.
    EngineError
        If there is no process group, if another rank refused its arguments or has other ones, or if it was lost. A
        rank that never calls is noticed after the timeout of the group.
    ArgumentError
        For a mask and for a bias that is an array.

    Notes
    -----
    With k and v of b bytes in all, each rank sends (P − 1) / P · b bytes in a forward by the ring, and twice as many
    in the backward (more in 16 bits, whose gradients travel in float32).

    Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023);
    Jacobs et al., "DeepSpeed Ulysses" (2023).

    Examples
    --------
    A group of one process:

    >>> import torch
    >>> from polyattn.distributed.torch import attention
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> q = torch.ones(1, 2, 6, 8, requires_grad=True)
    >>> attention(q, q, q, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 6, 8])
    >>> torch.distributed.destroy_process_group()
    """
    local = {
        "mask": mask, "bias": bias, "causal": causal, "window": window, "segment_ids": segment_ids, "scale": scale,
        "softcap": softcap, "sinks": sinks, "dropout": dropout, "seed": seed,
    }  # fmt: skip
    whole = {"q_offset": q_offset, "key_lengths": key_lengths}
    if any(isinstance(x, DTensor) for x in (q, k, v)):
        return _of_dtensors(q, k, v, group, dropout, {**local, **whole, "method": method, "layout": layout})
    ranks = Ranks.of(group)

    def check() -> tuple[Arguments, tuple[int, int], dict[str, Any]]:
        return _checked(q, k, v, method, layout, local, whole)

    device = q.device if isinstance(q, torch.Tensor) else None
    arguments, lengths = agreed(ranks, device, check)
    call = _call(q, arguments, lengths, whole, ranks, method, layout)
    sinks, table = (arguments.arrays.get(name) for name in ("sinks", "bias"))
    out = _Attention.apply(call, with_head(q), with_head(k), with_head(v), sinks, table)
    return out[0] if q.ndim == k.ndim == v.ndim == 2 else out


class Checked(NamedTuple):
    """The arguments of a rank, checked."""

    arguments: Arguments
    lengths: tuple[int, int]
    same: dict[str, Any]
    """What must be equal on all ranks."""


def _checked(
    q: Tensor, k: Tensor, v: Tensor, method: str, layout: str, local: dict[str, Any], whole: dict[str, Any]
) -> Checked:
    """Check everything that one rank can see."""
    if method not in METHODS:
        raise ArgumentError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    expect_layout(layout)
    expect_no_pairs(local["mask"], local["bias"])
    arguments = checked_call(q, k, v, **local, q_offset=0)
    place = place_of(arguments.arrays)
    if place.backend.name != "torch":
        raise BackendMismatchError(
            f"q: expected a torch tensor, got an array of {place}; to_backend(q, 'torch') is one"
        )
    if isinstance(local["seed"], torch.Tensor):
        raise ArgumentError("seed: expected an integer, got a tensor; seed.item() is one")
    options, sizes = arguments.options, arguments.options["sizes"]
    shapes = {name: (*x.shape[:-2], x.shape[-1]) for name, x in (("q", q), ("k", k), ("v", v))}
    others = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in whole.items()}
    same = {
        "method": method, "layout": layout, "dtype": dtype_name(q.dtype), **shapes, **others,
        **{name: x for name, x in options.items() if name not in ("sizes", "q_offset")},
        "sinks": "sinks" in arguments.arrays, "segment_ids": _kind(arguments.arrays.get("k_segments")),
    }  # fmt: skip
    return Checked(arguments, (sizes.n_q, sizes.n_k), same)


def _kind(ids: Tensor | None) -> tuple[Any, ...] | None:
    """Return what must be equal on all ranks of the segments of keys, which travel."""
    return None if ids is None else (ids.dtype, tuple(ids.shape[:-1]))


def _call(
    q: Tensor, arguments: Arguments, lengths: list[tuple[int, int]], whole: dict[str, Any], ranks: Ranks, method: str,
    layout: Layout,
) -> Any:  # fmt: skip
    """Return the ring or the exchange of heads for the whole problem; what raises here raises on all ranks."""
    n_q, n_k = (sum(column) for column in zip(*lengths, strict=True))
    sizes = arguments.options["sizes"]._replace(n_q=n_q, n_k=n_k)
    if n_k == 0:
        raise ShapeError("k: expected at least one key on some rank, got none on all ranks")
    over_all = checked_options(sizes, **whole)
    arrays = {name: x.detach() for name, x in {**arguments.arrays, **over_all.arrays}.items() if name not in "qkv"}
    segments = [arrays.pop(name, None) for name in ("q_segments", "k_segments")]
    own = {name: x for name, x in arguments.options.items() if name not in ("sizes", "kernel", "q_offset")}
    global_ = {name: x for name, x in over_all.options.items() if name in ("sizes", *whole)}
    native = registry.ready("torch")
    problem: Problem = make_problem(native, q, native.device_of(q), **own, **global_, **arrays)
    if method == "all-to-all":
        expect_divisible(problem, ranks)
    queries, keys = (pieces_of(column, layout) for column in zip(*lengths, strict=True))
    return ENGINES[method](problem, ranks, queries, keys, *segments)


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """One node for the forward and the backward of a call."""

    @staticmethod
    def forward(ctx: Any, call: Ring | Heads, q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor | None) -> Tensor:
        with call.problem.backend.scope():
            if isinstance(call, Ring):
                out, statistics = call.forward(q, k, v)
                held = (q, k, v, out)
            else:
                out, statistics, held = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(*statistics, *held)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise BackendMismatchError(
                "create_graph=True: expected attention in one process, since the gradients of a shared sequence cannot "
                "be differentiated again; use polyattn.attention"
            )
        largest, log_total, q, k, v, out = ctx.saved_tensors
        statistics, call = RowStatistics(largest, log_total), ctx.call
        with call.problem.backend.scope():
            if isinstance(call, Ring):
                grads = call.backward(dout, q, k, v, out, statistics)
            else:
                grads = call.backward(dout, statistics, q, k, v, out)
        return (None, grads.q, grads.k, grads.v, grads.sinks, grads.bias)


def _of_dtensors(q: Tensor, k: Tensor, v: Tensor, group: Any, dropout: float, arguments: dict[str, Any]) -> Tensor:
    """Compute with the shards of DTensors, and return the result as one of them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise BackendMismatchError(f"{name}: expected a DTensor like the others, got {type(x).__name__}")
        if x.device_mesh != q.device_mesh or list(x.placements) != list(q.placements):
            raise ShapeError(f"{name}: expected the mesh and placements of q, {q.placements}, got {x.placements}")
    along = [i for i, placement in enumerate(q.placements) if placement in (Shard(q.ndim - 2), Shard(-2))]
    if len(along) != 1 or (len(q.placements) > 1 and dropout):
        raise ShapeError(
            f"q: expected a DTensor with Shard({q.ndim - 2}), the sequence, along one dimension of its mesh (and with "
            f"dropout no other dimension), got {q.placements}; redistribute it"
        )
    if group is None:
        group = q.device_mesh.get_group(along[0])
    local = (x.to_local() for x in (q, k, v))
    out = attention(*local, group=group, **arguments)
    shape = (*q.shape[:-1], v.shape[-1])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False, shape=shape, stride=stride)
