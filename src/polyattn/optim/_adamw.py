"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..backend import Backend
from ..errors import ArgumentError
from ..functional._range import within
from ..kernels import Array, dtype_name
from ._base import Optimizer, Rate, check_number, set_number, set_rate

LEAST = 1e-30  # a smaller epsilon may underflow to 0 in float32, and the denominator may then be 0
ORDINARY = {"float32": (2.0**-45, 2.0**62), "float64": (2.0**-493, 2.0**510)}
"""By the dtype of the moments: the magnitudes between which the square of a gradient is exact to rounding."""


@dataclass(frozen=True)
class AdamW(Optimizer):
    r"""Adam with decoupled weight decay.

    For each parameter :math:`\theta` with gradient :math:`g`, at update :math:`t = 1, 2, …`::

        m ← β₁ · m + (1 - β₁) · g
        v ← β₂ · v + (1 - β₂) · g²
        m̂ = m / (1 - β₁ᵗ)
        v̂ = v / (1 - β₂ᵗ)
        θ ← θ - lr · weight_decay · θ - lr · m̂ / (√(v̂ + eps_root) + eps)

    If the denominator is 0 (``eps = eps_root = 0`` and all gradients so far are 0), the fraction is taken as 0.

    Parameters
    ----------
    lr : float or function of the step
        The learning rate. A function takes the number of updates so far, as a 0-d array (float64 if a parameter is
        float64, else float32), and returns a number or a 0-d array.
    betas : (float, float)
        The decay rates of the two moments, each in [0, 1).
    eps : float
        Added to the square root, at least 0.
    eps_root : float
        Added inside the square root, at least 0. For epsilon inside the root only, use
        ``AdamW(lr, eps=0, eps_root=…)``.
    weight_decay : float
        The weight decay, at least 0. It is multiplied by the learning rate and does not enter the moments.

    Raises
    ------
    ArgumentError
        If an argument is out of its range.

    Notes
    -----
    The state is ``{"step": 0-d int32, "mean.NAME": m, "square.NAME": v}``. float16 and bfloat16 parameters have
    float32 moments and arithmetic (1e-8 is zero in float16); only the new parameter is rounded to its dtype.

    If v is outside the range of its dtype, or close to its ends, ``"square.NAME"`` holds the negative number
    :math:`-\sqrt v` instead. So the update follows the formula for every finite gradient.

    References
    ----------
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, with the schedule multiplier as part of lr.

    Examples
    --------
    >>> import numpy as np
    >>> params = {"weight": np.asarray([1.0, -2.0])}
    >>> adamw = AdamW(lr=0.1, weight_decay=0.5)
    >>> params, state = adamw.update({"weight": np.asarray([0.1, -0.3])}, adamw.init(params), params)
    >>> np.round(params["weight"], 6)
    array([ 0.85, -1.8 ])
    >>> sorted(state)
    ['mean.weight', 'square.weight', 'step']
    """

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_root: float = 0.0
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        set_rate(self, "lr")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise ArgumentError(f"betas: expected a tuple of two numbers, got {self.betas!r}")
        betas = tuple(check_number(f"betas[{index}]", beta, below=1.0) for index, beta in enumerate(self.betas))
        object.__setattr__(self, "betas", betas)
        for argument in ("eps", "eps_root", "weight_decay"):
            set_number(self, argument)

    def _slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def _scalars(self, rate: Array, t: Array, xp: Any) -> tuple[Array, ...]:
        """Return ``(factor, inside, √inside, outside, decay)``, which combine rate, bias corrections and epsilons.

        lr · m̂ / (√(v̂ + eps_root) + eps) = factor · m / (√(v + inside) + outside).
        """
        # 1 - βᵗ without cancellation: in float32, 1 - 0.999 has four correct digits
        of_mean, of_square = (-xp.expm1(t * (math.log(beta) if beta else -math.inf)) for beta in self.betas)
        root = xp.sqrt(of_square)
        inside = of_square * self.eps_root, root * math.sqrt(self.eps_root)
        return rate * root / of_mean, *inside, root * self.eps, rate * self.weight_decay

    def _rule(self, theta: Array, grad: Array, *rest: Array, backend: Backend) -> tuple[Array, ...]:
        xp = backend.namespace()
        mean, square, factor, inside, root_inside, outside, decay = rest
        low, high = ORDINARY[dtype_name(theta.dtype)]
        updated: tuple[Array, ...] | None = backend.operation(
            "adamw", theta, grad, mean, square, factor, inside, outside, decay, betas=self.betas,
            squares=(low * low, high * high),
        )  # fmt: skip
        if updated is not None:
            return updated
        mean = mean * self.betas[0] + grad * (1.0 - self.betas[0])
        root, square = self._second_moment(grad, square, inside, root_inside, backend)
        numerator, denominator = mean, root + outside
        if self.eps < LEAST:
            vanished = xp.equal(denominator, xp.zeros_like(denominator))
            numerator = xp.where(vanished, xp.zeros_like(numerator), numerator)
            denominator = xp.where(vanished, xp.ones_like(denominator), denominator)
        step = numerator / denominator * factor
        if self.weight_decay:
            step = step + theta * decay
        return theta - step, mean, square

    def _second_moment(
        self, grad: Array, square: Array, inside: Array, root_inside: Array, backend: Backend
    ) -> tuple[Array, Array]:
        """Return √(v + inside) and the new slot of v."""
        xp = backend.namespace()
        if backend.state(grad).readable:
            v = square * self.betas[1] + grad * grad * (1.0 - self.betas[1])
            if self._in_range(grad, square, inside, v, xp):
                return xp.sqrt(v + inside if self.eps_root else v), v
        return self._scaled_moment(grad, square, inside, root_inside, xp)

    def _in_range(self, grad: Array, square: Array, inside: Array, v: Array, xp: Any) -> bool:
        """Return whether no square in v has overflowed or underflowed."""
        low, high = (bound * bound for bound in ORDINARY[dtype_name(v.dtype)])
        if not within(xp, square, 0.0, high) or (self.eps_root and not within(xp, inside, low, high)):
            return False
        if within(xp, v, low, high):
            return True
        zero = xp.logical_and(xp.equal(v, 0.0), xp.equal(grad, 0.0))
        return within(xp, xp.where(zero, xp.ones_like(v), v), low, high)

    def _scaled_moment(
        self, grad: Array, square: Array, inside: Array, root_inside: Array, xp: Any
    ) -> tuple[Array, Array]:
        """Return √(v + inside) and the new slot of v, with squares computed in units of the largest root.

        The unit is 1 unless a square might overflow or lose precision; then the slot holds -√v.
        """
        low, high = ORDINARY[dtype_name(square.dtype)]
        zero, one = xp.zeros_like(square), xp.ones_like(square)
        as_root, magnitude = xp.less(square, zero), xp.abs(square)
        old = xp.where(as_root, magnitude, xp.sqrt(magnitude))  # √v before this update
        peak = xp.maximum(old, xp.abs(grad))
        if self.eps_root:
            peak = xp.maximum(peak, one * root_inside)
        ordinary = xp.logical_and(xp.greater_equal(peak, one * low), xp.less_equal(peak, one * high))
        ordinary = xp.logical_or(ordinary, xp.equal(peak, zero))
        unit = xp.where(ordinary, one, peak)
        as_square = xp.logical_and(ordinary, xp.logical_not(as_root))
        old, grad = old / unit, grad / unit
        v = xp.where(as_square, square, old * old) * self.betas[1] + grad * grad * (1.0 - self.betas[1])
        square = xp.where(ordinary, v, -unit * xp.sqrt(v))
        if self.eps_root:
            root_inside = root_inside / unit
            v = v + xp.where(ordinary, one * inside, root_inside * root_inside)
        return unit * xp.sqrt(v), square
