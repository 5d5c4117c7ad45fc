"""Named arrays in a safetensors file, written whole or not at all.

Nothing in a file is ever executed, and no library but NumPy is needed to read one. The metadata hold a digest of
the content, so that a file whose bits have changed since is not taken for good; other readers pass over it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from . import registry
from .backend import Array
from .errors import CheckpointError

__all__ = ["LEFTOVERS", "read_tensors", "write_bytes", "write_tensors"]

LEFTOVERS = ".polyattn-*.tmp"
"""What a process that was killed while writing may leave beside the file; it can be deleted."""

_DIGEST = "polyattn.sha256"

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays to a safetensors file, atomically.

    Parameters
    ----------
    path : path
        The file. What it holds is replaced only once the new content lies whole on the disk: a kill at any
        moment, a full disk and a read-only folder leave it as it was.
    tensors : dict
        Arrays of any library, device and layout, by name.
    metadata : dict, optional
        Strings by name.

    Raises
    ------
    CheckpointError
        If the file cannot be written, or safetensors has no such dtype; the message gives path and cause.
    BackendMismatchError
        If a value is not an array.

    References
    ----------
    The safetensors format: https://huggingface.co/docs/safetensors

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(f"{folder}/w.safetensors", {"weight": np.eye(2)}, {"step": "7"})
    ...     tensors, metadata = read_tensors(f"{folder}/w.safetensors")
    >>> tensors["weight"].tolist(), metadata
    ([[1.0, 0.0], [0.0, 1.0]], {'step': '7'})
    """
    # safetensors writes the bytes in memory order whatever the strides are, so the arrays must be in C order.
    packed = {name: _little_endian(registry.owner(x, name).to_numpy(x)) for name, x in tensors.items()}
    metadata = dict(metadata or {})
    try:
        content = {name: (x.shape, x.reshape(-1).view(np.uint8)) for name, x in packed.items()}
        data = safetensors.numpy.save(packed, metadata={**metadata, _DIGEST: _digest(content, metadata)})
    except (safetensors.SafetensorError, TypeError, ValueError) as cause:
        raise CheckpointError(f"{os.fspath(path)}: cannot be stored as safetensors: {cause}") from cause
    write_bytes(path, data)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically: as a temporary file in the same folder, synced, then renamed over ``path``.

    Raises
    ------
    CheckpointError
        If it cannot be written; what stood at ``path`` is unchanged and no temporary file is left.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(LEFTOVERS.replace("*", secrets.token_hex(4)))
    try:
        if target.exists() and not target.is_file():
            raise OSError("it exists and is not a regular file")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(target.parent)
    except OSError as cause:
        raise CheckpointError(
            f"{os.fspath(path)}: cannot be written: {cause.strerror or cause}; what was there is unchanged"
        ) from cause


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Return the arrays of a safetensors file, writable NumPy arrays by name, and its metadata.

    Raises
    ------
    CheckpointError
        If the file is missing, cannot be read, is truncated or changed, or is no safetensors file.
    """
    where = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except OSError as cause:
        raise CheckpointError(f"{where}: cannot be read: {cause.strerror or cause}; check the path") from cause
    try:
        entries: Any = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (safetensors.SafetensorError, ValueError) as cause:
        raise CheckpointError(
            f"{where}: not a safetensors file, or a damaged one ({cause}); use an undamaged copy, or write a new one"
        ) from cause
    metadata = dict(header.get("__metadata__", {}))
    digest = metadata.pop(_DIGEST, None)  # which files of other libraries lack
    content = {name: (tuple(entry["shape"]), entry["data"]) for name, entry in entries}
    if digest is not None and digest != _digest(content, metadata):
        raise CheckpointError(
            f"{where}: damaged: its content is not what was written; use an undamaged copy, or write a new one"
        )
    return {name: _view(where, name, entry) for name, entry in entries}, metadata


def _little_endian(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(x, dtype=x.dtype.newbyteorder("<"), order="C")


def _digest(tensors: Mapping[str, tuple[tuple[int, ...], Any]], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, shapes, elements and metadata, whatever their order."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, (shape, data) in sorted(tensors.items()):
        digest.update(f"{name} {shape}".encode())
        digest.update(data)
    return digest.hexdigest()


def _view(where: str, name: str, entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    kind = entry["dtype"]
    if kind not in _DTYPES and kind != "BF16":
        raise CheckpointError(f"{where}: {name!r} has the dtype {kind}; expected one of {', '.join(_DTYPES)}, BF16")
    dtype = _bfloat16(where, name) if kind == "BF16" else np.dtype(_DTYPES[kind])
    return np.frombuffer(bytearray(entry["data"]), dtype=dtype.newbyteorder("<")).reshape(entry["shape"])


def _bfloat16(where: str, name: str) -> np.dtype[Any]:
    try:
        from ml_dtypes import bfloat16
    except ImportError as cause:
        raise CheckpointError(
            f"{where}: {name!r} is bfloat16, which NumPy reads only with ml_dtypes: pip install ml_dtypes"
        ) from cause
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Not every system lets a folder be opened or synced; the rename stands all the same."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
