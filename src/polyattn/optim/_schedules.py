"""Learning-rate schedules: functions of the number of updates so far."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import registry
from ..errors import ArgumentError
from ..kernels import Array, dtype_name
from ._base import Rate, as_array, rate_array, set_number, set_rate


@dataclass(frozen=True)
class constant:
    """The same learning rate at every step.

    Parameters
    ----------
    lr : float
        The learning rate, at least 0.

    Examples
    --------
    >>> constant(0.1)(7)
    0.1
    """

    lr: float

    def __post_init__(self) -> None:
        set_number(self, "lr")

    def __call__(self, step: Any) -> Any:
        """Return the rate after ``step`` updates, as a float for a number and as a 0-d array for a 0-d array."""
        xp, now = _real(step)
        return _like(step, xp.full_like(now, self.lr), xp)


@dataclass(frozen=True)
class cosine:
    """Cosine decay from ``lr`` to ``final``, and ``final`` from ``total_steps`` on.

    ``final + (lr - final) · (1 + cos(π · min(step / total_steps, 1))) / 2``

    Parameters
    ----------
    lr : float
        The rate of the first update, at least 0.
    total_steps : int
        The number of updates after which the rate is ``final``, at least 1.
    final : float
        The rate at the end, at least 0.

    References
    ----------
    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.

    Examples
    --------
    >>> schedule = cosine(0.5, total_steps=100, final=0.1)
    >>> schedule(0), round(schedule(50), 6), schedule(100), schedule(1000)
    (0.5, 0.3, 0.1, 0.1)
    """

    lr: float
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        set_number(self, "lr")
        _set_steps(self, "total_steps", 1)
        set_number(self, "final")

    def __call__(self, step: Any) -> Any:
        """Return the rate after ``step`` updates, as a float for a number and as a 0-d array for a 0-d array."""
        xp, now = _real(step)
        progress = xp.minimum(now / float(self.total_steps), xp.ones_like(now))
        height = (xp.cos(progress * math.pi) + 1.0) * 0.5
        return _like(step, height * (self.lr - self.final) + self.final, xp)


@dataclass(frozen=True)
class linear_warmup:
    """Linear warm-up to the first rate of another schedule, followed by that schedule.

    The rate after ``step`` updates is ``schedule(0) · (step + 1) / warmup_steps`` while ``step < warmup_steps``, and
    ``schedule(step - warmup_steps)`` from then on. So the first rate is not 0, and the last update of the warm-up has
    the full rate.

    Parameters
    ----------
    schedule : float or function of the step
        The schedule after the warm-up.
    warmup_steps : int
        The number of updates of the warm-up, at least 0; 0 means no warm-up.

    References
    ----------
    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017 (gradual warm-up).

    Examples
    --------
    >>> schedule = linear_warmup(0.5, warmup_steps=4)
    >>> [schedule(step) for step in range(6)]
    [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    >>> schedule = linear_warmup(cosine(0.5, total_steps=96), warmup_steps=4)
    >>> schedule(4), schedule(100)
    (0.5, 0.0)
    """

    schedule: Rate
    warmup_steps: int

    def __post_init__(self) -> None:
        set_rate(self, "schedule")
        _set_steps(self, "warmup_steps", 0)

    def __call__(self, step: Any) -> Any:
        """Return the rate after ``step`` updates, as a float for a number and as a 0-d array for a 0-d array."""
        xp, now = _real(step)
        # During the warm-up this is the schedule's first rate, so that one formula serves for both parts.
        after = _like(step, xp.maximum(now - float(self.warmup_steps), xp.zeros_like(now)), xp)
        rate = self.schedule(after) if callable(self.schedule) else self.schedule
        rate = rate_array(rate, now, xp)
        rise = xp.minimum((now + 1.0) / max(float(self.warmup_steps), 1.0), xp.ones_like(now))
        return _like(step, rate * rise, xp)


def _real(step: Any) -> tuple[Any, Array]:
    """Return the namespace, and the step as a floating 0-d array: NumPy's float64 for a Python number."""
    if isinstance(step, numbers.Real):
        step = np.asarray(step, dtype=np.float64)
    xp = registry.owner(step, "step").namespace()
    return xp, step if dtype_name(step.dtype) in ("float32", "float64") else xp.astype(step, xp.float32)


def _like(step: Any, value: Any, xp: Any) -> Any:
    """Return ``value`` as a float if the step is a number, else as a 0-d array."""
    return float(value) if isinstance(step, numbers.Real) else as_array(value, xp)


def _set_steps(instance: object, argument: str, least: int) -> None:
    value = getattr(instance, argument)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{argument}: expected an integer of at least {least}, got {value!r}")
    object.__setattr__(instance, argument, int(value))
