"""``polyattn explain``."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import registry
from ..distributed import Machine, Plan, Shape, plan
from ..functional import Explanation
from ..functional._explain import ITEMSIZE
from ..kernels import FLOAT_DTYPES
from ..plot._file import expect_writable, write_png
from ._app import UsageError
from ._options import read_axes, read_window, where

__all__ = ["explain"]


def explain(
    q: Annotated[str, typer.Option(metavar="SHAPE", help="Shape of the queries, 1,8,2048,64 for instance.")],
    k: Annotated[str | None, typer.Option(metavar="SHAPE", help="Shape of the keys.", show_default="as --q")] = None,
    v: Annotated[str | None, typer.Option(metavar="SHAPE", help="Shape of the values.", show_default="as --k")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "float32",
    causal: Annotated[bool, typer.Option("--causal", help="No query attends to a later key.")] = False,
    window: Annotated[
        str | None, typer.Option(metavar="LEFT,RIGHT", help="Keys before and after a query; empty is unbounded.")
    ] = None,
    q_offset: Annotated[int | None, typer.Option(help="Position of the first query.", show_default="n_k - n_q")] = None,
    key_lengths: Annotated[int | None, typer.Option(help="Number of keys; later ones are excluded.")] = None,
    segments: Annotated[bool, typer.Option("--segments", help="With segment_ids.")] = False,
    scale: Annotated[float | None, typer.Option(help="Scale of the scores.", show_default="1/√d_k")] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound of the scores.")] = None,
    dropout: Annotated[float, typer.Option(help="Dropout of the weights.")] = 0.0,
    mask: Annotated[str | None, typer.Option(metavar="SHAPE", help="Shape of a mask.")] = None,
    bias: Annotated[str | None, typer.Option(metavar="SHAPE", help="Shape of a bias.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="With a sink for each head.")] = False,
    backend: Annotated[
        str | None, typer.Option(help="The backend that computes.", show_default="POLYATTN_BACKEND, else numpy")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A device of --backend, cuda:0 for instance.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Force a kernel by name.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the tiles of the generic kernel, and those it skips.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Plan the problem, forward and backward, over this number of devices.")
    ] = None,
    link: Annotated[float, typer.Option(help="For --devices: the bandwidth of a device's link, in GB/s.")] = 50.0,
    latency: Annotated[float, typer.Option(help="For --devices: the latency of the link, in µs.")] = 5.0,
    speed: Annotated[
        float | None,
        typer.Option(help="For --devices: TFLOP/s of one device.", show_default="measured on --backend here"),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the kernel for an attention problem, why the others are not used, and the amount of work.

    Only shapes matter: no array of that size is made, and the values of a mask or a bias are not considered.
    """
    if dtype not in FLOAT_DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(FLOAT_DTYPES)}, got {dtype!r}")
    if plot is not None:
        expect_writable(plot)
    shapes = {"q": read_axes("--q", q, 2)}
    shapes["k"] = shapes["q"] if k is None else read_axes("--k", k, 2)
    shapes["v"] = shapes["k"] if v is None else read_axes("--v", v, 2)
    pairs = {"mask": mask, "bias": bias}
    shapes |= {name: read_axes(f"--{name}", text) for name, text in pairs.items() if text is not None}
    if sinks:
        shapes["sinks"] = shapes["q"][-3:-2] or (1,)
    settings: dict[str, Any] = {
        "causal": causal, "q_offset": q_offset, "key_lengths": key_lengths, "scale": scale, "softcap": softcap,
        "dropout": dropout, "seed": 0 if dropout else None, "kernel": kernel,
        "window": None if window is None else read_window("--window", window),
    }  # fmt: skip
    there = where(backend, device)
    found = _explanation(*there, dtype, shapes, segments, settings)
    plans = [] if devices is None else _plans(there, dtype, shapes, causal, (devices, link, latency), speed)
    if json_output:
        typer.echo(json.dumps(asdict(found) | ({"plan": [asdict(x) for x in plans]} if plans else {})))
    else:
        typer.echo("\n".join(map(str, (found, *plans))))
    if plot is not None:
        _draw(plot, shapes, {name: settings[name] for name in ("causal", "q_offset", "window", "key_lengths")})
        typer.echo(f"picture   {plot}", err=True)


def _plans(
    there: tuple[str, str], dtype: str, shapes: dict[str, tuple[int, ...]], causal: bool,
    machine: tuple[int, float, float], speed: float | None,
) -> tuple[Plan, ...]:  # fmt: skip
    """Return the plans of valid shapes; ``machine`` is the number of devices, GB/s and µs."""
    q, k, v = (shapes[name] for name in "qkv")
    heads, kv_heads = (x[-3] if len(x) > 2 else 1 for x in (q, k))
    batch = math.prod(np.broadcast_shapes(q[:-3], k[:-3], v[:-3]))
    shape = Shape(batch, heads, kv_heads, q[-2], k[-2], q[-1], v[-1], ITEMSIZE[dtype], causal)
    count, link, latency = machine
    rate = measured_speed(*there, dtype) if speed is None else speed * 1e12
    return plan(shape, Machine(count, rate, link * 1e9, latency * 1e-6))


def measured_speed(backend: str, device: str, dtype: str) -> float:
    """Return the FLOP/s of a forward of some heads on a backend, the best of three."""
    from .. import functional
    from ..conversion import to_backend

    shape = Shape(1, 8, 8, 1024, 1024, 64, 64)
    host = np.random.default_rng(0).standard_normal((1, shape.heads, shape.n_q, shape.d_k)).astype(np.float32)
    native = registry.ready(backend)
    x = to_backend(host, backend, device)
    x, times = native.namespace().astype(x, native.dtype(dtype)), []
    for _ in range(4):  # the first one compiles
        began = time.perf_counter()
        native.synchronize(functional.attention(x, x, x))
        times.append(time.perf_counter() - began)
    return shape.flops / min(times[1:])


def _draw(path: Path, shapes: dict[str, tuple[int, ...]], excluding: dict[str, Any]) -> None:
    """Draw the tiles of a problem with valid shapes."""
    from matplotlib.figure import Figure

    from ..plot import tile_schedule

    q, k = shapes["q"], shapes["k"]
    lead = (math.prod(np.broadcast_shapes(q[:-3], k[:-3])), *q[-3:-2])
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    tile_schedule(q[-2], k[-2], heads=math.prod(lead), axes=figure.subplots(), **excluding)
    write_png(figure, path)


def _explanation(
    backend: str, device: str, dtype: str, shapes: dict[str, tuple[int, ...]], segments: bool, settings: dict[str, Any]
) -> Explanation:
    """Call ``functional.explain`` with arrays of the backend that have one element in memory.

    The standard's ``broadcast_to`` returns a view of the element. JAX would copy it, so this runs under the backend's
    compiler, where a traced array is only a shape and a dtype. A traced array has no device, so it is selected.
    """
    from .. import functional
    from ..selection import use_backend

    native = registry.ready(backend)
    xp, there, found = native.namespace(), native.native_device(device), []

    def ask(real: Any, boolean: Any, integer: Any) -> Any:
        def outline(x: Any, shape: tuple[int, ...]) -> Any:
            return xp.broadcast_to(x, shape)

        kinds = {"mask": boolean}
        arrays = {name: outline(kinds.get(name, real), shape) for name, shape in shapes.items()}
        if segments:
            arrays["segment_ids"] = tuple(outline(integer, (shapes[name][-2],)) for name in "qk")
        found.append(functional.explain(**arrays, **settings))
        return real

    with use_backend(backend, device):
        dtypes = (native.dtype(dtype), xp.bool, xp.int32)
        native.jit(ask)(*(xp.zeros((), dtype=kind, device=there) for kind in dtypes))
    return replace(found[0], device=device, moved_from=None)
