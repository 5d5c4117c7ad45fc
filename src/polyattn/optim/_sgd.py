"""Stochastic gradient descent."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..errors import ArgumentError
from ..kernels import Array
from ._base import Optimizer, Rate, set_number, set_rate


@dataclass(frozen=True)
class SGD(Optimizer):
    r"""Stochastic gradient descent with momentum, as in :class:`torch.optim.SGD`.

    For each parameter :math:`\theta` with gradient :math:`g`::

        g ← g + weight_decay · θ
        b ← momentum · b + g                (momentum ≠ 0; b is zero before the first update)
        u = g + momentum · b                (nesterov)
          = b                               (momentum ≠ 0)
          = g                               (momentum = 0)
        θ ← θ - lr · u

    Parameters
    ----------
    lr : float or function of the step
        The learning rate. A function takes the number of updates so far, as a 0-d array (float64 if a parameter is
        float64, else float32), and returns a number or a 0-d array.
    momentum : float
        In [0, 1); with 0 there is no momentum buffer.
    nesterov : bool
        Whether to use Nesterov momentum; ``momentum`` must then be more than 0.
    weight_decay : float
        The factor of the L2 penalty's gradient, at least 0.

    Raises
    ------
    ArgumentError
        If an argument is out of its range.

    Notes
    -----
    The state is ``{"step": 0-d int32, "momentum.NAME": …}``. float16 and bfloat16 parameters have float32
    buffers and arithmetic; only the new parameter is rounded to its dtype.

    References
    ----------
    Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and momentum in deep learning", 2013.

    Examples
    --------
    >>> import numpy as np
    >>> params = {"weight": np.asarray([2.0, -1.0])}
    >>> sgd = SGD(lr=0.5, weight_decay=0.1)
    >>> params, state = sgd.update({"weight": np.zeros(2)}, sgd.init(params), params)
    >>> params["weight"]
    array([ 1.9 , -0.95])
    """

    lr: Rate
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        set_rate(self, "lr")
        set_number(self, "momentum", below=1.0)
        set_number(self, "weight_decay")
        if self.nesterov and not self.momentum:
            raise ArgumentError("momentum: expected more than 0 for nesterov=True, got 0")

    def _slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _rule(self, theta: Array, grad: Array, *rest: Array, backend: Backend) -> tuple[Array, ...]:
        *buffers, rate = rest
        if not buffers and not self.weight_decay:
            return (theta - rate * grad,)
        added = [grad, *buffers, *((theta,) if self.weight_decay else ())]
        unit = self._unit(added, backend.namespace())
        grad = grad / unit
        if self.weight_decay:
            grad = grad + theta / unit * self.weight_decay
        if not buffers:
            return (theta - (rate * unit) * grad,)
        buffer = buffers[0] / unit * self.momentum + grad
        direction = grad + buffer * self.momentum if self.nesterov else buffer
        return theta - (rate * unit) * direction, buffer * unit

    def _unit(self, added: list[Array], xp: Any) -> Array:
        """Return a power of two by which the arrays are divided so that their sums do not overflow; 1 for small values.

        The sum is at most ``(1 + weight_decay) · (1 + momentum) + momentum²`` times the largest magnitude.
        """
        peak = functools.reduce(xp.maximum, (xp.abs(x) for x in added))
        one = xp.ones_like(peak)
        return xp.where(xp.greater(peak, one), one * 2.0 ** math.ceil(math.log2(4 + 2 * self.weight_decay)), one)
