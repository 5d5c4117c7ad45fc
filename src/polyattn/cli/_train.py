"""``polyattn train``."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

import typer

from .. import training
from ..training import Config
from ._app import Interrupted, UsageError

__all__ = ["train"]


def train(
    context: typer.Context,
    backend: Annotated[
        str | None, typer.Option(help="The backend that computes.", show_default="POLYATTN_BACKEND, else numpy")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A device of --backend, cuda:0 for instance.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = Config.dtype,
    steps: Annotated[int, typer.Option(help="Steps in total, with those before --resume.")] = Config.steps,
    batch: Annotated[int, typer.Option(help="Samples in each step.")] = Config.batch,
    sequence: Annotated[int, typer.Option(help="Rows of each sample.")] = Config.sequence,
    width: Annotated[int, typer.Option(help="Features of each row.")] = Config.width,
    heads: Annotated[int, typer.Option(help="Attention heads, a divisor of the width.")] = Config.heads,
    learning_rate: Annotated[float, typer.Option(help="The maximum, after 200 steps.")] = Config.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = Config.weight_decay,
    seed: Annotated[int, typer.Option(help="Seed of parameters and samples.")] = Config.seed,
    data: Annotated[str | None, typer.Option(help="An npz file with X and Y, (samples, sequence, features).")] = None,
    output: Annotated[
        str | None, typer.Option(help="The folder of the run.", show_default="a new one in runs/")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --output.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 200,
    engine: Annotated[str | None, typer.Option(help="dask: its workers compute the gradients of each batch.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of --engine dask, 2 by default.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train attention to find the row with the largest first feature and copy it to every position.

    A run that was stopped or killed goes on with --resume, as if it had not been. A folder takes one run at a time: it
    is locked until the run ends, however it ends.

    Under torchrun the processes share each batch: torchrun --nproc-per-node 2 -m polyattn train.
    """
    # The options that the user passed, even with default values: a resumed run keeps its other settings.
    named = [name for name in context.params if getattr(context.get_parameter_source(name), "name", "") not in DEFAULTS]
    try:
        result = training.train(
            {field.name: context.params[field.name] for field in fields(Config) if field.name in named},
            backend=backend, device=device, output=output, resume=resume, overwrite=overwrite,
            checkpoint_every=checkpoint_every, engine=engine, workers=workers,
        )  # fmt: skip
    except training.OptionError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt as interrupt:
        raise Interrupted(str(interrupt) or "interrupted") from None
    if result is not None:
        typer.echo(json.dumps(result) if json_output else _summary(result))


DEFAULTS = ("", "DEFAULT", "DEFAULT_MAP")


def _summary(result: dict[str, Any]) -> str:
    ratio, accuracy = result["loss_ratio"], result["pointer_accuracy"]
    part = "no part (all targets are equal)" if ratio is None else f"{ratio:.2%}"
    pointer = "none (the targets are not input rows)" if accuracy is None else f"{accuracy:.4f}"
    return "\n".join([
        f"{result['backend']} on {result['device']}, {result['dtype']}: step {result['steps']} after "
        f"{result['seconds']:.1f} s, {result['steps_per_second']:.0f} steps/s",
        f"loss              {result['loss']:.4g} on {result['evaluated_on']}",
        f"                  {part} of {result['baseline_loss']:.4g}, the loss of predicting the mean row",
        f"pointer accuracy  {pointer}",
        f"output            {result['output']}",
    ])  # fmt: skip
