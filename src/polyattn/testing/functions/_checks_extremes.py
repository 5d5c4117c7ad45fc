"""Checks of extreme values: NaN and infinity, excluded or not, huge scores, ties, and the ends of the range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .. import references as ref
from ._subject import SIZES, Problem, Subject, Wrong, compared, problem

__all__ = ["CHECKS"]

LOWEST = float(np.finfo(np.float32).min)
HIGHEST = float(np.finfo(np.float32).max)
TWO = problem(replace(SIZES[2], n_k=2))
SEVERAL = problem(replace(SIZES[3], n_q=4, n_k=5))


def given(q: Any, k: Any, v: Any = None, **arguments: Any) -> Problem:
    """Return a problem of one item and one head from nested lists; by default a value of 1 for the first key alone."""
    v = np.arange(len(k))[:, None] + np.zeros(len(k[0])) == 0 if v is None else v
    q, k, v = (np.asarray(x, dtype=np.float64)[None, None] for x in (q, k, v))
    return Problem(q, k, v, np.ones((*q.shape[:-1], v.shape[-1])), arguments)


def excluded(which: str, value: float, by: str, gradients: bool = False) -> Callable[[Subject], str]:
    """Return a check that a special value at an excluded key reaches nothing."""

    def check(subject: Subject) -> str:
        subject.needs(by, gradients=gradients)
        for sizes in SIZES[1:4]:
            clean = problem(replace(sizes, n_q=max(sizes.n_q, 2)))
            n_q, n_k = clean.q.shape[-2], clean.k.shape[-2]
            allowed = np.ones((1, 1, n_q, n_k), dtype=bool)
            allowed[..., -1] = False
            # By causality, the last key is seen by the last query alone.
            clean = replace(clean, arguments={"mask": allowed} if by == "mask" else {"causal": True})
            poisoned = getattr(clean, which).copy()
            poisoned[..., -1, :] = value
            dirty = replace(clean, **{which: poisoned})
            rows = slice(None) if by == "mask" else slice(0, n_q - 1)
            if by == "causal":
                dout = clean.dout.copy()
                dout[..., -1, :] = 0
                clean, dirty = replace(clean, dout=dout), replace(dirty, dout=dout)
            if gradients:
                want, got = subject.gradients(clean), subject.gradients(dirty)
                for name in "qkv":
                    part = rows if name == "q" else slice(0, n_k - 1)
                    a, b = got[name][..., part, :], want[name][..., part, :]
                    compared(a, b, "float32", dirty, f"the gradient of {name}")
            else:
                compared(subject.out(dirty)[..., rows, :], subject.out(clean)[..., rows, :], "float32", dirty)
        return ""

    return check


def real_nan(which: str) -> Callable[[Subject], str]:
    """Return a check that NaN reaches the results that depend on it, and no others."""

    def check(subject: Subject) -> str:
        for sizes in SIZES[:4]:
            x = problem(sizes)
            poisoned = getattr(x, which).copy()
            poisoned[0, 0, -1, 0] = np.nan
            x = replace(x, **{which: poisoned})
            got, want = np.isnan(subject.out(x)), np.isnan(ref.attention(x.q, x.k, x.v).out)
            if not np.array_equal(got, want):
                what = "is lost" if (want & ~got).any() else "reaches a result that does not depend on it"
                raise Wrong(f"NaN in {which} {what}; at {x}")
        return ""

    return check


def exact(dtype: str, *problems: tuple[Problem, float]) -> Callable[[Subject], str]:
    """Return a check of problems whose exact output is one known number."""

    def check(subject: Subject) -> str:
        for x, want in problems:
            subject.needs(*x.arguments, dtype=dtype)
            compared(subject.out(x, dtype), np.full_like(x.dout, want), dtype, x)
        return ""

    return check


def sums(value: float, gradients: bool = False) -> Callable[[Subject], str]:
    """Return a check that weights sum to one where every key of a row has this bias: by values of one, or by dv."""
    bias = np.zeros((1, 1, 3, 11))
    bias[..., 0, :] = value

    def check(subject: Subject) -> str:
        subject.needs("bias", gradients=gradients)
        x = replace(problem(replace(SIZES[2], n_q=3, n_k=11)), arguments={"bias": bias})
        if gradients:
            dv = np.sum(subject.gradients(x)["v"], axis=-2)
            compared(dv, np.sum(x.dout, axis=-2), "float32", x, "the sum of dv over keys")
        else:
            ones = replace(x, v=np.ones_like(x.v))
            compared(subject.out(ones), np.ones_like(x.dout), "float32", ones)
        return ""

    return check


def large_gradients(subject: Subject) -> str:
    """Check that equal scores of 1e5 keep their digits in the backward pass."""
    subject.needs(gradients=True)
    x = given(np.full((4, 1), 1e3), np.full((8, 1), 1e2), np.arange(8.0)[:, None] / 8)
    x = replace(x, dout=x.dout * np.array([1.0, -2.0, 3.0, 0.5])[:, None])
    found = subject.gradients(x)
    want = ref.attention_gradients(x.dout, x.q, x.k, x.v)
    compared(found["v"], want.v, "float32", x, "the gradient of v")
    # Each term of dk is of the size of q times the upstream gradient.
    compared(found["k"], want.k, "float32", x, "the gradient of k", scale=3e3)
    return ""


LOWEST_SECOND = np.array([[[[0.0, LOWEST]]]])
CHECKS: dict[str, Callable[[Subject], str]] = {
    "excluded.nan_in_value": excluded("v", np.nan, "mask"),
    "excluded.nan_in_key": excluded("k", np.nan, "mask"),
    "excluded.infinity_in_value": excluded("v", np.inf, "mask"),
    "excluded.infinity_in_key": excluded("k", np.inf, "mask"),
    "excluded.nan_in_value_causal": excluded("v", np.nan, "causal"),
    "excluded.nan_in_key_causal": excluded("k", np.nan, "causal"),
    "excluded.nan_in_value_gradients": excluded("v", np.nan, "mask", gradients=True),
    "excluded.nan_in_key_gradients": excluded("k", np.nan, "mask", gradients=True),
    "nan.in_query": real_nan("q"),
    "nan.in_key": real_nan("k"),
    "nan.in_value": real_nan("v"),
    "extremes.huge_scores": exact(
        "float32",
        (given([[1e4, 0]], [[1e4, 0], [0, 1e4]]), 1.0),
        (given([[-1e8, 0]], [[1e8, 0], [0, 1e8]]), 0.0),
    ),
    "extremes.ties": exact(
        "float32",
        (given([[1e4, 0]], [[1e4, 0], [1e4, 1]]), 0.5),
        (given([[0, 0]], [[HIGHEST, 0], [0, HIGHEST]]), 0.5),
    ),
    "extremes.large_gradients": large_gradients,
    "extremes.overflow": exact("float32", (given([[1e19] * 4], [[1e19] * 4, [0] * 4]), 1.0)),
    "extremes.overflow_to_minus_infinity": exact("float32", (given([[1e19] * 4], [[-1e19] * 4, [-1e19] * 4]), 0.5)),
    "extremes.overflow_float16": exact("float16", (given([[300] * 64], [[300] * 64, [0] * 64]), 1.0)),
    "extremes.tiny_scores": exact("float32", (given([[1e-30] * 4], [[1e-30] * 4, [0] * 4]), 0.5)),
    "extremes.large_values": exact("float32", (given([[0]], [[0], [0]], [[3e38], [3e38]]), 3e38)),
    "extremes.lowest_bias": exact("float32", (given([[1.0]], [[1.0], [2.0]], bias=LOWEST_SECOND), 1.0)),
    "extremes.lowest_bias_row": sums(LOWEST),
    "extremes.lowest_bias_row_gradients": sums(LOWEST, gradients=True),
    "extremes.common_bias": sums(-1e30),
    "extremes.common_bias_gradients": sums(-1e30, gradients=True),
}
