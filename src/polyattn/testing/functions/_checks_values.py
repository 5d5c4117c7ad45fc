"""Checks of values: outputs and gradients against the float64 reference, for each argument and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import references as ref
from ._subject import Problem, Sizes, Subject, Wrong, compared, ladder

__all__ = ["CHECKS"]

Rng = np.random.Generator
Check = Callable[[Subject], str]


def mask_of(*axes: str) -> Callable[[Rng, Sizes], NDArray[Any]]:
    """Return what draws a boolean mask that differs along these axes; every query may attend to the first key."""

    def draw(rng: Rng, s: Sizes) -> NDArray[Any]:
        lengths = {"batch": s.batch, "heads": s.heads, "n_q": s.n_q, "n_k": s.n_k}
        mask = rng.random([length if axis in axes else 1 for axis, length in lengths.items()]) < 2 / 3
        mask[..., 0] = True
        return mask

    return draw


def bias_of(*axes: str) -> Callable[[Rng, Sizes], NDArray[Any]]:
    """Return what draws a bias that differs along these axes."""

    def draw(rng: Rng, s: Sizes) -> NDArray[Any]:
        lengths = {"batch": s.batch, "heads": s.heads, "n_q": s.n_q, "n_k": s.n_k}
        return np.round(rng.standard_normal([n if axis in axes else 1 for axis, n in lengths.items()]), 1)

    return draw


def minus_infinity(rng: Rng, s: Sizes) -> NDArray[Any]:
    """Draw a bias that is −∞ for a third of the keys, but not for the first."""
    return np.where(mask_of("n_q", "n_k")(rng, s), np.round(rng.standard_normal((1, 1, s.n_q, s.n_k)), 1), -np.inf)


def all_excluded(rng: Rng, s: Sizes) -> NDArray[Any]:
    """Return a mask in which the last query may attend to nothing."""
    mask = np.ones((1, 1, s.n_q, s.n_k), dtype=bool)
    mask[..., -1, :] = False
    return mask


def lengths_of_items(rng: Rng, s: Sizes) -> NDArray[Any]:
    """Draw a number of keys for each item of the batch."""
    return rng.integers(1, s.n_k + 1, s.batch).astype(np.int32)


WHOLE = ("batch", "heads", "n_q", "n_k")
MORE_KEYS: dict[str, Any] = {"n_k": lambda s: s.n_q + 2}
MORE_QUERIES: dict[str, Any] = {"n_q": lambda s: s.n_k + 2}
GROUPED: dict[str, Any] = {"heads": lambda s: 2 * s.heads, "kv_heads": lambda s: s.heads}
ONE_HEAD: dict[str, Any] = {"heads": lambda s: max(s.heads, 3), "kv_heads": 1}
WIDER: dict[str, Any] = {"d_v": lambda s: s.d + 3}


def forward(dtype: str = "float32", **changes: Any) -> Check:
    """Return a check of the output."""
    return lambda subject: subject.expect(ladder(**changes), dtype)


def gradients(dtype: str = "float32", **changes: Any) -> Check:
    """Return a check of the gradients."""
    return lambda subject: subject.expect(ladder(**changes), dtype, gradients=True)


def alignment(**changes: Any) -> Check:
    """Return a check of causal attention where the numbers of queries and keys differ; it says which is aligned."""

    def check(subject: Subject) -> str:
        subject.needs("causal")
        for x in ladder(**changes):
            out = subject.out(Problem(x.q, x.k, x.v, x.dout, {"causal": True}))
            wanted = {
                "lower right": ref.attention(x.q, x.k, x.v, causal=True).out,
                "upper left": ref.attention(x.q, x.k, x.v, causal=True, q_offset=0).out,
            }
            agree = [name for name, want in wanted.items() if np.allclose(out, want, rtol=2e-5, atol=2e-5)]
            if not agree:
                compared(out, wanted["lower right"], "float32", x, "out, aligned lower right")
            if len(agree) == 1 and x.q.shape[-2] > 2:
                return f"aligned {agree[0]}"
        raise AssertionError("some problem of the ladder tells the two alignments apart")

    return check


def polarity(subject: Subject) -> str:
    """Check that True means that the query may attend to the key."""
    subject.needs("mask")
    for x in ladder(mask=mask_of("n_q", "n_k")):
        out, mask = subject.out(x), x.arguments["mask"]
        opposite = ref.attention(x.q, x.k, x.v, mask=~mask).out
        told_apart = not np.allclose(opposite, ref.attention(x.q, x.k, x.v, mask=mask).out)
        if told_apart and np.allclose(out, opposite, rtol=2e-5, atol=2e-5):
            raise Wrong(f"True excludes a key; at {x}")
    return "True: may attend"


CHECKS: dict[str, Check] = {
    "forward.plain": forward(),
    "forward.scale": forward(scale=0.3),
    "forward.more_keys": forward(**MORE_KEYS),
    "forward.more_queries": forward(**MORE_QUERIES),
    "forward.wider_values": forward(**WIDER),
    "forward.grouped_heads": forward(**GROUPED),
    "forward.one_kv_head": forward(**ONE_HEAD),
    "forward.float64": forward("float64"),
    "forward.float16": forward("float16"),
    "forward.bfloat16": forward("bfloat16"),
    "gradients.plain": gradients(),
    "gradients.scale": gradients(scale=0.3),
    "gradients.more_keys": gradients(**MORE_KEYS),
    "gradients.wider_values": gradients(**WIDER),
    "gradients.grouped_heads": gradients(**GROUPED),
    "gradients.one_kv_head": gradients(**ONE_HEAD),
    "gradients.causal": gradients(causal=True),
    "gradients.mask": gradients(mask=mask_of("n_q", "n_k")),
    "gradients.empty_row": gradients(mask=all_excluded),
    "gradients.bias": gradients(bias=bias_of(*WHOLE)),
    "gradients.bias_of_heads": gradients(bias=bias_of("heads", "n_q", "n_k")),
    "gradients.softcap": gradients(softcap=0.8),
    "gradients.float64": gradients("float64"),
    "gradients.float16": gradients("float16"),
    "gradients.bfloat16": gradients("bfloat16"),
    "masks.polarity": polarity,
    "masks.of_pairs": forward(mask=mask_of("n_q", "n_k")),
    "masks.of_everything": forward(mask=mask_of(*WHOLE)),
    "masks.of_keys": forward(mask=mask_of("batch", "n_k")),
    "masks.with_causal": forward(mask=mask_of("batch", "n_k"), causal=True),
    "masks.with_bias": forward(mask=mask_of("n_q", "n_k"), bias=bias_of(*WHOLE)),
    "masks.empty_row": forward(mask=all_excluded),
    "masks.key_lengths": forward(key_lengths=lengths_of_items),
    "masks.window": forward(window=(1, 0)),
    "bias.of_everything": forward(bias=bias_of(*WHOLE)),
    "bias.of_heads": forward(bias=bias_of("heads", "n_q", "n_k")),
    "bias.minus_infinity": forward(bias=minus_infinity),
    "bias.minus_infinity_row": forward(bias=lambda rng, s: np.where(all_excluded(rng, s), 0.0, -np.inf)),
    "causal.square": forward(causal=True),
    "causal.more_keys": alignment(**MORE_KEYS),
    "causal.more_queries": alignment(**MORE_QUERIES),
    "scores.softcap": forward(softcap=0.8),
    "scores.sinks": forward(sinks=lambda rng, s: np.round(rng.standard_normal(s.heads), 1)),
}
