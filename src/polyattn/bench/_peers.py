"""The peers with which polyattn is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError, BackendUnavailableError
from ..kernels import FLOAT_DTYPES
from . import _jax, _onnx, _plain, _torch
from ._contestant import Peer
from ._ours import JITTED, OURS, ours

__all__ = ["JITTED", "OURS", "PEERS", "peer_named", "present"]

TORCH: dict[str, Any] = {"extra": "torch", "dtypes": FLOAT_DTYPES, "devices": ("cpu", "cuda", "mps")}
ONNX: dict[str, Any] = {"extra": "bench", "kinds": ("forward",), "dtypes": ("float32", "float16"), "needs": ("onnx",)}
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("plain-numpy", "numpy", _plain.on_numpy, scores_held=(4, 5)),
        Peer("torch-sdpa", "torch", _torch.attention, **TORCH),
        Peer("torch-mha", "torch", _torch.layer, tasks=("layer", "train"), **TORCH),
        Peer(
            "jax", "jax", _jax.prepared, extra="jax",
            dtypes=("float16", "bfloat16", "float32"),  # with float64 it computes the softmax in float32
            devices=("cpu", "cuda"),
            scores_held=(2, 6),  # except on CUDA, JAX's attention is the plain formula
        ),
        Peer("onnx-attention", "onnxruntime", _onnx.standard, scores_held=(1, 1), **ONNX),
        Peer("onnx-mha", "onnxruntime", _onnx.own, **ONNX),  # computes in blocks, without an array of all scores
        Peer(
            "plain-cupy", "cupy", _plain.on_cupy, extra="cuda13x", dtypes=("float16", "float32", "float64"),
            devices=("cuda",), fault=_plain.cupy_fault,
        ),
    )
}  # fmt: skip


def peer_named(name: str, backend: str) -> Peer:
    """Return a peer by name: polyattn on a backend, compiled or not, or another library."""
    return ours(backend, compiled=name == JITTED) if name in (OURS, JITTED) else PEERS[name]


def present(names: Sequence[str] | None, task: str, backend: str) -> tuple[list[Peer], dict[str, str]]:
    """Return the named peers for a task (by default all) that can be used, and the reasons why others cannot.

    Raises
    ------
    ArgumentError
        If there is no such peer, or it does not support the task.
    BackendUnavailableError
        If a named peer cannot be used.
    """
    doing = [name for name, peer in PEERS.items() if task in peer.tasks]
    doing += [JITTED] if task != "train" else []
    for name in names or ():
        if name not in doing:
            raise ArgumentError(f"peer: expected one of {', '.join(doing)} for {task}, got {name!r}")
    peers = [peer_named(name, backend) for name in dict.fromkeys(doing if names is None else names)]
    absent = {peer.name: reason for peer in peers if (reason := peer.missing()) is not None}
    if names is not None and absent:
        raise BackendUnavailableError("; ".join(f"peer {name!r}: {reason}" for name, reason in absent.items()))
    here = [peer for peer in peers if peer.name not in absent]
    absent.pop(JITTED, None)  # most backends have no compiler, and none can be installed
    return here, absent
