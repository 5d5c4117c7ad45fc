"""The checks of any attention function: each finds its fault, and polyattn's own attention passes all."""

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from polyattn.testing.features import lacking
from polyattn.testing.functions import ADAPTERS, CHECKS, check_function
from polyattn.testing.functions._checks import run_one
from polyattn.testing.functions._function import of_module
from polyattn.testing.functions._subject import Subject


def formula(
    q, k, v, *, mask=None, bias=None, causal=False, scale=None, dropout=0.0, softcap=None,
    factor=1.0, wrong_group=False, offset=0, opposite=False, aligned="lower right",
):  # fmt: skip
    """The plain formula with each fault as an argument; it is right without one, except at extreme values."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, dtype=np.float32) if dtype != np.float64 else x for x in (q, k, v))
    if group > 1:
        spread = (lambda x: np.tile(x, (1, group, 1, 1))) if wrong_group else lambda x: np.repeat(x, group, axis=1)
        k, v = spread(k), spread(v)
    scores = (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * factor * (q @ np.swapaxes(k, -1, -2))
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    allowed = np.ones(scores.shape, dtype=bool)
    n_q, n_k = scores.shape[-2:]
    if mask is not None:
        allowed = allowed & (~mask if opposite else mask)
    if causal:
        shift = (n_k - n_q if aligned == "lower right" else 0) + offset
        allowed = allowed & np.tri(n_q, n_k, shift, dtype=bool)
    scores = np.where(allowed, scores if bias is None else scores + np.asarray(bias, dtype=scores.dtype), -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    weights = weights / np.maximum(np.sum(weights, axis=-1, keepdims=True), 1e-30)
    if dropout:
        weights = weights * (np.random.default_rng(0).random(weights.shape) >= dropout) / (1 - dropout)
    return (weights @ v).astype(dtype)


def attention(q, k, v, *, mask=None, bias=None, causal=False, scale=None, dropout=0.0, softcap=None):
    return formula(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout, softcap=softcap)


def subject(attention: Any, **names: Any) -> Subject:
    module = ModuleType("adapter")
    vars(module).update(attention=attention, **names)
    return Subject(of_module(module, "adapter"))


def with_fault(change: Any) -> Any:
    """Return an attention function whose arguments are those of ``attention``, changed."""

    def faulty(q, k, v, *, mask=None, bias=None, causal=False, scale=None, dropout=0.0, softcap=None):
        given = {"mask": mask, "bias": bias, "causal": causal, "scale": scale, "dropout": dropout, "softcap": softcap}
        return change(q, k, v, **given)

    return faulty


def writes(q, k, v, **given):
    out = attention(q, k, v, **given)
    q[...] = 0
    return out


def without_rescale(q, k, v, **given):
    given["dropout"], p = 0.0, given["dropout"]
    kept = np.random.default_rng(0).random((*q.shape[:-1], k.shape[-2])) >= p
    return attention(q, k, v, **given) if not p else np.where(kept, 1 / k.shape[-2], 0).astype(q.dtype) @ v


def in_float32(*arrays, **given):
    return attention(*(x.astype("float32") for x in arrays), **given).astype("float64")


COUNT = iter(range(10**6))
FAULTS = {
    "forward.plain": lambda *x, **given: formula(*x, **given, factor=2.0),
    "forward.scale": lambda *x, **given: attention(*x, **given | {"scale": None}),
    "forward.grouped_heads": lambda *x, **given: formula(*x, **given, wrong_group=True),
    "forward.float64": in_float32,
    "masks.polarity": lambda *x, **given: formula(*x, **given, opposite=True),
    "masks.of_keys": lambda *x, **given: attention(*x, **given | {"mask": None}),
    "masks.empty_row": lambda *x, **given: attention(*x, **given) + (0 if given["mask"] is None else 0.1),
    "bias.of_heads": lambda *x, **given: attention(*x, **given | {"bias": None}),
    "causal.square": lambda *x, **given: formula(*x, **given, offset=1),
    "causal.more_keys": lambda *x, **given: formula(*x, **given, offset=-1),
    "scores.softcap": lambda *x, **given: attention(*x, **given | {"softcap": None}),
    "excluded.nan_in_value": attention,
    "excluded.nan_in_value_causal": attention,
    "nan.in_value": lambda *x, **given: np.nan_to_num(attention(*x, **given)),
    "extremes.large_values": lambda *x, **given: attention(x[0], x[1], 2 * x[2], **given) / 2,
    "extremes.overflow": attention,
    "dropout.rate": without_rescale,
    "dropout.none": lambda *x, **given: attention(*x, **given) * np.float32(1 + 1e-3 * next(COUNT)),
    "behavior.deterministic": lambda *x, **given: attention(*x, **given) * np.float32(1 + 1e-3 * next(COUNT)),
    "behavior.inputs_unchanged": writes,
    "behavior.no_alias": lambda *x, **given: x[2] if x[1].shape[-2] == 1 else attention(*x, **given),
    "behavior.negative_strides": lambda *x, **given: attention(*(np.sort(part, axis=-2) for part in x), **given),
    "behavior.no_keys": lambda *x, **given: attention(*x, **given) if x[1].shape[-2] else np.full_like(x[0], np.nan),
    "memory.forward": attention,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:(invalid|overflow|divide):RuntimeWarning")
@pytest.mark.parametrize("check", FAULTS)
def test_the_check_finds_the_fault(check: str) -> None:
    row = run_one(check, subject(with_fault(FAULTS[check])))
    assert (row.check, row.outcome) == (check, "wrong"), row.detail


RIGHT = ("forward", "masks", "bias", "causal", "scores", "dropout", "behavior", "nan")


@pytest.mark.filterwarnings("ignore:(invalid|overflow|divide):RuntimeWarning")
@pytest.mark.parametrize("check", [name for name in CHECKS if name.partition(".")[0] in RIGHT])
def test_the_plain_formula_is_right(check: str) -> None:
    row = run_one(check, subject(attention))
    expected = {"behavior.deterministic_gradients": "declared"} | dict.fromkeys(
        ("masks.key_lengths", "masks.window", "scores.sinks"), "declared"
    )
    expected |= {"behavior.no_features": "refuses"}  # the default scale is one over zero
    assert row.outcome == expected.get(check, "right"), row.detail


def test_the_smallest_input_is_shown() -> None:
    row = run_one("causal.square", subject(with_fault(FAULTS["causal.square"])))
    assert row.detail == (
        "out[0, 0, 0, 0]: expected 0.9, got 0.708874 in float32; "
        "at q [[[[0.3], [0.8]]]], k [[[[0.3], [-1.3]]]], v [[[[0.9], [0.4]]]], causal True"
    )


def upper_left(q, k, v, *, causal=False):
    return formula(q, k, v, causal=causal, aligned="upper left")


def test_the_alignment_is_reported() -> None:
    assert run_one("causal.more_keys", subject(attention)).detail == "aligned lower right"
    assert run_one("causal.more_keys", subject(upper_left)).detail == "aligned upper left"


def test_what_is_declared_is_not_a_fault() -> None:
    declared = subject(attention, DECLARED={"extremes.overflow": "float32 alone"})
    with np.errstate(all="ignore"):
        assert run_one("extremes.overflow", declared) == ("extremes.overflow", "declared", "float32 alone")
    assert run_one("forward.plain", subject(attention, DECLARED={"forward.plain": "no"})).outcome == "right"


def test_gradients_of_an_own_backward() -> None:
    from polyattn.testing.functions.adapters import _polyattn

    def halved(*arrays: Any, **given: Any) -> Any:
        return [gradient / 2 for gradient in _polyattn.backward(*arrays, **given)]

    right = subject(_polyattn.attention, backward=_polyattn.backward)
    wrong = subject(_polyattn.attention, backward=halved)
    for check in ("gradients.plain", "gradients.bias"):
        assert run_one(check, right).outcome == "right"
        assert run_one(check, wrong).outcome == "wrong"


def test_polyattn_passes_every_check(backend: str, target: Any) -> None:
    name = {"array-api-strict": "strict"}.get(backend, backend)
    if f"polyattn-{name}" not in ADAPTERS:
        pytest.skip(f"there is no adapter for {backend}")
    # Where each shape is compiled, three groups stand for all.
    only = ["causal", "extremes", "excluded"] if lacking(target, "any_shape") else []
    report = check_function(f"polyattn-{name}", only=only)
    assert not report.faults
    assert only or len(report.rows) == len(CHECKS)


PEERS = {"torch": "torch.nn.functional.scaled_dot_product_attention", "jax": "jax.nn.dot_product_attention"}


def test_the_function_of_the_library(backend: str) -> None:
    if backend not in PEERS:
        pytest.skip(f"{backend} has no attention of its own")
    rows = {row.check: row for row in check_function(PEERS[backend], only=["causal.more_keys", "nan_in_value"]).rows}
    assert rows["causal.more_keys"][1:] == ("right", "aligned upper left")
    assert rows["excluded.nan_in_value"].outcome == "wrong"
