"""Reports of conversions between libraries and of weight files. docs/field.md has the links."""

import json

import numpy as np
import pytest
import safetensors.numpy

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_tensors


def test_array_api_compat_106_a_conversion_converts(backend, contract, make):
    """An array of the backend to NumPy is NumPy's, and back it is the backend's."""
    x = make(np.arange(10.0))
    host = pa.to_backend(x, "numpy")
    assert type(host) is np.ndarray
    np.testing.assert_array_equal(host, np.arange(10.0))
    assert contract.owns(pa.to_backend(host, backend, contract.device_of(x)))


def test_cupy_10172_flipped_and_transposed(dtypes, backend, contract, make, to_np):
    """Strides (−1, 4): the elements and their order survive the way there and back."""
    for dtype in ("uint8", "int32", *(name for name in dtypes if name != "bfloat16")):
        x = np.transpose(np.flip(np.arange(12).reshape(3, 4).astype(dtype), axis=1))
        there = pa.to_backend(x, backend, contract.device_of(make([0.0])))
        np.testing.assert_array_equal(to_np(there), x)
        back = pa.to_backend(there, "numpy")
        assert back.dtype == x.dtype
        np.testing.assert_array_equal(back, x)


def test_safetensors_401_a_name_twice(tmp_path):
    """Two entries of one name: the error says that, and not that an offset is wrong."""
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = '{"a":' + entry % (0, 4) + ',"a":' + entry % (4, 8) + "}"
    path = tmp_path / "twice.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(pa.CheckpointError, match=r"twice|'a'"):
        read_tensors(path)


def test_safetensors_601_metadata_alone(tmp_path):
    write_tensors(tmp_path / "empty.safetensors", {}, {"crc": "12"})
    tensors, metadata = read_tensors(tmp_path / "empty.safetensors")
    assert (tensors, metadata["crc"]) == ({}, "12")


def test_fastsafetensors_89_metadata_of_nothing(make, to_np, tmp_path):
    """A header with an empty ``__metadata__`` has tensors all the same."""
    header = {"__metadata__": {}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    data = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + np.array([1.5, -2.0], "<f4").tobytes())
    tensors, metadata = read_tensors(path)
    assert metadata == {}
    np.testing.assert_array_equal(to_np(make(tensors["w"], "float32")), [1.5, -2.0])


# What is written, from an array x of the library of shape (3, 4).
LAYOUTS = {
    "safetensors-221": lambda x: {"none": x[:0, :], "wide": x[:, :0], "x": x},
    "safetensors-442": lambda x: {"none": x[:0, :0]},
    "safetensors-469": lambda x: {"columns": x[:, 1:3], "steps": x[:, ::2], "x": x},
    "safetensors-232": lambda x: {"x": x, "first": x[:1, :], "again": x},
    "model2vec-341": lambda x: {"transposed": x.T},
}


@pytest.mark.parametrize("report", LAYOUTS)
def test_files_hold_what_the_arrays_say(report, make, tmp_path):
    """Empty, strided, shared and transposed arrays: shape, dtype and elements come back."""
    x = make(np.arange(12.0).reshape(3, 4), "float32")
    tensors = LAYOUTS[report](x)
    write_tensors(tmp_path / "w.safetensors", tensors)
    wanted = LAYOUTS[report](np.arange(12.0, dtype=np.float32).reshape(3, 4))
    for read in (
        read_tensors(tmp_path / "w.safetensors")[0],
        read_tensors(tmp_path / "w.safetensors", mapped=True)[0],
        safetensors.numpy.load_file(tmp_path / "w.safetensors"),
    ):
        assert read.keys() == tensors.keys()
        for name, want in wanted.items():
            assert read[name].dtype == np.float32
            np.testing.assert_array_equal(read[name], want)


def test_safetensors_414_a_pickle_by_that_name(tmp_path):
    """A zip archive with pickles, under the name of a weight file: the error says what it is not."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(pa.CheckpointError, match="safetensors"):
        read_tensors(path)


def test_keras_15560_a_layer_saved_and_loaded(contract, make, to_np, tmp_path):
    """Another layer that loads the file computes the same bits."""
    place = {"backend": contract.name, "device": contract.device_of(make([0.0]))}
    sizes = {"num_heads": 4, "num_kv_heads": 2, "value_dim": 3, **place}
    layer, other = (pa.MultiHeadAttention(8, seed=seed, **sizes) for seed in (1, 2))
    x = make(np.random.default_rng(144).standard_normal((2, 5, 8)), "float32")
    assert np.abs(to_np(layer(x)) - to_np(other(x))).max() > 1e-3
    layer.save(tmp_path / "layer.safetensors")
    other.load(tmp_path / "layer.safetensors")
    np.testing.assert_array_equal(to_np(other(x)), to_np(layer(x)))
