"""Writing one file, atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from .. import registry
from ..backend import Array
from ..errors import CheckpointError
from ._format import DIGEST, digest

__all__ = ["LEFTOVERS", "packed", "write_bytes", "write_tensors"]

LEFTOVERS = ".polyattn-*.tmp"
"""Temporary files that a killed process may leave in the folder of the file; they can be deleted."""

WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM)
"""What systems answer that sync no folders."""


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named arrays to a safetensors file, atomically.

    Parameters
    ----------
    path : path
        The file. It is replaced only after the new content is completely written to the disk: if the process is
        killed, the disk is full or the folder is read-only, an existing file is unchanged.
    tensors : dict
        Arrays of any library, device and layout, by name.
    metadata : dict, optional
        Strings by name.

    Raises
    ------
    CheckpointError
        If the file cannot be written, or safetensors does not support a dtype or name; the message has path and
        cause.
    BackendMismatchError
        If a value is not an array.

    References
    ----------
    The safetensors format: https://huggingface.co/docs/safetensors

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from polyattn.checkpoint import read_tensors, write_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tensors(f"{folder}/w.safetensors", {"weight": np.eye(2)}, {"step": "7"})
    ...     tensors, metadata = read_tensors(f"{folder}/w.safetensors")
    >>> tensors["weight"].tolist(), metadata
    ([[1.0, 0.0], [0.0, 1.0]], {'step': '7'})
    """
    arrays = packed(tensors)
    metadata = {name: value for name, value in (metadata or {}).items() if name != DIGEST}
    try:
        if "__metadata__" in arrays:
            raise ValueError("the name '__metadata__' is the format's own")
        data = safetensors.numpy.save(arrays, metadata={**metadata, DIGEST: digest(arrays, metadata)})
    except (safetensors.SafetensorError, TypeError, ValueError) as cause:
        raise CheckpointError(f"{os.fspath(path)}: cannot be stored as safetensors: {cause}") from cause
    write_bytes(path, data)


def packed(tensors: Mapping[str, Array]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays on the host, little-endian and in C order.

    safetensors ignores strides and byte order: it writes the bytes in the order of memory.
    """
    hosts = {name: registry.owner(x, name).to_numpy(x) for name, x in tensors.items()}
    return {name: np.asarray(x, dtype=x.dtype.newbyteorder("<"), order="C") for name, x in hosts.items()}


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically: write a temporary file in the same folder, sync it, and rename it to ``path``.

    Raises
    ------
    CheckpointError
        If it cannot be written; an existing file is unchanged and the temporary file is deleted. Also if the folder
        cannot be synced; then the file is replaced, but a loss of power may undo that.
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
    except OSError as cause:
        raise CheckpointError(
            f"{os.fspath(path)}: cannot be written: {cause.strerror or cause}; what was there is unchanged"
        ) from cause
    try:
        _sync_folder(target.parent)
    except OSError as cause:
        raise CheckpointError(
            f"{os.fspath(path)}: written, but its folder cannot be synced: {cause.strerror or cause}; write it again, "
            "because a loss of power may bring back what was there before"
        ) from cause


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename is durable; not every system supports it, and then the rename is still valid."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder; elsewhere one may be writable and not readable
        return
    try:
        os.fsync(handle)
    except OSError as cause:
        if cause.errno not in WITHOUT_SYNC:
            raise
    finally:
        os.close(handle)
