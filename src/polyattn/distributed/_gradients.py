"""The result of a data-parallel step."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array

__all__ = ["Gradients"]


class Gradients(NamedTuple):
    """The mean loss of some samples, and its gradients by the names of the parameters."""

    loss: Array
    grads: dict[str, Array]
