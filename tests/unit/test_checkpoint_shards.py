"""A model in several files: read as a whole, in part and mapped, and written atomically."""

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn import ArgumentError, CheckpointError
from polyattn.checkpoint import read_tensors, write_shards, write_tensors

RNG = np.random.default_rng(0)
TENSORS = {
    "embed": RNG.standard_normal((6, 4)),
    "norm": RNG.standard_normal(4).astype(np.float32),
    "project": np.asfortranarray(RNG.standard_normal((4, 5))),
    "mask": RNG.standard_normal((3, 3)) > 0,
    "step": np.asarray(7, dtype=np.int64),
    "none": np.zeros((0, 4)),
}
SIZES = {"one file": 10**6, "some": 200, "a file each": 1}


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A model in six files."""
    path = tmp_path / "model.safetensors.index.json"
    write_shards(path, TENSORS, {"step": "7"}, shard_size=1)
    return path


def expect(tensors: dict[str, Any], expected: dict[str, Any] = TENSORS) -> None:
    assert list(tensors) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array, strict=True, err_msg=name)


def shard(index: Path, name: str) -> Path:
    """Return the file that holds a tensor."""
    return index.with_name(json.loads(index.read_text(encoding="utf-8"))["weight_map"][name])


def point(index: Path, name: str, file: Any) -> None:
    """Let the index name another file for a tensor."""
    content = json.loads(index.read_text(encoding="utf-8"))
    content["weight_map"][name] = file
    index.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_comes_back(tmp_path: Path, size: str, mapped: bool) -> None:
    path = tmp_path / "model.safetensors.index.json"
    files = write_shards(path, TENSORS, {"step": "7"}, shard_size=SIZES[size])
    assert len(files) == {"one file": 1, "some": 2, "a file each": 6}[size]
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, *(file.name for file in files)])
    for file in files:
        found, metadata = read_tensors(file)  # each is a file like any other
        assert sum(x.nbytes for x in found.values()) <= SIZES[size] or len(found) == 1
        assert metadata == {"step": "7"}
    tensors, metadata = read_tensors(path, mapped=mapped)
    expect(tensors)
    assert metadata == {"step": "7"}
    assert all(x.flags.writeable is not mapped for x in tensors.values())


def test_the_index_has_the_form_that_others_write(index: Path, tmp_path: Path) -> None:
    content = json.loads(index.read_text(encoding="utf-8"))
    assert content.keys() == {"metadata", "weight_map"}
    assert content["metadata"] == {"step": "7", "total_size": sum(x.nbytes for x in TENSORS.values())}
    for number, name in enumerate(TENSORS, start=1):
        write_tensors(tmp_path / f"other-{number:05}-of-00006.safetensors", {name: TENSORS[name]})
        content["weight_map"][name] = f"other-{number:05}-of-00006.safetensors"
    content["metadata"] = {"total_size": 1.0, "total_parameters": None}
    other = tmp_path / "other.safetensors.index.json"
    other.write_text(json.dumps(content), encoding="utf-8")
    tensors, metadata = read_tensors(other)
    expect(tensors)
    assert metadata == {}


@pytest.mark.parametrize("mapped", [False, True])
def test_single_tensors_open_their_own_files_only(index: Path, mapped: bool) -> None:
    for name in ("embed", "mask", "none"):
        shard(index, name).unlink()
    tensors, _ = read_tensors(index, ["step", "norm"], mapped=mapped)
    expect(tensors, {name: TENSORS[name] for name in ("step", "norm")})
    assert read_tensors(index, []) == ({}, {"step": "7"})
    with pytest.raises(CheckpointError, match=r"index\.json: has no 'bias', 'x'; it has 'embed', 'norm', 'project'"):
        read_tensors(index, ["norm", "bias", "x"])
    with pytest.raises(ArgumentError, match="names: expected a list of names, got the string 'norm'"):
        read_tensors(index, "norm")


def test_single_tensors_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": "7"})
    for mapped in (False, True):
        tensors, metadata = read_tensors(path, iter(["norm", "step", "norm"]), mapped=mapped)
        expect(tensors, {name: TENSORS[name] for name in ("norm", "step")})
        assert metadata == {"step": "7"}
    with pytest.raises(CheckpointError, match=r"x\.safetensors: has no 'bias'; it has "):
        read_tensors(path, ["bias"])


def test_mapped_arrays_are_the_file(tmp_path: Path) -> None:
    """Nothing is copied, arrays are read-only, and replacing the file does not change arrays that are mapped."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.zeros(64, dtype=np.uint8), "b": np.arange(5.0)})
    tensors, _ = read_tensors(path, mapped=True)
    whole = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(len(whole) - 64)  # the bytes stand behind the numbers, which need the alignment
        file.write(b"\7" * 64)
    np.testing.assert_array_equal(tensors["a"], np.full(64, 7))
    with pytest.raises(ValueError, match="read-only"):
        tensors["b"][0] = 1.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        tensors["b"].flags.writeable = True
    write_tensors(path, {"b": np.ones(5)})
    np.testing.assert_array_equal(tensors["b"], np.arange(5.0))
    np.testing.assert_array_equal(read_tensors(path)[0]["b"], np.ones(5))


def test_a_tensor_that_stands_at_an_odd_byte_is_read(tmp_path: Path) -> None:
    """Files of others need not be aligned."""
    values = np.arange(3.0)
    header = json.dumps({"x": {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]}}).encode()
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    for mapped in (False, True):
        tensors, _ = read_tensors(tmp_path / "x.safetensors", mapped=mapped)
        np.testing.assert_array_equal(tensors["x"] + 0, values)


@pytest.mark.parametrize("size", [200, 300], ids=["divided otherwise", "divided alike"])
def test_a_new_writing_replaces_the_last_one_whole(index: Path, size: int) -> None:
    foreign = index.with_name("model-00001-of-00001.safetensors")
    write_tensors(foreign, {"x": np.ones(1)})
    write_shards(index, TENSORS, shard_size=300)
    twice = {name: array * 2 for name, array in TENSORS.items() if name != "mask"}
    files = write_shards(index, twice, {"step": "8"}, shard_size=size)
    tensors, metadata = read_tensors(index)
    expect(tensors, twice)
    assert metadata == {"step": "8"}
    # The files of the last writing are gone, those of others are not.
    assert sorted(index.parent.iterdir()) == sorted([index, foreign, *files])
    assert write_shards(index, twice, {"step": "8"}, shard_size=size) == files
    assert sorted(index.parent.iterdir()) == sorted([index, foreign, *files])


@pytest.mark.parametrize("writing", range(3))
def test_a_full_disk_leaves_the_last_good_model(index: Path, writing: int, monkeypatch: Any) -> None:
    before, done, replace = set(os.listdir(index.parent)), iter(range(10)), os.replace

    def full(*names: Any) -> None:
        if next(done) == writing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*names)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        write_shards(index, {name: array[::-1] for name, array in TENSORS.items() if array.ndim}, shard_size=200)
    monkeypatch.undo()
    assert set(os.listdir(index.parent)) == before
    tensors, metadata = read_tensors(index)
    expect(tensors)
    assert metadata == {"step": "7"}


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.EIO, os.strerror(errno.EIO))], ids=repr)
def test_a_failure_after_the_new_index_is_there_keeps_its_files(
    index: Path, failure: BaseException, monkeypatch: Any
) -> None:
    """The folder is synced last, when the new index has replaced the old one already."""
    replace = os.replace

    def replaced(source: Any, target: Any) -> None:
        replace(source, target)
        if Path(target) == index:
            monkeypatch.setattr(os, "fsync", fail)

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        write_shards(index, {"embed": TENSORS["embed"] + 1})
    monkeypatch.undo()
    expect(read_tensors(index)[0], {"embed": TENSORS["embed"] + 1})


def test_an_index_takes_as_much_memory_as_it_is_long(index: Path) -> None:
    tracemalloc.start()
    try:
        read_tensors(index)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_arguments_that_cannot_be(tmp_path: Path) -> None:
    for name in ("model.safetensors", "index.json", ".safetensors.index.json"):
        with pytest.raises(ArgumentError, match=r"path: expected NAME\.safetensors\.index\.json, got "):
            write_shards(tmp_path / name, TENSORS)
    for size in (0, -1, 2.5, True):
        with pytest.raises(ArgumentError, match="shard_size: expected a number of bytes, at least 1, got "):
            write_shards(tmp_path / "x.safetensors.index.json", TENSORS, shard_size=size)
    for wrong in ({1: np.ones(2)}, {"__metadata__": np.ones(2)}, {"x": np.zeros(2, complex)}, {"\ud800": np.ones(2)}):
        with pytest.raises(CheckpointError, match="cannot be stored as safetensors"):
            write_shards(tmp_path / "x.safetensors.index.json", wrong)
    for metadata in ({"a": 1}, {1: "a"}, {"a": b"b"}):
        with pytest.raises(CheckpointError, match="cannot be stored as safetensors"):
            write_shards(tmp_path / "x.safetensors.index.json", TENSORS, metadata)
    assert os.listdir(tmp_path) == []


def test_nothing_is_a_model_too(tmp_path: Path) -> None:
    (file,) = write_shards(tmp_path / "x.safetensors.index.json", {})
    assert read_tensors(file) == read_tensors(tmp_path / "x.safetensors.index.json") == ({}, {})


OUTSIDE = ["../secret.safetensors", "/etc/passwd", "folder/x.safetensors", "..", ".", "", "..\\secret.safetensors",
           "C:secret.safetensors", "\\\\host\\share\\x", "a\0b", "\ud800", 7, None, ["x"]]  # fmt: skip


@pytest.mark.parametrize("file", OUTSIDE, ids=repr)
def test_an_index_that_leads_elsewhere_is_refused(index: Path, file: Any) -> None:
    write_tensors(index.parent.parent / "secret.safetensors", {"norm": TENSORS["norm"]})
    point(index, "norm", file)
    for names in (None, ["norm"], ["embed"]):  # a part of it is no more to be believed than the whole
        with pytest.raises(CheckpointError, match=r"index\.json: not an index of safetensors files"):
            read_tensors(index, names)


def test_links_in_the_folder_are_followed(index: Path) -> None:
    """The caches of models are made of them."""
    target = shard(index, "norm")
    (index.parent / "blobs").mkdir()
    target.rename(index.parent / "blobs" / "1")
    try:
        target.symlink_to(Path("blobs") / "1")
    except OSError:
        pytest.skip("this system makes no links")
    expect(read_tensors(index)[0])


def test_a_file_that_the_index_promises_and_is_not_there(index: Path) -> None:
    lost = shard(index, "norm")
    lost.unlink()
    for mapped in (False, True):
        with pytest.raises(CheckpointError, match=rf"index\.json, its file .*{lost.name}: cannot be read: No such"):
            read_tensors(index, mapped=mapped)


def test_a_file_that_lacks_what_the_index_promises(index: Path) -> None:
    point(index, "norm", shard(index, "embed").name)
    with pytest.raises(CheckpointError, match=r"index\.json, its file .*safetensors: has no 'norm'; it has 'embed'"):
        read_tensors(index)


def test_a_damaged_file_of_several_is_named(index: Path) -> None:
    path = shard(index, "project")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"index\.json, its file .*{path.name}: damaged"):
        read_tensors(index)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"{path.name}: not a safetensors file, or a damaged one"):
        read_tensors(index, mapped=True)


@pytest.mark.parametrize("content", [
    b"", b"[]", b"null", b"{}", b'{"weight_map": []}', b'{"weight_map": {}, "metadata": []}', b"\xff\xfe{}",
    b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', b"[" * 100_000, b'{"weight_map": {"a": {}}}',
])  # fmt: skip
def test_what_is_no_index(index: Path, content: bytes) -> None:
    index.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json: not an index of safetensors files, or a damaged one"):
        read_tensors(index)


def test_a_truncated_index_is_refused_and_can_be_written_anew(index: Path) -> None:
    whole = index.read_bytes()
    for keep in range(len(whole)):
        index.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError):
            read_tensors(index)
    write_shards(index, TENSORS)
    expect(read_tensors(index)[0])
    index.unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read: No such file"):
        read_tensors(index)
