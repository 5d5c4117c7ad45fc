"""Whom polyattn is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ArgumentError, BackendUnavailableError
from ._contestant import Peer
from ._jax import JaxAttention
from ._onnx import OnnxAttention, OnnxMultiHeadAttention
from ._ours import Ours
from ._plain import PlainCupy, PlainNumpy
from ._torch import TorchLayer, TorchSDPA

__all__ = ["JITTED", "PEERS", "named", "present"]

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        PlainNumpy(),
        TorchSDPA(),
        TorchLayer(),
        JaxAttention(),
        OnnxAttention(),
        OnnxMultiHeadAttention(),
        PlainCupy(),
    )
}
JITTED = "polyattn-jit"


def named(names: Sequence[str] | None, task: str) -> list[str]:
    """Return the names of the peers for a task: those that were asked for, or all of them.

    Raises
    ------
    ArgumentError
        If there is no such peer, or it does not do the task.
    """
    doing = [name for name, peer in PEERS.items() if task in peer.tasks]
    doing += [JITTED] if task in ("attention", "layer") else []
    for name in names or ():
        if name not in doing:
            raise ArgumentError(f"peer: expected one of {', '.join(doing)} for {task}, got {name!r}")
    return doing if names is None else list(dict.fromkeys(names))


def present(names: Sequence[str], backend: str, *, required: bool) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can be used here, and why the others cannot.

    Raises
    ------
    BackendUnavailableError
        If one cannot, and all are required.
    """
    peers = [PEERS.get(name) or Ours(backend, compiled=True) for name in names]
    absent = {peer.name: reason for peer in peers if (reason := peer.missing()) is not None}
    if required and absent:
        raise BackendUnavailableError("; ".join(f"peer {name!r}: {reason}" for name, reason in absent.items()))
    here = [peer for peer in peers if peer.name not in absent]
    absent.pop(JITTED, None)  # most backends have no compiler: nothing that could be installed
    return here, absent
