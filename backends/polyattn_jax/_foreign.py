"""The functions of polyattn's native library as foreign functions of XLA: their registration, and the call.

Where a program may not call them, the call is in doubt of its results, and the program computes them otherwise: on
other platforms, for ``jax.export``, whose programs run elsewhere, and where XLA divides arrays among devices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from polyattn.backend import Array
from polyattn_native import ForeignCall, library

from ._placed import types_of

__all__ = ["call", "missing", "platform"]

TARGETS = {"forward": "polyattn_attention_forward", "backward": "polyattn_attention_backward"}
DOUBT = -1
"""``Status`` of cpp/abi.h."""


@functools.cache
def missing() -> str | None:
    """Register the functions, and return why there are none, or None. The answer is kept for the process."""
    functions = library()
    if isinstance(functions, str):
        return functions
    try:
        for direction, target in TARGETS.items():
            handler = getattr(functions, f"polyattn_xla_attention_{direction}")
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    except Exception as error:
        return f"this jaxlib does not accept the native functions: {str(error).partition(chr(10))[0]}"
    return None


def platform() -> str:
    """Return the platform of programs whose arrays are traced."""
    return str(jax.default_backend())


def call(
    direction: str, operands: Sequence[Array], results: Mapping[str, tuple[tuple[int, ...], Any]], of: ForeignCall
) -> tuple[dict[str, Array], Array]:
    """Call a function; return its results by name, of these shapes and dtypes, and whether they are valid."""
    shapes = [*results.values(), ((), np.int32)]
    *found, status = _call.bind(
        *operands, target=TARGETS[direction], structure=of.structure, fields=of.fields,
        results=types_of(shapes, operands),
    )  # fmt: skip
    return dict(zip(results, found, strict=True)), status == 0


_call = Primitive("polyattn_native")
_call.multiple_results = True


def _computed(*operands: Array, **parameters: Any) -> Sequence[Array]:
    """Compute without an enclosing ``jax.jit``, as under ``jax.disable_jit``."""
    with jax.disable_jit(False):
        found: Sequence[Array] = jax.jit(functools.partial(_call.bind, **parameters))(*operands)
    return found


def _in_doubt(*operands: Array, results: Any, **parameters: Any) -> Sequence[Array]:
    *shapes, status = results
    return [*(jnp.zeros(x.shape, x.dtype) for x in shapes), jnp.full(status.shape, DOUBT, status.dtype)]


_doubtful = mlir.lower_fun(_in_doubt, multiple_results=True)


def _on_cpu(
    context: Any, *operands: Any, target: str, structure: bytes, fields: tuple[int, ...], results: Any
) -> Sequence[Any]:  # fmt: skip
    module = context.module_context
    if module.lowering_parameters.for_export or _divides(module.axis_context):
        return _doubtful(context, *operands, results=results)  # type: ignore[no-any-return]  # JAX is Any
    attributes = {"structure": np.frombuffer(structure, dtype=np.int64), "fields": np.array(fields, dtype=np.int64)}
    return jax.ffi.ffi_lowering(target)(context, *operands, **attributes)  # type: ignore[no-any-return]  # as above


def _divides(axes: Any) -> bool:
    """Return whether XLA may divide the arrays of a program among devices; in ``shard_map`` the user has."""
    manual = getattr(axes, "manual_axes", None)
    if manual:
        return bool(frozenset(manual) | frozenset(axes.mesh.manual_axes) != frozenset(axes.mesh.axis_names))
    return bool(getattr(axes, "num_devices", 1) != 1)


_call.def_impl(_computed)
_call.def_abstract_eval(lambda *operands, results, **parameters: list(results))
mlir.register_lowering(_call, lambda context, *operands, results, **_: _doubtful(context, *operands, results=results))
mlir.register_lowering(_call, _on_cpu, platform="cpu")
