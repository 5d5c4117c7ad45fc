"""File systems that fail.

The file system fails below polyattn, at each byte that is written and at each call that opens, syncs, renames or
closes a file: the disk is full, a quota is exceeded, an input or output error, read-only, an interrupt; once, or from
then on. What was there is whole, the error names the file and the reason, no temporary file is left, and a retry works.
"""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from failing_disk import Disk, PowerLoss

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_shards, write_tensors
from polyattn.cli._new_backend import _write, render
from polyattn.training import train
from polyattn.training._folder import Folder

CODES = {
    "full disk": errno.ENOSPC,
    "quota exceeded": errno.EDQUOT,
    "EIO": errno.EIO,
    "read-only": errno.EROFS,
    "an interrupt": None,
}
LOST = "the earlier content is whole, file and reason are named, nothing is left behind, the retry works"


class Writer(NamedTuple):
    """Something that writes into a folder: what is there before, the writing, and what is read."""

    before: object
    write: object
    read: object
    file: str
    appends: bool = False


OLD, NEW = ({"weight": np.full((2, 3), x), "bias": np.full(4, x, np.float32)} for x in (1.0, 2.0))
INDEX = "model.safetensors.index.json"
PLUGIN = render("mine", "numpy")


def weight(file):
    return lambda folder: float(read_tensors(folder / file)[0]["weight"].mean())


def save_layer(folder, value):
    layer = pa.Projection(2, 1)
    layer = layer.with_parameters({name: np.full_like(x, value) for name, x in layer.parameters().items()})
    layer.save(folder / "layer.safetensors")


def log(folder, *steps):
    Folder(folder).log([{"step": step, "loss": 0.5} for step in steps])


def logged(folder):
    return Folder(folder).losses()[0]


def draw(folder, value):
    from matplotlib.figure import Figure

    from polyattn.plot._file import write_png

    figure = Figure(figsize=(0.2, 0.2))
    figure.subplots().plot([0, value])
    write_png(figure, folder / "x.png")


def skeleton(folder):
    found = folder / "plugin"
    return {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} if found.exists() else set()


WRITERS = {
    "a checkpoint": Writer(
        lambda folder: write_tensors(folder / "x.safetensors", OLD),
        lambda folder: write_tensors(folder / "x.safetensors", NEW),
        weight("x.safetensors"), "x.safetensors",
    ),
    "a model in several files": Writer(
        lambda folder: write_shards(folder / INDEX, OLD, shard_size=20),
        lambda folder: write_shards(folder / INDEX, NEW, shard_size=20),
        weight(INDEX), "model",
    ),
    "a layer": Writer(
        lambda folder: save_layer(folder, 1.0), lambda folder: save_layer(folder, 2.0),
        weight("layer.safetensors"), "layer.safetensors",
    ),
    "metrics": Writer(
        lambda folder: log(folder, 1), lambda folder: log(folder, 2, 3), logged, "metrics.jsonl",
        appends=True,
    ),
    "metrics that are shortened": Writer(
        lambda folder: log(folder, 1, 2, 3), lambda folder: Folder(folder).clean(1), logged, "metrics.jsonl",
    ),
    "a picture": Writer(
        lambda folder: draw(folder, 1), lambda folder: draw(folder, 2),
        lambda folder: (folder / "x.png").read_bytes(), "x.png",
    ),
    "a new backend": Writer(
        lambda folder: None, lambda folder: _write(folder / "plugin", PLUGIN), skeleton, "plugin",
    ),
}  # fmt: skip
CODES = {
    "full disk": errno.ENOSPC,
    "quota exceeded": errno.EDQUOT,
    "EIO": errno.EIO,
    "read-only": errno.EROFS,
    "interrupt": None,
}


@pytest.fixture
def folders(tmp_path):
    """Return ``folders(files)``, which returns a new folder with files."""
    numbers = itertools.count()

    def make(files):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder

    return make


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def expect_survived(writer, folder, failing, code, old, new):
    """Let a writer fail: what was there is whole, the error tells why, nothing is left, the retry works.

    Return whether it failed. A ``code`` of None is an interrupt.
    """
    files, told = files_of(folder), None
    with failing:
        try:
            writer.write(folder)
        except (pa.PolyattnError, KeyboardInterrupt) as error:
            told = error
    left = writer.read(folder)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert left == new[: len(left)] if writer.appends else left in (old, new)
    if told is None:
        assert left == new
    elif code is not None:
        assert str(told).startswith(f"{folder / writer.file}"), told
        assert os.strerror(code) in str(told)
        unsynced = "cannot be synced" in str(told)
        assert writer.appends or (unsynced and left == new) or files_of(folder) == files, told
    with Disk(folder):  # without syncs
        if writer.appends:
            Folder(folder).clean(old[-1])  # as a resumed run does
        if left != new or writer.file != "plugin":  # a folder is written once
            writer.write(folder)
    assert writer.read(folder) == new
    shutil.rmtree(folder)
    return told is not None


class Case(NamedTuple):
    """Something that writes, the files before, what is read before and after, the events, the largest file's bytes."""

    name: str
    writer: Writer
    files: dict
    old: object
    new: object
    events: int
    largest: int


@pytest.fixture(params=WRITERS)
def case(request, folders):
    """Each thing that writes."""
    writer = WRITERS[request.param]
    if writer.file.endswith(".png"):
        pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    start, end = folders({}), folders({})
    for folder in (start, end):
        writer.before(folder)
    with Disk(end) as disk:
        writer.write(end)
    largest = max(path.stat().st_size for path in end.rglob("*") if path.is_file())
    return Case(request.param, writer, files_of(start), writer.read(start), writer.read(end), disk.count, largest)


def places(count, case, amount, rng, short):
    """Return every number below ``count`` for small files in the long form, and random ones for others."""
    most = count if count < 3000 else 30
    chosen = (1, 10) if case.name == "a picture" else (min(short, most), most)  # a picture is drawn anew each time
    return map(int, rng.choice(count, amount(*chosen), replace=False))


def test_a_write_that_fails(case, folders, amount, rng, tried):
    failed = 0
    for at, code, lasting in itertools.product(
        places(case.events, case, amount, rng, 4), CODES.values(), (False, True)
    ):
        folder = folders(case.files)
        disk = Disk(folder, at, code, lasting)
        assert expect_survived(case.writer, folder, disk, code, case.old, case.new)
        failed += 1
    tried(f"{case.name}: a failing byte, open, sync, rename or close", failed, LOST)


@contextlib.contextmanager
def limited(folder, size):
    """Let the system refuse files larger than ``size``."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Disk(folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(os.name != "posix", reason="the limit of the size of a file is POSIX's")
def test_a_file_that_the_system_limits(case, folders, amount, rng, tried):
    failed = 0
    for size in places(case.largest, case, amount, rng, 6):
        folder = folders(case.files)
        assert expect_survived(case.writer, folder, limited(folder, size), errno.EFBIG, case.old, case.new)
        failed += 1
    tried(f"{case.name}: a real limit of the size of files (RLIMIT_FSIZE)", failed, LOST)


@pytest.mark.parametrize("case", [name for name in WRITERS if name != "a new backend"], indirect=True)
def test_a_loss_of_power(case, folders, tried):
    """A rename that was not synced is lost or not; bytes that were not synced are lost."""
    folder = folders(case.files)
    with PowerLoss(folder) as disk:
        case.writer.write(folder)
        disk.spend()
    *before, after = [case.writer.read(folders(files)) for files in disk.left]
    assert after == case.new
    for found in before:
        assert found == case.new[: len(found)] if case.writer.appends else found in (case.old, case.new)
    tried(f"{case.name}: a loss of power before each event", len(disk.left), "the earlier or the new content is whole")


# A whole training.

SETTINGS = {"steps": 6, "batch": 4, "sequence": 4, "width": 4, "seed": 3}


@pytest.fixture
def training(monkeypatch, folders):
    """Return ``train(folder)``, which starts or resumes a run without pictures, and the folder of a whole run."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    def start(folder):
        train(SETTINGS, output=str(folder), checkpoint_every=2, resume=(folder / "checkpoint.safetensors").exists())

    return start, folders({})


def expect_same_run(folder, whole):
    """Compare the files of two runs."""
    names = {"checkpoint.safetensors", "metrics.jsonl"}
    assert set(os.listdir(folder)) == names
    (a, about), (b, wanted) = (read_tensors(place / "checkpoint.safetensors") for place in (folder, whole))
    assert about == wanted
    assert {name: x.tobytes() for name, x in a.items()} == {name: x.tobytes() for name, x in b.items()}
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder)


def test_a_training_whose_disk_fails(training, folders, amount, rng, tried):
    start, whole = training
    with Disk(whole) as disk:
        start(whole)
    count = amount(8, 400)
    for _ in range(count):
        folder, code = folders({}), CODES[str(rng.choice(list(CODES)))]
        with (
            Disk(folder, int(rng.integers(disk.count)), code, bool(rng.integers(2))),
            pytest.raises(pa.PolyattnError if code else KeyboardInterrupt) as raised,
        ):
            start(folder)
        if code:
            assert str(folder) in str(raised.value)
            assert os.strerror(code) in str(raised.value)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
        with Disk(folder):
            start(folder)
        expect_same_run(folder, whole)
    tried("a training whose disk fails at a random byte or call", count,
          "told with file and reason; resumed, it is bit for bit the run without a fault")  # fmt: skip


def test_a_training_that_loses_power(training, folders, amount, rng, tried):
    start, whole = training
    with PowerLoss(whole) as disk:
        start(whole)
    states = [disk.left[i] for i in rng.permutation(len(disk.left))[: amount(8, len(disk.left))]]
    for files in states:
        folder = folders(files)
        with Disk(folder):
            start(folder)
        expect_same_run(folder, whole)
    tried("a training that loses power", len(states), "resumed: bit for bit the run that was not interrupted")


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="/proc/self/mem, which cannot be read, is Linux's")
def test_a_file_that_cannot_be_read(tmp_path, tried):
    """A real EIO, of the first page of the memory of a process."""
    for name, read in {
        "x.safetensors": read_tensors,
        INDEX: read_tensors,
        "checkpoint.safetensors": lambda path: Folder(path.parent).load(),
        "metrics.jsonl": lambda path: Folder(path.parent).losses(),
    }.items():
        (tmp_path / name).symlink_to("/proc/self/mem")
        with pytest.raises(pa.CheckpointError, match=rf"{name}: cannot be read: Input/output error"):
            read(tmp_path / name)
    tried("reading a file whose bytes are lost (EIO)", 4, "the error names file and reason")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_an_output_that_is_full(tried):
    commands = [["--version"], ["explain", "--q", "1,2,8,4"]]
    for arguments in commands:
        with open("/dev/full", "wb") as full:
            done = subprocess.run([sys.executable, "-m", "polyattn", *arguments], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert done.stderr.decode() == "polyattn: error: the output cannot be written: No space left on device\n"
    tried("printing to a full disk", len(commands), "exit code 1, and the reason on standard error")
