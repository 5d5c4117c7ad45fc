"""``polyattn train --data``: the user's own samples, in epochs, and the errors for invalid files."""

import json
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.checkpoint import read_tensors
from polyattn.training._samples import DataError, Epochs, PointerCopy, load_npz

RNG = np.random.default_rng(5)
X = RNG.standard_normal((19, 5, 6)).astype(np.float32)
Y = np.broadcast_to(X[:, :1, :], X.shape)


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the pictures, which test_train.py checks: they take longer than these runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """19 samples whose target is the first row."""
    np.savez(tmp_path / "data.npz", X=X, Y=Y)
    return tmp_path / "data.npz"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    samples = Epochs(np.arange(19.0)[:, None, None], np.arange(19.0)[:, None, None], samples=4, seed=0)
    epochs = [[samples.batch(epoch * 5 + i) for i in range(5)] for epoch in range(3)]
    assert [len(x) for x, _ in epochs[0]] == [4, 4, 4, 4, 3]
    orders = [np.concatenate([x[:, 0, 0] for x, _ in epoch]) for epoch in epochs]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(19))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    np.testing.assert_array_equal(epochs[1][2][0], samples.batch(7)[0])


@pytest.mark.parametrize("stop", [5, 7], ids=["after an epoch", "amid an epoch"])
def test_field_case_19_a_resumed_run_goes_on_in_the_same_order(
    command: Any, process: Any, backend: str, data: Path, tmp_path: Path, stop: int
) -> None:
    arguments = ("--backend", backend, "--data", data, "--batch", 4, "--json")
    command("train", "--steps", 15, "--output", "whole", *arguments)
    command("train", "--steps", stop, "--output", "parts", *arguments)
    result = process("train", "--resume", "--steps", 15, "--output", "parts", "--backend", backend, "--json").result
    assert result["resumed_from"] == stop
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    whole, parts = (read_tensors(tmp_path / name / "checkpoint.safetensors")[0] for name in ("whole", "parts"))
    assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


def test_targets_that_are_rows_of_the_input_have_a_pointer_accuracy(command: Any, data: Path) -> None:
    result = command("train", "--data", data, "--steps", 300, "--json").result
    assert result["evaluated_on"] == "training samples"
    assert result["loss"] < result["baseline_loss"]
    assert result["pointer_accuracy"] > 0.3
    np.testing.assert_allclose(result["baseline_loss"], np.mean((Y - Y.mean((0, 1))) ** 2), rtol=1e-6)


def test_other_targets_have_none(command: Any, tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", X=X, Y=2 * X + 1, extra=np.arange(3))
    outcome = command("train", "--data", "data.npz", "--steps", 5, "--json")
    assert outcome.result["pointer_accuracy"] is None
    assert "targets are not input rows" in command("train", "--data", "data.npz", "--steps", 5).out


def test_an_odd_number_of_features_goes_to_one_head(command: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=X[:1, :, :5], Y=X[:1, :, :5])
    assert command("train", "--data", "data.npz", "--steps", 2, "--json").result["steps"] == 2
    assert "2 heads do not divide a width of 5" in command("train", "--data", "data.npz", "--heads", 2).refused(2)


def bad(index: tuple[int, ...], value: float) -> np.ndarray[Any, Any]:
    changed = X.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"X": X}, "missing Y; the file has X"),
        ({"Y": X}, "missing X"),
        ({"x": X, "y": X}, "missing X and Y; the file has x, y"),
        ({}, "missing X and Y; the file has nothing"),
        ({"X": X[0], "Y": X[0]}, "X: expected shape (samples, sequence, features), got (5, 6)"),
        ({"X": X, "Y": X[..., None]}, "Y: expected shape (samples, sequence, features), got (19, 5, 6, 1)"),
        ({"X": X, "Y": X[:18]}, "Y: expected the shape of X, (19, 5, 6), got (18, 5, 6)"),
        ({"X": X, "Y": X[..., :4]}, "Y: expected the shape of X, (19, 5, 6), got (19, 5, 4)"),
        ({"X": X[:0], "Y": X[:0]}, "at least one sample, position and feature, got shape (0, 5, 6)"),
        ({"X": X[:, :0], "Y": X[:, :0]}, "got shape (19, 0, 6)"),
        ({"X": X.astype(np.int64), "Y": X}, "X: expected floating numbers, got int64"),
        ({"X": X, "Y": X > 0}, "Y: expected floating numbers, got bool"),
        ({"X": X.astype(complex), "Y": X}, "X: expected floating numbers, got complex128"),
        ({"X": X.astype(str), "Y": X}, "X: expected floating numbers, got <U"),
        ({"X": bad((3, 0, 0), np.nan), "Y": X}, "X: expected finite numbers, got NaN or infinity in sample 3"),
        ({"X": X, "Y": bad((7, 1, 2), np.inf)}, "Y: expected finite numbers, got NaN or infinity in sample 7"),
        ({"X": X.astype(np.float64) * 1e300, "Y": X}, "X holds numbers too large for float32"),
        ({"X": np.array([None]), "Y": X}, "not a readable npz file of numbers"),
    ],
)
def test_samples_that_do_not_fit_are_told(command: Any, tmp_path: Path, arrays: dict[str, Any], told: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    assert told in command("train", "--data", "data.npz", "--output", "run").refused(1)
    assert not (tmp_path / "run").exists()


HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1, 1), }"
DAMAGED = {
    "no header": b"not an array",
    "an unfinished header": HEADER.replace("}", ""),
    "a list as a key": "{[]: 1}",
    "keys of several types": HEADER.replace("}", "1: 2}"),
    "deeply nested": "-" * 5000 + "1",
    "an axis of 30 digits": HEADER.replace("(1,", f"({'9' * 30},"),
    "an axis that is none": HEADER.replace("(1,", "('a',"),
    "no axis of a dtype": HEADER.replace("'<f8'", "()"),
    "terabytes": HEADER.replace("(1,", "(10_000_000_000_000,"),
    "an unknown version": HEADER.encode(),
    "more behind it": np.lib.format.magic(1, 0) + b"\x76\0" + HEADER.ljust(117).encode() + b"\n" + b"\0" * 16,
}


def archive(path: Path, members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> None:
    """Write an archive; its members may be anything."""
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path, "w", method) as file:
        for name, content in members:
            file.writestr(name, content)


def member(content: str | bytes) -> bytes:
    """Return a file of one number with a header."""
    if isinstance(content, bytes):
        return content
    header = content.encode() + b"\n"
    return np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little") + header + b"\0" * 8


@pytest.mark.parametrize("what", DAMAGED)
def test_arrays_that_are_damaged_are_told(tmp_path: Path, what: str) -> None:
    archive(tmp_path / "data.npz", [("X.npy", member(HEADER)), ("Y.npy", member(HEADER))])
    assert load_npz(str(tmp_path / "data.npz"))[0].shape == (1, 1, 1)
    archive(tmp_path / "data.npz", [("X.npy", member(DAMAGED[what])), ("Y.npy", member(HEADER))])
    with pytest.raises(DataError, match=r"data\.npz: not a readable npz file of numbers \("):
        load_npz(str(tmp_path / "data.npz"))


def test_archives_that_are_ambiguous_or_lie_are_told(tmp_path: Path) -> None:
    path, good = tmp_path / "data.npz", [("X.npy", member(HEADER)), ("Y.npy", member(HEADER))]
    for members, method, told in (
        ([*good, good[0]], zipfile.ZIP_STORED, "two of its arrays have one name"),
        ([*good, ("X", b"")], zipfile.ZIP_STORED, "two of its arrays have one name"),
        (good, zipfile.ZIP_LZMA, "X.npy is not stored as NumPy stores it"),
    ):
        archive(path, members, method)
        with pytest.raises(DataError, match=told):
            load_npz(str(path))
    archive(path, good)
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="encrypted"):
        load_npz(str(path))


def test_a_file_that_is_no_npz_is_told(command: Any, tmp_path: Path, data: Path) -> None:
    whole = data.read_bytes()
    np.save(tmp_path / "one.npy", X)
    for name, content in (("half", whole[: len(whole) // 2]), ("text", b"X,Y\n1,2\n"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    for name in ("half", "text", "empty", "one.npy"):
        assert f"{name}: not a readable npz file" in command("train", "--data", name).refused(1)
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 0xFF
    data.write_bytes(damaged)
    assert "data.npz: not a readable npz file" in command("train", "--data", data).refused(1)
    assert "there is no file missing.npz" in command("train", "--data", "missing.npz").refused(2)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("option", "value"), [("--width", 7), ("--sequence", 9)])
def test_sizes_that_are_not_the_files_are_told(command: Any, data: Path, option: str, value: int) -> None:
    assert f"{option}: {data} has a" in command("train", "--data", data, option, value).refused(2)


def test_a_run_goes_on_with_its_own_samples_only(command: Any, data: Path, tmp_path: Path) -> None:
    command("train", "--data", data, "--steps", 3, "--output", "run", "--json")
    data.rename(tmp_path / "moved.npz")
    assert "there is no file" in command("train", "--resume", "--output", "run").refused(2)
    moved = ("train", "--resume", "--data", "moved.npz", "--steps", 4, "--output", "run", "--json")
    assert command(*moved).result["resumed_from"] == 3
    np.savez(tmp_path / "moved.npz", X=X + 1, Y=Y)
    assert "other samples in --data" in command(*moved).refused(2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", 0), ("--batch", 0), ("--sequence", 0), ("--width", 0), ("--heads", 0), ("--heads", 3),
        ("--seed", -1),
        ("--learning-rate", -1), ("--learning-rate", "nan"), ("--weight-decay", "inf"), ("--dtype", "int8"),
        ("--checkpoint-every", 0), ("--device", "cpu"), ("--data", ""),
    ],
)  # fmt: skip
def test_options_out_of_range_are_told(command: Any, tmp_path: Path, option: str, value: object) -> None:
    assert f"{option}:" in command("train", option, value, "--output", "run").refused(2)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_name_is_not_the_current_folder(command: Any, tmp_path: Path) -> None:
    assert "--output: expected a path" in command("train", "--output", "").refused(2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 59.6 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 GB"),
        RuntimeError("CUDA out of memory. Tried to allocate 64 GiB.\nSee the documentation"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes."),
    ],
)
def test_too_little_memory_is_told(command: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(PointerCopy, "batch", fail)
    told = command("train", "--output", "run").refused(1)
    assert f"out of memory ({str(error).splitlines()[0]}); choose a smaller --batch" in told


def test_another_fault_of_a_library_is_not_hidden(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(PointerCopy, "batch", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        command("train", "--output", "run")


def test_samples_too_large_to_compute_with_are_not_blamed_on_the_rate(command: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", X=X * 1e30, Y=Y * 1e30)
    told = command("train", "--data", "data.npz", "--output", "run").refused(1)
    assert "the loss of step 1 is" in told
    assert told.endswith("try smaller numbers in --data, or a wider --dtype")


def test_a_device_that_there_is_not_is_told(command: Any, tmp_path: Path, backend: str) -> None:
    assert "abacus" in command("train", "--backend", backend, "--device", "abacus:0").refused(1)
    assert list(tmp_path.iterdir()) == []
