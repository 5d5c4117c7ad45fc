"""Attention longer than a tile, by every kernel: positions, masks and random bits across the edges of tiles."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.kernels import candidates
from polyattn.testing import assert_close
from polyattn.testing import references as ref

N_Q, N_K = 1100, 1300
RNG = np.random.default_rng(31)
Q, K, V, DOUT = (RNG.standard_normal((1, n, 4)) for n in (N_Q, N_K, N_K, N_Q))
MASK = RNG.random((N_Q, N_K)) < 0.9
ARGUMENTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (150, 40)},
    "key-lengths": {"key_lengths": 1150},
    "mask": {"mask": MASK},
}


def results(make: Any, to_np: Any, kernel: str, arguments: Any) -> Any:
    """Return the output and the gradients of q, k and v by one kernel."""
    given = {key: make(x, "bool") if isinstance(x, np.ndarray) else x for key, x in arguments.items()}
    out, cache = pa.attention_forward(make(Q), make(K), make(V), kernel=kernel, **given)
    return [to_np(x) for x in (out, *pa.attention_backward(make(DOUT), cache)[:3])]


def kernels_with_tiles(target: Any) -> Any:
    """Return the names of all kernels but the plain one, which has no tiles."""
    every = candidates(() if target.contract is None else target.contract.kernels)
    return [kernel.name for kernel in every if kernel.name != "plain"]


def compare(make: Any, to_np: Any, target: Any, arguments: Any, want: Any) -> None:
    ran = 0
    for kernel in kernels_with_tiles(target):
        try:
            found = results(make, to_np, kernel, arguments)
        except pa.KernelUnsupportedError:
            continue
        ran += 1
        for what, x, expected in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
            assert_close(x, expected, what=f"{what} of {kernel}")
    assert ran


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_kernel(target: Any, make: Any, to_np: Any, name: Any) -> None:
    arguments = ARGUMENTS[name]
    slopes = ref.attention_gradients(DOUT, Q, K, V, **arguments)
    compare(make, to_np, target, arguments, [ref.attention(Q, K, V, **arguments).out, *slopes[:3]])


def test_dropout_by_every_kernel(target: Any, make: Any, to_np: Any) -> None:
    """The plain kernel, whose random bits other checks compare with a reference, stands for the reference here."""
    arguments = {"dropout": 0.3, "seed": 5}
    compare(make, to_np, target, arguments, results(make, to_np, "plain", arguments))
