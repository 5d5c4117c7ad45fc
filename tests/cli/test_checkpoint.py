"""Files of named arrays: reading gives what was written, and a failed write leaves the old file."""

import contextlib
import errno
import os
import pickle
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import polyattn as pa
from polyattn import CheckpointError
from polyattn.checkpoint import read_tensors, write_bytes, write_shards, write_tensors
from polyattn.testing.target import Target

RNG = np.random.default_rng(0)
SQUARE = RNG.standard_normal((4, 6))

ARRAYS = {
    "C order": SQUARE,
    "Fortran order": np.asfortranarray(SQUARE),
    "transposed": SQUARE.T,
    "reversed": SQUARE[::-1, ::-1],
    "every other": SQUARE[:, ::2],
    "broadcast": np.broadcast_to(SQUARE[0], (3, 6)),
    "big-endian": SQUARE.astype(">f8"),
    "0-d": np.asarray(3, dtype=np.int32),
    "empty": np.zeros((0, 3), dtype=np.float16),
    "boolean": SQUARE > 0,
    **{dtype: SQUARE.astype(dtype) for dtype in ("float16", "float32", "int8", "uint16", "int64", "complex64")},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a good checkpoint in it."""
    path = tmp_path / "checkpoint.safetensors"
    write_tensors(path, {"weight": SQUARE}, {"step": "7"})
    return path


def expect_unchanged(path: Path) -> None:
    tensors, metadata = read_tensors(path)
    np.testing.assert_array_equal(tensors["weight"], SQUARE, strict=True)
    assert metadata == {"step": "7"}
    assert os.listdir(path.parent) == [path.name]


def test_arrays_of_every_layout_and_dtype_come_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", ARRAYS, {"name": "köpfe"})
    tensors, metadata = read_tensors(tmp_path / "x.safetensors")
    assert metadata == {"name": "köpfe"}
    assert tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(tensors[name], array, err_msg=name)
        assert tensors[name].dtype == array.dtype.newbyteorder("<")
        assert tensors[name].shape == array.shape
        assert tensors[name].flags.writeable


def test_arrays_of_the_library_come_back_in_every_dtype(tmp_path: Path, target: Target, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy reads bfloat16 with ml_dtypes")
    x = target.make(SQUARE, dtype)
    write_tensors(tmp_path / "x.safetensors", {"x": x, "transposed": x.T})
    tensors, _ = read_tensors(tmp_path / "x.safetensors")
    assert tensors["x"].dtype.name == dtype
    np.testing.assert_array_equal(tensors["x"].astype(np.float64), target.to_np(x).astype(np.float64))
    np.testing.assert_array_equal(tensors["transposed"].astype(np.float64), target.to_np(x).astype(np.float64).T)


def test_every_bfloat16_comes_back_to_the_library(tmp_path: Path, target: Target) -> None:
    """All 65,536 values, with all NaNs, bit by bit: from the library to a file and back."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy reads bfloat16 with ml_dtypes")
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    if "bfloat16" not in target.dtypes:
        pytest.skip(f"{target.name} has no bfloat16")
    x = pa.to_backend(bits.view(ml_dtypes.bfloat16), target.name, target.device)
    write_tensors(tmp_path / "x.safetensors", {"x": x, "transposed": x.T})
    write_shards(tmp_path / "x.safetensors.index.json", {"x": x, "transposed": x.T}, shard_size=1)
    for path in (tmp_path / "x.safetensors", tmp_path / "x.safetensors.index.json"):
        for mapped in (False, True):
            tensors, _ = read_tensors(path, mapped=mapped)
            for name, expected in (("x", bits), ("transposed", bits.T)):
                back = pa.to_backend(tensors[name], target.name, target.device)
                assert back.dtype == x.dtype
                host = np.ascontiguousarray(pa.to_backend(back, "numpy"))
                np.testing.assert_array_equal(host.view(np.uint16), expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_come_back(tmp_path: Path, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has float8 with ml_dtypes")
    x = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).reshape(16, 16)[:, ::-1]
    write_tensors(tmp_path / "x.safetensors", {"x": x})
    tensors, _ = read_tensors(tmp_path / "x.safetensors")
    assert tensors["x"].dtype == x.dtype
    np.testing.assert_array_equal(tensors["x"].view(np.uint8), np.ascontiguousarray(x).view(np.uint8))


def test_bfloat16_without_its_package_is_told(path: Path, monkeypatch: Any) -> None:
    """And other tensors can still be read."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has bfloat16 with ml_dtypes")
    write_tensors(path, {"x": np.zeros(2, ml_dtypes.bfloat16), "y": np.ones(2)})
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(CheckpointError, match=r"'x' is bfloat16, .* pip install ml_dtypes"):
        read_tensors(path)
    np.testing.assert_array_equal(read_tensors(path, ["y"])[0]["y"], np.ones(2))


def test_a_layer_loads_from_several_files(tmp_path: Path, backend: str) -> None:
    layer, other = (pa.MultiHeadAttention(16, 2, seed=seed, backend=backend) for seed in (0, 1))
    index = tmp_path / "model.safetensors.index.json"
    write_shards(index, layer.parameters(), shard_size=1100)
    other.load(index)
    for name, x in layer.parameters().items():
        np.testing.assert_array_equal(pa.to_backend(other.parameters()[name], "numpy"), pa.to_backend(x, "numpy"))
    with pytest.raises(CheckpointError, match=r"index\.json: parameters do not fit Projection: missing weight"):
        pa.Projection(16, 16).load(index)


def test_nothing_is_a_checkpoint_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {})
    assert read_tensors(tmp_path / "x.safetensors") == ({}, {})


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 40, -1, -8])
def test_a_truncated_file_is_refused_by_name(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{path.name}: not a safetensors file, or a damaged one"):
        read_tensors(path)


@pytest.mark.parametrize("before", [b"", b'7"', b"weight"], ids=["elements", "metadata", "a name"])
def test_a_changed_bit_is_not_taken_for_good(path: Path, before: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(before) - (not before)] ^= 1  # the last byte, or the first of these
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{path.name}: damaged: its content is not what was written"):
        read_tensors(path)


def test_files_go_to_and_come_from_plain_safetensors(path: Path) -> None:
    write_tensors(path, ARRAYS)
    plain = safetensors.numpy.load_file(path)
    assert plain.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():  # safetensors itself writes those that are not in C order as something else
        np.testing.assert_array_equal(plain[name], array, err_msg=name)
    safetensors.numpy.save_file({"weight": SQUARE * 2}, path, metadata={"step": "8"})
    tensors, metadata = read_tensors(path)
    np.testing.assert_array_equal(tensors["weight"], SQUARE * 2)
    assert metadata == {"step": "8"}


def test_metadata_that_another_reader_got_may_be_written_again(path: Path) -> None:
    """The metadata contain the digest of the earlier content."""
    with safetensors.safe_open(path, framework="np") as file:
        write_tensors(path, {"weight": SQUARE * 2}, file.metadata())
    tensors, metadata = read_tensors(path)
    np.testing.assert_array_equal(tensors["weight"], SQUARE * 2)
    assert metadata == {"step": "7"}


def test_a_foreign_file_is_refused_and_never_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "executed"),))

    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap()))
    np.savez(tmp_path / "arrays.npz", x=SQUARE)
    (tmp_path / "text").write_text("weight: 1.0\n" * 100, encoding="utf-8")
    for name in ("pickle", "arrays.npz", "text"):
        with pytest.raises(CheckpointError, match=name):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_what_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing\.safetensors: cannot be read: No such file"):
        read_tensors(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("value", [np.zeros(2, complex), np.array([object()]), np.array(["a"])], ids=["c16", "O", "U"])
def test_a_dtype_that_the_format_lacks_is_refused(path: Path, value: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="cannot be stored as safetensors"):
        write_tensors(path, {"x": value})
    expect_unchanged(path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_last_good_file(path: Path, call: str, code: int, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match=rf"{path.name}: cannot be written: {os.strerror(code)}") as raised:
        write_tensors(path, {"weight": SQUARE * 2})
    monkeypatch.undo()
    assert isinstance(raised.value.__cause__, OSError)
    expect_unchanged(path)


@pytest.mark.parametrize(("code", "told"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)])
def test_a_folder_that_cannot_be_synced(path: Path, code: int, told: bool, monkeypatch: Any) -> None:
    """Some systems sync no folders, which is no failure; where they do, the new file may not be durable."""
    fsync = os.fsync

    def fail(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    expected = pytest.raises(
        CheckpointError, match=rf"{path.name}: written, but its folder cannot be synced: Input/outp"
    )
    with expected if told else contextlib.nullcontext():
        write_tensors(path, {"weight": SQUARE * 2})
    np.testing.assert_array_equal(read_tensors(path)[0]["weight"], SQUARE * 2)


def test_an_interrupt_leaves_the_last_good_file(path: Path, monkeypatch: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(path, {"weight": SQUARE * 2})
    monkeypatch.undo()
    expect_unchanged(path)


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        write_tensors(tmp_path / "missing" / "x.safetensors", {})
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        write_tensors(path / "x.safetensors", {})
    with pytest.raises(CheckpointError, match="not a regular file"):
        write_tensors(tmp_path, {})
    expect_unchanged(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="a superuser writes into read-only folders")
def test_a_read_only_folder_is_named(path: Path) -> None:
    path.parent.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="cannot be written: Permission denied"):
            write_tensors(path, {"weight": SQUARE * 2})
        expect_unchanged(path)
    finally:
        path.parent.chmod(0o755)


def test_a_link_stays_a_link(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(path)
    write_bytes(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_the_file_is_as_readable_as_others(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"")
    assert path.stat().st_mode == other.stat().st_mode


def test_a_killed_writer_leaves_a_whole_file(path: Path) -> None:
    program = Path(__file__).parents[1] / "programs" / "write_checkpoints.py"
    for delay in (0.0, 0.013, 0.029):
        before = path.read_bytes()
        writer = subprocess.Popen([sys.executable, program, path])
        deadline = time.monotonic() + 30
        while path.read_bytes() == before and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        tensors, metadata = read_tensors(path)
        np.testing.assert_array_equal(tensors["x"], np.full(50_000, float(metadata["step"])))
