"""``polyattn explain``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..functional import Explanation
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
    found = _explanation(*where(backend, device), dtype, shapes, segments, settings)
    typer.echo(json.dumps(asdict(found)) if json_output else str(found))
    if plot is not None:
        _draw(plot, shapes, {name: settings[name] for name in ("causal", "q_offset", "window", "key_lengths")})
        typer.echo(f"picture   {plot}", err=True)


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
    from .. import functional, registry
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
