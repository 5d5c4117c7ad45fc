"""Whatever a file contains, reading it gives what was written or a CheckpointError, runs no code and needs no more
memory than the file is long; and what is a good header is what the safetensors library takes for one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from polyattn import CheckpointError
from polyattn.checkpoint import read_tensors, write_tensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([True, False, True]),
    "c": np.zeros((0, 2), dtype=np.int16),
}
METADATA = {"step": "7"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, METADATA)
    return path


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def attempts(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]] | None]:
    """Read in every way; None for a CheckpointError, and no other exception is raised."""
    for mapped in (False, True):
        try:
            yield read_tensors(path, mapped=mapped)
        except CheckpointError:
            yield None


def same(tensors: dict[str, Any]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(
        x.dtype == TENSORS[name].dtype and np.array_equal(x, TENSORS[name]) for name, x in tensors.items()
    )


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for keep in range(len(data)):
        path.write_bytes(data[:keep])
        assert list(attempts(path)) == [None, None], keep


def test_a_file_with_more_behind_it_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for more in (b"\0", b"\0" * 8, data):
        path.write_bytes(data + more)
        assert list(attempts(path)) == [None, None]


def test_every_changed_byte_is_noticed(path: Path) -> None:
    """Reading a whole file gives what was written or an error; only the name of the digest may be changed."""
    data = path.read_bytes()
    spared = range(data.index(b"polyattn.digest"), data.index(b"polyattn.digest") + len("polyattn.digest"))
    for position in range(len(data)):
        for flip in (1, 0x06, 0x0F, 0x20, 0x80):  # 0x0F makes an I of an F: the same bytes, other numbers
            changed = bytearray(data)
            changed[position] ^= flip
            path.write_bytes(changed)
            copied, _ = attempts(path)
            if copied is not None:
                assert same(copied[0]), (position, flip)
                assert position in spared or (copied[1] == METADATA and position >= 8), (position, flip)


@pytest.mark.parametrize("change", ["replace", "insert", "delete"])
def test_random_damage(path: Path, change: str) -> None:
    data, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(400):
        start = int(rng.integers(0, header_end(data) + 4))
        stop = start if change == "insert" else start + int(rng.integers(1, 9))
        middle = b"" if change == "delete" else rng.integers(0, 256, rng.integers(1, 9), dtype=np.uint8).tobytes()
        path.write_bytes(data[:start] + middle + data[stop:])
        copied, _ = attempts(path)
        assert copied is None or same(copied[0])


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HALF = {**X, "shape": [1], "data_offsets": [0, 4]}
DEEP = "[" * 100_000
BAD_HEADERS = {
    "nothing": "",
    "no object": "[]",
    "no JSON": "{'x': 1}",
    "a tensor that is none": {"x": 1},
    "an empty tensor": {"x": {}},
    "no dtype": {"x": {**X, "dtype": None}},
    "a dtype that is none": {"x": {**X, "dtype": ["F32"]}},
    "an unknown dtype": {"x": {**X, "dtype": "F33"}},
    "a dtype by another name": {"x": {**X, "dtype": "float32"}},
    "no shape": {"x": {**X, "shape": None}},
    "a shape that is a text": {"x": {**X, "shape": "2"}},
    "a shape that is an empty text": {"x": {**X, "dtype": "F64", "shape": ""}},
    "a shape that is an empty object": {"x": {**X, "dtype": "F64", "shape": {}}},
    "a negative axis": {"x": {**X, "shape": [-2]}},
    "two negative axes": {"x": {**X, "shape": [-2, -1]}},
    "a broken axis": {"x": {**X, "shape": [2.0]}},
    "a boolean axis": {"x": {**X, "shape": [2, True]}},
    "another shape": {"x": {**X, "shape": [3]}},
    "a shape that overflows": {"x": {**X, "shape": [2**32, 2**32, 2]}},
    "a shape that overflows with nothing in it": {"x": {**X, "shape": [0, 2**70], "data_offsets": [0, 0]}, "y": X},
    "one offset": {"x": {**X, "data_offsets": [0]}},
    "three offsets": {"x": {**X, "data_offsets": [0, 8, 8]}},
    "offsets backwards": {"x": {**X, "data_offsets": [8, 0]}},
    "a negative offset": {"x": {**X, "data_offsets": [-8, 0]}},
    "offsets beyond the file": {"x": {**X, "data_offsets": [2**62, 2**62 + 8]}},
    "offsets of 5000 digits": '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8' + "0" * 5000 + "]}}",
    "offsets that are no numbers": {"x": {**X, "data_offsets": ["0", "8"]}},
    "a hole before": {"x": {**X, "shape": [1], "data_offsets": [4, 8]}},
    "a hole behind": {"x": HALF},
    "one over the other": {"x": X, "y": X},
    "one half over the other": {"x": HALF, "y": X},
    "one name twice": json.dumps({"x": X})[:-1] + f', "x": {json.dumps(X)}}}',
    "metadata that are none": {"__metadata__": ["a"], "x": X},
    "metadata that are no strings": {"__metadata__": {"a": 1}, "x": X},
    "metadata within metadata": {"__metadata__": {"a": {"b": "c"}}, "x": X},
    "half a surrogate pair": {"\ud800": X},
    "half a pair in the metadata": {"__metadata__": {"a": "\ud800"}, "x": X},
    "very deep": DEEP,
    "very deep within": f'{{"x": {DEEP}',
    "many axes": {"x": {**X, "shape": [1] * 70 + [2]}},
    "UTF-16": json.dumps({"x": X}).encode("utf-16"),
    "Latin-1": '{"é": 1}'.encode("latin-1"),
}


# What the safetensors library lets pass, and NumPy could not hold or two readers would take for two things.
LENIENT = {"one name twice", "a shape that overflows with nothing in it", "many axes"}
GOOD_HEADERS = {
    "plain": {"x": X},
    "more spaces": json.dumps({"x": X}).replace(" ", "   ") + "     ",
    "another order": {"y": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}, "x": HALF},
    "more about it": {"x": {**X, "more": [1]}},
    "no axis": {"x": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}},
    "an empty one behind": {"x": X, "y": {**X, "shape": [0, 3], "data_offsets": [8, 8]}},
    "an empty one before": {"x": X, "y": {**X, "shape": [0], "data_offsets": [0, 0]}},
    "names": {"": HALF, "gewöhnlich ☃ 𝄞": {**HALF, "data_offsets": [4, 8]}},
    "no metadata in it": {"__metadata__": {}, "x": X},
}  # fmt: skip


def assemble(header: Any, data: bytes = b"\0" * 8) -> bytes:
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_headers_that_lie(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(assemble(BAD_HEADERS[header]))
    assert list(attempts(path)) == [None, None]
    if header not in LENIENT:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(path.read_bytes())


@pytest.mark.parametrize("header", GOOD_HEADERS)
def test_headers_that_are_unusual(tmp_path: Path, header: str) -> None:
    data = assemble(GOOD_HEADERS[header], bytes(range(8)))
    (tmp_path / "x.safetensors").write_bytes(data)
    expected = {name: (entry["shape"], bytes(entry["data"])) for name, entry in safetensors.deserialize(data)}
    for read in attempts(tmp_path / "x.safetensors"):
        assert read is not None
        assert {name: (list(x.shape), x.tobytes()) for name, x in read[0].items()} == expected


@pytest.mark.parametrize("length", [9, 10**8, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_not_waited_for(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    assert list(attempts(path)) == [None, None]


def test_a_boolean_that_is_neither_is_refused(tmp_path: Path) -> None:
    """NumPy computes with the byte, and ``~x`` of it is true as well."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(assemble({"x": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}}, b"\0\1\0\1\2\0\0\0"))
    assert list(attempts(path)) == [None, None]


def test_a_dtype_that_numpy_lacks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(assemble({"x": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: 'x' has the dtype F4; expected one of BOOL, .*BF16"):
        read_tensors(path)
