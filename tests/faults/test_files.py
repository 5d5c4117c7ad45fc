"""Files that are damaged or lie.

Each is a good file, changed at random: bits, bytes, lengths, fields of its header, of its index or of its archive.
Reading it gives what was written or one of polyattn's errors, needs no more memory than its size allows, opens no file
outside of its folder and executes nothing.
"""

import contextlib
import io
import json
import os
import pickle
import sys
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from changed_files import changed_bytes, changed_json, one_of

from polyattn import PolyattnError
from polyattn.checkpoint import read_tensors, write_shards, write_tensors
from polyattn.checkpoint._format import DIGEST
from polyattn.training._samples import load_npz

OUTCOME = "what was written or an error of polyattn; memory bounded, nothing else opened, nothing executed"
PARSER = 10_000_000  # bytes that Python's parser may take for the 10,000 characters that NumPy gives to it
EXECUTED = ("exec", "import", "os.", "pickle.", "subprocess.", "shutil.", "socket.", "ctypes.", "tempfile.")


class Watch(contextlib.AbstractContextManager):
    """Watches what is opened or executed, and the memory that is taken, while a file is read."""

    def __init__(self, folder):
        self.folder, self.on, self.seen = str(folder), False, []
        sys.addaudithook(self._hook)  # for the rest of the process

    def _hook(self, event, arguments):
        if not self.on:
            return
        if event == "open" and not str(arguments[0]).startswith(self.folder):
            self.seen.append((event, arguments[0]))
        elif event.startswith(EXECUTED):
            self.seen.append((event, arguments))

    def __enter__(self):
        tracemalloc.reset_peak()
        self.before, self.on = tracemalloc.get_traced_memory()[0], True
        return self

    def __exit__(self, *_):
        self.on = False
        self.taken = tracemalloc.get_traced_memory()[1] - self.before


@pytest.fixture
def read(tmp_path):
    """Return ``read(function, most)``: the result, None for an error of polyattn; it may take ``most`` bytes."""
    folder = tmp_path / "folder"
    folder.mkdir()
    watch = Watch(folder)

    def call(function, most):
        result, told = None, ""
        with watch:
            try:
                result = function()
            except PolyattnError as error:
                told = str(error)
        assert result is not None or str(folder) in told
        assert watch.taken < most, watch.taken
        assert not watch.seen, watch.seen
        return result

    call.folder = folder
    "é".encode("cp437")  # zipfile's, imported at its first use
    tracemalloc.start()
    yield call
    tracemalloc.stop()


def memory(data):
    """Return how many bytes may be taken to read a file: JSON becomes objects, each of them a hundred bytes.

    The interpreter's own table of names, which paths are in, takes megabytes whenever it grows.
    """
    return 4_000_000 + 40 * len(data)


def put(path, data):
    """Write a file in place: to create one, or to truncate it, takes some systems milliseconds."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


# Files of tensors.


def some_tensors(rng):
    """Return a few small tensors of random dtypes and shapes."""
    dtypes = ["float32", "float64", "int8", "uint16", "int64", "bool", "complex64", ml_dtypes.bfloat16, "float16"]
    shapes = [(), (0,), (3,), (2, 3), (1, 1, 4), (0, 5)]
    names = ["weight", "bias", "layer.0.weight", "é", "", "optim.step"]
    return {
        name: np.asarray(rng.integers(0, 100, one_of(rng, shapes))).astype(one_of(rng, dtypes))
        for name in names[: rng.integers(1, len(names) + 1)]
    }


def equal(a, b):
    """Say whether arrays are the same, bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same(found, expected):
    """Say whether arrays are those of the same names."""
    return found.keys() == expected.keys() and all(equal(found[name], x) for name, x in expected.items())


def same_as_library(found, data):
    """Say whether the library of the format reads the same."""
    expected = {name: (bytes(x["data"]), list(x["shape"])) for name, x in safetensors.deserialize(data)}
    return expected == {name: (x.tobytes(), list(x.shape)) for name, x in found.items()}


def split(data):
    """Return the header of a file of tensors and the bytes behind it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def changed_file(data, rng):
    """Return a file of tensors with changes of its bytes or of its header."""
    if rng.random() < 0.5:
        return changed_bytes(data, rng)
    header, behind = split(data)
    text = changed_json(header, rng)
    return len(text).to_bytes(8, "little") + text + behind


def test_files_of_tensors(read, amount, rng, tried):
    """With its digest a file is what was written; without it, it is what the library of the format reads."""
    count, accepted, path = amount(500, 100_000), 0, read.folder / "x.safetensors"
    for number in range(count):
        if number % 50 == 0:
            tensors = some_tensors(rng)
            write_tensors(path, tensors, {"step": "7"})
            good = path.read_bytes() if rng.integers(2) else safetensors.numpy.save(tensors, {"step": "7"})
        data = changed_file(good, rng)
        put(path, data)
        whole, mapped, one = (
            read(lambda how=how: read_tensors(path, **how), memory(data))
            for how in ({}, {"mapped": True}, {"names": ["weight"]})
        )
        if whole is not None:
            accepted += 1
            header, _ = split(data)
            if DIGEST in header.get("__metadata__", {}):
                assert same(whole[0], tensors)
            assert same_as_library(whole[0], data)
        if mapped is not None:
            assert same_as_library(mapped[0], data)
            assert one is None or equal(one[0]["weight"], mapped[0]["weight"])
    tried("files of tensors, read whole, mapped and in part", count, f"{accepted:,} were read: {OUTCOME}")


# Models in several files.


@pytest.fixture
def model(read):
    """A model in several files in a folder, beside which are files that nobody may open; and its tensors."""
    tensors = {f"layer.{i}.weight": np.arange(i + 3.0) for i in range(4)}
    write_tensors(read.folder.parent / "outside.safetensors", dict.fromkeys(tensors, np.zeros(3)))
    write_shards(read.folder / "x.safetensors.index.json", tensors, {"step": "7"}, shard_size=70)
    return tensors


def test_indices(read, model, amount, rng, tried):
    count, accepted, path = amount(500, 100_000), 0, read.folder / "x.safetensors.index.json"
    good = path.read_bytes()
    outside = ["../outside.safetensors", str(read.folder.parent / "outside.safetensors"), "/proc/self/mem", "/dev/zero"]
    files = sorted(set(json.loads(good)["weight_map"].values()))
    for _ in range(count):
        index, how = json.loads(good), rng.integers(3)
        if how == 0:
            index["weight_map"][one_of(rng, list(model))] = one_of(rng, outside, files)
        data = changed_bytes(good, rng) if how == 1 else changed_json(index, rng)
        put(path, data)
        mapped = bool(rng.integers(2))
        found = read(lambda mapped=mapped: read_tensors(path, mapped=mapped), memory(data))
        if found is not None:
            accepted += 1
            assert all(equal(x, model[name]) for name, x in found[0].items())
    tried("indices of a model in several files", count, f"{accepted:,} were read: {OUTCOME}")


def test_files_that_an_index_names(read, model, amount, rng, tried):
    count, accepted, path = amount(200, 20_000), 0, read.folder / "x.safetensors.index.json"
    files = sorted(path.with_name(name) for name in set(json.loads(path.read_bytes())["weight_map"].values()))
    for _ in range(count):
        file = one_of(rng, files)
        good = file.read_bytes()
        data = changed_file(good, rng)
        put(file, data)
        found = read(lambda: read_tensors(path), memory(data))
        put(file, good)
        if found is not None:
            accepted += 1
            if DIGEST in split(data)[0].get("__metadata__", {}):
                assert same(found[0], model)
    tried("files that an index names", count, f"{accepted:,} were read: {OUTCOME}")


# Archives of arrays.


class Trap:
    """A pickle of this makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


OLD = ("'<f8'", "(5, 2, 3)", "5", "2", "False", "{", "}", "'shape'", "'descr'", ",")
NEW = (
    "'|O'", "'<f4'", "'<f16'", "'V8'", "[('a', 'f8')]", "()", "(-1,)", "(5, -2, -3)", "(2, 5, 3)", "9" * 30, "9" * 5000,
    "10**9", "True", "None", "-" * 3000 + "1", "(" * 300, "{[]: 1}", "__import__('os')", "(100000, 100000, 1000)",
    "'''", "\n\n", "é", "\0", "1L", "lambda: 0", "'<f8', 'descr': '|O'",
)  # fmt: skip


def npy(array):
    """Return the file of an array."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def changed_npy(array, rng):
    """Return the file of an array with a change in its header, whose length is told right or not."""
    data = npy(array)
    end = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:end].decode().replace(one_of(rng, OLD), one_of(rng, NEW), 1).encode()
    version = one_of(rng, (1, 1, 1, 2, 3, 9))
    told = len(header) if rng.random() < 0.8 else int(rng.integers(2**16))
    length = told.to_bytes(2 if version == 1 else 4, "little")
    return data[:6] + bytes([version, 0]) + length + header + data[end:]


def changed_archive(arrays, trap, rng):
    """Return an archive that is valid and has other members, or members with other content."""
    members = {f"{name}.npy": npy(x) for name, x in arrays.items()}
    for _ in range(rng.integers(1, 3)):
        name, how = one_of(rng, list(members)), rng.integers(7)
        if how <= 2:
            members[name] = changed_npy(arrays["X"], rng)
        elif how == 3:
            members[name] = changed_bytes(members[name], rng)
        elif how == 4:
            members[name] = npy(np.array([trap, None], dtype=object))
        elif how == 5:
            members[one_of(rng, ("X", "../X.npy", "/tmp/Y.npy", "X.npy.npy"))] = members[name]
        else:
            members[name] = pickle.dumps(trap)
    stream = io.BytesIO()
    method = one_of(rng, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return stream.getvalue()


def as_numpy_reads(data):
    """Return what NumPy reads from an archive."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return archive["X"], archive["Y"]


def test_archives(read, amount, rng, tried):
    count, accepted, path = amount(500, 100_000), 0, read.folder / "x.npz"
    trap = Trap(str(read.folder / "executed"))
    arrays = {name: rng.standard_normal((5, 2, 3)) for name in "XY"}
    goods = []
    for save in (np.savez, np.savez_compressed):
        save(path, **arrays)
        goods.append(path.read_bytes())
    for _ in range(count):
        bytewise = rng.random() < 0.5
        data = changed_bytes(one_of(rng, goods), rng) if bytewise else changed_archive(arrays, trap, rng)
        put(path, data)
        found = read(lambda: load_npz(str(path)), memory(data) + PARSER)
        if found is not None:
            accepted += 1
            expected = (arrays["X"], arrays["Y"]) if bytewise else as_numpy_reads(data)
            assert all(map(equal, found, expected))
    assert not os.path.exists(trap.path)
    tried("archives of arrays (npz), some with pickles", count, f"{accepted:,} were read: {OUTCOME}")
