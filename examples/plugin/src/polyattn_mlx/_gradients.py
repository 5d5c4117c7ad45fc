"""A forward and a backward of polyattn's as one function that MLX differentiates. Imported only once MLX is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


def differentiable(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[[Any, Any], tuple[Any, ...]]
) -> Callable[..., Any]:
    """Return ``y = op(*arrays)``, whose gradients are the backward's.

    The gradient runs the forward again. What that saves then depends on the inputs in MLX's eyes too, so that gradients
    of gradients are right; MLX computes only what is asked of it, so the second ``y`` costs nothing.
    """

    def call(*arrays: Any) -> Any:
        given = [x is not None for x in arrays]

        def whole(present: Any) -> tuple[Any, ...]:
            rest = iter(present)
            return tuple(next(rest) if there else None for there in given)

        @mx.custom_function
        def op(*present: Any) -> Any:
            y, _ = forward(*whole(present))
            return y

        @op.vjp
        def op_vjp(primals: Any, dy: Any, y: Any) -> Any:
            present = primals if isinstance(primals, tuple) else (primals,)  # MLX unpacks a single one
            _, saved = forward(*whole(present))
            grads = backward(dy, saved)
            chosen = [grad for grad, there in zip(grads, given, strict=True) if there]
            return tuple(mx.zeros_like(x) if grad is None else grad for x, grad in zip(present, chosen, strict=True))

        return op(*(x for x in arrays if x is not None))

    return call
