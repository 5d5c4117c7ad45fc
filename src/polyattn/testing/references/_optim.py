"""SGD and AdamW on one parameter, step by step, in Python loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ._functional import Float, f64


def sgd(
    parameter: ArrayLike,
    gradients: Sequence[ArrayLike],
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Float:
    """Return the parameter after one step for each gradient (Sutskever et al. 2013, as in torch)."""
    p = f64(parameter)
    velocity = np.zeros_like(p)
    for gradient in gradients:
        for i in np.ndindex(p.shape):
            slope = float(f64(gradient)[i]) + weight_decay * p[i]
            velocity[i] = momentum * velocity[i] + slope
            p[i] -= lr * (slope + momentum * velocity[i] if nesterov else velocity[i])
    return p


def adamw(
    parameter: ArrayLike,
    gradients: Sequence[ArrayLike],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.01,
) -> Float:
    """Return the parameter after one step for each gradient (Loshchilov and Hutter 2019)."""
    p = f64(parameter)
    mean, square = np.zeros_like(p), np.zeros_like(p)
    for step, gradient in enumerate(gradients, start=1):
        for i in np.ndindex(p.shape):
            slope = float(f64(gradient)[i])
            mean[i] = betas[0] * mean[i] + (1 - betas[0]) * slope
            square[i] = betas[1] * square[i] + (1 - betas[1]) * slope**2
            unbiased_mean = mean[i] / (1 - betas[0] ** step)
            unbiased_square = square[i] / (1 - betas[1] ** step)
            p[i] -= lr * weight_decay * p[i]
            p[i] -= lr * unbiased_mean / (math.sqrt(unbiased_square + eps_root) + eps)
    return p
