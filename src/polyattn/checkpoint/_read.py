"""Reading whole files or single tensors, into memory or as a memory map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from io import BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ..errors import ArgumentError, CheckpointError
from ._format import DIGEST, LARGEST, Entry, array_of, damaged, digest, json_object, read_header

__all__ = ["read_tensors", "shards_of"]

Tensors = dict[str, np.ndarray[Any, Any]]


def read_tensors(
    path: str | os.PathLike[str], names: Iterable[str] | None = None, *, mapped: bool = False
) -> tuple[Tensors, dict[str, str]]:
    """Return the arrays of a safetensors file, NumPy arrays by name, and its metadata.

    If all tensors of a file that polyattn wrote are read into memory, the digest is checked.

    Parameters
    ----------
    path : path
        The file; or the index of a model in several files, a ``.json`` such as ``model.safetensors.index.json``.
    names : sequence of str, optional
        The tensors to read; by default all. Only files that contain some of them are opened.
    mapped : bool
        True returns read-only arrays on a memory map of the file: data are read when they are used. Meanwhile the
        file may be replaced, as by :func:`write_tensors`, but not modified or truncated. False returns writable
        arrays in memory.

    Raises
    ------
    CheckpointError
        If a file is missing, cannot be read, is damaged, is not a safetensors file or lacks one of the names, or if
        an index names a file outside of its folder.
    ArgumentError
        If ``names`` is one string.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from polyattn.checkpoint import read_tensors, write_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/w.safetensors"
    ...     write_tensors(path, {"weight": np.eye(2), "bias": np.zeros(2)})
    ...     tensors, _ = read_tensors(path, ["bias"])
    >>> tensors
    {'bias': array([0., 0.])}
    """
    if isinstance(names, str):
        raise ArgumentError(f"names: expected a list of names, got the string {names!r}")
    wanted = None if names is None else list(dict.fromkeys(names))
    if os.fspath(path).endswith(".json"):
        return _read_index(Path(path), wanted, mapped)
    return _read_file(Path(path), wanted, mapped)


def shards_of(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the file name of each tensor, and the metadata, from an index."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, LARGEST) + 1)  # as much memory is taken as is asked for, whatever is there
    except OSError as cause:
        raise _unreadable(where, cause) from cause
    try:
        if size > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        index = json_object(data)
        shards, metadata = index.get("weight_map"), index.get("metadata", {})
        if not (isinstance(shards, dict) and isinstance(metadata, dict)):
            raise ValueError("it has no weight_map of files by tensor")
        for shard in set(map(_checked, shards.values())):
            # A symbolic link in the folder may point anywhere, as in caches of models; the index may not.
            if shard in ("", ".", "..") or {PurePosixPath(shard).name, PureWindowsPath(shard).name} != {shard}:
                raise ValueError(f"{shard!r} is not the name of a file beside it")
    except ValueError as cause:
        raise CheckpointError(
            f"{where}: not an index of safetensors files, or a damaged one ({cause}); "
            "use an undamaged copy, or write a new one"
        ) from cause
    return shards, {name: value for name, value in metadata.items() if isinstance(value, str)}


def _checked(shard: Any) -> str:
    if not isinstance(shard, str) or "\0" in shard:
        raise ValueError(f"{shard!r} is no name of a file")
    shard.encode()
    return shard


def _read_index(path: Path, wanted: list[str] | None, mapped: bool) -> tuple[Tensors, dict[str, str]]:
    shards, metadata = shards_of(path)
    chosen = _chosen(str(path), shards, wanted)
    members: dict[str, list[str]] = {}
    for name, shard in chosen.items():
        members.setdefault(shard, []).append(name)
    read: Tensors = {}
    for shard, names in members.items():
        try:
            read |= _read_file(path.with_name(shard), names, mapped)[0]
        except CheckpointError as error:
            raise CheckpointError(f"{path}, its file {error}") from error
    return {name: read[name] for name in chosen}, metadata


def _read_file(path: Path, wanted: list[str] | None, mapped: bool) -> tuple[Tensors, dict[str, str]]:
    where = str(path)
    try:
        with open(path, "rb") as file:
            entries, metadata = read_header(file, os.fstat(file.fileno()).st_size, where)
            chosen = _chosen(where, entries, wanted)
            if mapped:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                tensors = {
                    name: array_of(entry, whole, entry.start, f"{where}: {name!r}") for name, entry in chosen.items()
                }
            else:
                tensors = {name: _loaded(file, entry, where, name) for name, entry in chosen.items()}
    except OSError as cause:
        raise _unreadable(where, cause) from cause
    expected = metadata.pop(DIGEST, None)  # None in files of other libraries
    everything = not mapped and len(tensors) == len(entries)
    if everything and expected is not None and expected != digest(tensors, metadata):
        raise CheckpointError(
            f"{where}: damaged: its content is not what was written; use an undamaged copy, or write a new one"
        )
    return tensors, metadata


def _loaded(file: BufferedReader, entry: Entry, where: str, name: str) -> np.ndarray[Any, Any]:
    memory = np.empty(entry.stop - entry.start, dtype=np.uint8)
    file.seek(entry.start)
    if file.readinto(memory.data) != memory.size:
        raise damaged(where, "it was truncated while it was read")
    return array_of(entry, memory, 0, f"{where}: {name!r}")


def _chosen(where: str, there: Mapping[str, Any], wanted: list[str] | None) -> dict[str, Any]:
    if wanted is None:
        return dict(there)
    missing = [name for name in wanted if name not in there]
    if missing:
        known = ", ".join(map(repr, list(there)[:8])) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
        raise CheckpointError(f"{where}: has no {', '.join(map(repr, missing[:8]))}; it has {known or 'nothing'}")
    return {name: there[name] for name in wanted}


def _unreadable(where: str, cause: OSError) -> CheckpointError:
    return CheckpointError(f"{where}: cannot be read: {cause.strerror or cause}; check the path")
