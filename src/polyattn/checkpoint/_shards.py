"""A model in several files, with an index of the file of each tensor."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import Array
from ..errors import ArgumentError, CheckpointError
from ._format import DIGEST, digest
from ._read import shards_of
from ._write import packed, write_bytes, write_tensors

__all__ = ["write_shards"]

INDEX = ".safetensors.index.json"
Tensors = dict[str, np.ndarray[Any, Any]]


def write_shards(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    shard_size: int = 5_000_000_000,
) -> list[Path]:
    """Write named arrays to several safetensors files and an index, atomically.

    The names of the files contain a part of the content's digest, so that files of an earlier version remain until
    the new index is written. Then the files that only the earlier index names are deleted. A process that is killed may
    leave files that no index names; they can be deleted.

    Parameters
    ----------
    path : path
        The index, ``NAME.safetensors.index.json``. Hugging Face's libraries load ``model.safetensors.index.json``.
    tensors : dict
        Arrays of any library, device and layout, by name.
    metadata : dict, optional
        Strings by name.
    shard_size : int
        The maximal number of bytes of tensors in a file. A larger tensor is in a file of its own.

    Returns
    -------
    list of Path
        The files of tensors, in the folder of the index.

    Raises
    ------
    CheckpointError, BackendMismatchError
        As :func:`write_tensors`; an existing index and its files are unchanged.
    ArgumentError
        If the path is not a name of an index, or the size is not a positive integer.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from polyattn.checkpoint import read_tensors, write_shards
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index = f"{folder}/model.safetensors.index.json"
    ...     files = write_shards(index, {"a": np.ones(4), "b": np.zeros(4)}, shard_size=32)
    ...     tensors, _ = read_tensors(index)
    >>> len(files), tensors
    (2, {'a': array([1., 1., 1., 1.]), 'b': array([0., 0., 0., 0.])})
    """
    index = Path(path)
    if not index.name.endswith(INDEX) or index.name == INDEX:
        raise ArgumentError(f"path: expected NAME{INDEX}, got {index.name!r}")
    if type(shard_size) is not int or shard_size < 1:
        raise ArgumentError(f"shard_size: expected a number of bytes, at least 1, got {shard_size!r}")
    arrays = packed(tensors)
    metadata = {name: value for name, value in (metadata or {}).items() if name != DIGEST}
    groups = _grouped(arrays, shard_size)
    stem = index.name.removesuffix(INDEX)
    stem = f"{stem}-{_token(arrays, groups, metadata, index)}"
    files = {f"{stem}-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, start=1)}
    earlier = _ours(index)
    try:
        for name, group in files.items():
            write_tensors(index.with_name(name), group, metadata)
        total = sum(x.nbytes for x in arrays.values())
        weight_map = {name: file for file, group in files.items() for name in group}
        content = {"metadata": {**metadata, "total_size": total}, "weight_map": weight_map}
        write_bytes(index, json.dumps(content, indent=2).encode())
    except BaseException:
        _delete(index, files.keys() - earlier - _ours(index))  # the index may have been replaced already
        raise
    _delete(index, earlier - files.keys())
    return [index.with_name(name) for name in files]


def _grouped(arrays: Tensors, size: int) -> list[Tensors]:
    """Divide the arrays into groups of at most ``size`` bytes, in order."""
    groups: list[Tensors] = [{}]
    room = size
    for name, x in arrays.items():
        if groups[-1] and x.nbytes > room:
            groups.append({})
            room = size
        groups[-1][name] = x
        room -= x.nbytes
    return groups


def _token(arrays: Tensors, groups: list[Tensors], metadata: Mapping[str, str], index: Path) -> str:
    """Return a token that depends on the content and on its division into files."""
    try:
        return digest(arrays, {**metadata, "": repr([list(group) for group in groups])})[:8]
    except (TypeError, ValueError) as cause:  # metadata or names that are no strings
        raise CheckpointError(f"{index}: cannot be stored as safetensors: {cause}") from cause


def _ours(index: Path) -> set[str]:
    """Return the files that an existing index names, if their names are of the form that this module writes."""
    try:
        named = set(shards_of(index)[0].values())
    except CheckpointError:  # none is there, or it is damaged
        return set()
    stem = re.escape(index.name.removesuffix(INDEX))
    return {name for name in named if re.fullmatch(rf"{stem}-[0-9a-f]{{8}}-\d{{5}}-of-\d{{5}}\.safetensors", name)}


def _delete(index: Path, names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            index.with_name(name).unlink()
