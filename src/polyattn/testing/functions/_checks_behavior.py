"""Checks of behavior: repeated calls, inputs that stay unchanged, empty axes, strides, threads, memory and dropout."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from .. import references as ref
from ._memory import peak_of
from ._subject import SIZES, Declared, Problem, Sizes, Subject, Wrong, compared, problem

__all__ = ["CHECKS"]

MIDDLE = problem(Sizes(2, 4, 4, 33, 65, 16, 16))


def deterministic(subject: Subject) -> str:
    """Check that five calls give the same bits."""
    first = subject.out(MIDDLE)
    if any(not np.array_equal(first, subject.out(MIDDLE)) for _ in range(4)):
        raise Wrong(f"two calls differ; at {MIDDLE}")
    return ""


def deterministic_gradients(subject: Subject) -> str:
    """Check that three backward passes give the same bits."""
    subject.needs(gradients=True)
    first, *others = [subject.gradients(MIDDLE) for _ in range(3)]
    if any(not np.array_equal(first[name], other[name]) for other in others for name in first):
        raise Wrong(f"the gradients of two calls differ; at {MIDDLE}")
    return ""


def inputs_unchanged(subject: Subject) -> str:
    """Check that a call writes to none of its arrays."""
    mask: dict[str, Any] = {"mask": np.ones((1, 1, 33, 65), dtype=bool)} if "mask" in subject.function.offers else {}
    arrays, arguments = subject.inputs(replace(MIDDLE, arguments=mask), "float32")
    to_numpy = subject.function.library.to_numpy
    every = [*arrays, *arguments.values()]
    before = [np.array(to_numpy(x)) for x in every]
    subject.call(arrays, arguments)
    if any(not np.array_equal(old, to_numpy(x)) for old, x in zip(before, every, strict=True)):
        raise Wrong(f"an input is written to; at {MIDDLE}")
    return ""


def no_alias(subject: Subject) -> str:
    """Check that the output never shares memory with an input, not even where it equals the one value."""
    for x in (problem(SIZES[0]), problem(replace(SIZES[3], n_q=1, n_k=1)), MIDDLE):
        arrays, arguments = subject.inputs(x, "float32")
        out = subject.function.attention(*arrays, **arguments)
        out = out.detach() if hasattr(out, "detach") else out
        try:
            shared = [np.shares_memory(np.from_dlpack(out), np.from_dlpack(part)) for part in arrays]
        except (AttributeError, TypeError, BufferError, RuntimeError):
            raise Declared("memory of these arrays cannot be compared") from None
        if any(shared):
            raise Wrong(f"the output shares memory with {'qkv'[shared.index(True)]}; at {x}")
    return ""


def empty(**lengths: int) -> Callable[[Subject], str]:
    """Return a check of problems with an axis of length 0: zeros without keys, else no elements."""

    def check(subject: Subject) -> str:
        for sizes in (SIZES[0], SIZES[3]):
            x = problem(replace(sizes, **lengths))
            compared(subject.out(x), ref.attention(x.q, x.k, x.v).out, "float32", x)
        return ""

    return check


def strides(kind: str) -> Callable[[Subject], str]:
    """Return a check that views of larger arrays, with steps, swapped axes, or repeated elements, are read right."""

    def check(subject: Subject) -> str:
        library = subject.function.library
        if not library.strided or (kind == "negative" and not library.negative):
            raise Declared(f"no {kind} strides in arrays of {library.name}")
        x = replace(MIDDLE, q=MIDDLE.q[:, :1], k=MIDDLE.k[:, :1], v=MIDDLE.v[:, :1], dout=MIDDLE.dout[:, :1])
        arrays = []
        for part in (subject.function.in_layout(part) for part in (x.q, x.k, x.v)):
            if kind == "swapped":
                view = np.ascontiguousarray(np.swapaxes(part, -1, -2))
                arrays.append(subject.function.library.make(view, "float32").swapaxes(-1, -2))
            elif kind == "stepped":
                view = np.repeat(part, 2, axis=-2)
                arrays.append(subject.function.library.make(view, "float32")[..., ::2, :])
            else:
                arrays.append(subject.function.library.make(part[..., ::-1, :], "float32")[..., ::-1, :])
        compared(subject.call(arrays, {}), ref.attention(x.q, x.k, x.v).out, "float32", x)
        return ""

    return check


def repeated(subject: Subject) -> str:
    """Check broadcast keys and values, whose strides are zero."""
    if not subject.function.library.strided:
        raise Declared(f"no zero strides in arrays of {subject.function.library.name}")
    x = problem(Sizes(1, 2, 2, 5, 7, 8, 8))
    arrays, _ = subject.inputs(x, "float32")
    shape = (3, *arrays[1].shape[1:])
    expand = np.broadcast_to if isinstance(arrays[1], np.ndarray) else lambda part, shape: part.expand(shape)
    q = subject.function.library.make(subject.function.in_layout(np.repeat(x.q, 3, axis=0)), "float32")
    out = subject.call([q, expand(arrays[1], shape), expand(arrays[2], shape)], {})
    compared(out, np.repeat(ref.attention(x.q, x.k, x.v).out, 3, axis=0), "float32", x)
    return ""


def threads(subject: Subject) -> str:
    """Check that eight threads at a time get what one thread gets."""
    problems = [problem(Sizes(1, 2, 2, 17 + i, 33 + i, 16, 16), i) for i in range(8)] * 4
    alone = [subject.out(x) for x in problems[:8]] * 4
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(subject.out, problems))
    for x, got, want in zip(problems, together, alone, strict=True):
        compared(got, want, "float32", x)
    return ""


def memory(gradients: bool) -> Callable[[Subject], str]:
    """Return a check that memory grows linearly from n to 2n."""

    def check(subject: Subject) -> str:
        subject.needs(gradients=gradients)

        def peak(n: int) -> int:
            x = problem(Sizes(1, 4, 4, n, n, 32, 32))
            run = subject.gradients if gradients else subject.out
            run(x)  # compiles, and warms up the allocator's small blocks
            return peak_of(lambda: run(x))

        small, large = peak(1536), peak(3072)
        growth = large / max(small, 2**20)
        said = f"{small / 2**20:.0f} MiB at n = 1536, {large / 2**20:.0f} MiB at 3072"
        if growth > 3 and large > 100 * 2**20:
            raise Wrong(f"memory is quadratic: {said} (4 heads of 32, float32)")
        return said

    return check


def dropout_rate(subject: Subject) -> str:
    """Check that dropout keeps a share 1 − p of the weights, divided by it."""
    subject.needs("dropout")
    n, p = 64, 0.25
    zero = np.zeros((4, 2, n, n))
    x = Problem(zero, zero, np.broadcast_to(np.eye(n), zero.shape), zero, {"dropout": p})
    out = subject.out(x) * n * (1 - p)
    if not np.all(np.isclose(out, 0, atol=1e-3) | np.isclose(out, 1, atol=1e-3)):
        raise Wrong(f"kept weights are not divided by 1 − p: {sorted(set(np.round(out.ravel(), 3)))[:4]} times 1 / n")
    kept, sigma = float(np.mean(out)), np.sqrt(p * (1 - p) / out.size)
    if abs(kept - (1 - p)) > 6 * sigma:
        raise Wrong(f"a share of {kept:.4f} is kept, expected {1 - p} ± {6 * sigma:.4f}")
    return f"keeps {kept:.4f} of 0.75"


def dropout_none(subject: Subject) -> str:
    """Check that dropout of 0 changes nothing."""
    subject.needs("dropout")
    compared(subject.out(replace(MIDDLE, arguments={"dropout": 0.0})), subject.out(MIDDLE), "float32", MIDDLE)
    return ""


CHECKS: dict[str, Callable[[Subject], str]] = {
    "dropout.rate": dropout_rate,
    "dropout.none": dropout_none,
    "behavior.deterministic": deterministic,
    "behavior.deterministic_gradients": deterministic_gradients,
    "behavior.inputs_unchanged": inputs_unchanged,
    "behavior.no_alias": no_alias,
    "behavior.no_queries": empty(n_q=0),
    "behavior.no_keys": empty(n_k=0),
    "behavior.no_items": empty(batch=0),
    "behavior.no_features": empty(d=0),
    "behavior.swapped_strides": strides("swapped"),
    "behavior.stepped_strides": strides("stepped"),
    "behavior.negative_strides": strides("negative"),
    "behavior.zero_strides": repeated,
    "behavior.threads": threads,
    "memory.forward": memory(gradients=False),
    "memory.backward": memory(gradients=True),
}
