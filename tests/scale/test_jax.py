"""Attention over an axis of a mesh of JAX: results and derivatives, what travels, two processes, and bad input."""

import json
import os
import socket
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason='JAX has the mesh: pip install "polyattn[jax]"')

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
PARAMETERS = ("f64[4]{0}", "f64[8,4]{1,0}")  # sinks and the table of a bias, of which every device has all


def flags(devices):
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}"}


@pytest.fixture(scope="module")
def shared(found):
    return found("jax_shared", **flags(8))


NAMES = [
    "2 contiguous: lengths, large scores",
    "4 zigzag: causal window, sinks, softcap, segments, groups",
    "4 contiguous: dropout, table",
    "8 zigzag: causal",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_equals_one_device(shared, name):
    """Result, all gradients and the tangent, in float64; the programs are compiled by ``jit``."""
    errors = shared[name]["errors"]
    assert {"out", "tangents", "q", "k", "v"} <= set(errors)
    assert {key: error for key, error in errors.items() if not error <= 1e-11} == {}


@pytest.mark.parametrize("name", NAMES)
def test_shards_go_round_and_are_never_gathered(shared, name):
    for kind, collectives in shared[name]["collectives"].items():
        sums = [shape for shape, what in collectives if what != "collective-permute"]
        assert any(what == "collective-permute" for _, what in collectives), kind
        assert all(what in ("collective-permute", "all-reduce") for _, what in collectives), collectives
        assert set(sums) <= set(PARAMETERS), collectives


def test_two_processes():
    """Two processes of ``jax.distributed``, with two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = os.path.join(os.path.dirname(__file__), "..", "programs", "jax_shared.py")
    environment, pipes = {**os.environ, **flags(2)}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    commands = [[sys.executable, program, str(rank), address] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for command in commands]
    results = [process.communicate(timeout=240) for process in processes]
    for process, (out, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err
        errors = json.loads(out.splitlines()[-1])
        assert set(errors) == {"out", "q", "k", "v"}
        assert max(errors.values()) <= 1e-11


def test_bad_input():
    import numpy as np

    import polyattn as pa
    from polyattn.distributed.jax import attention

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("context",))
    x = jax.numpy.ones((1, 2, 6, 4))
    whole = {"mesh": mesh, "axis": "context"}
    for arguments, kind, message in (
        ({"mesh": mesh, "axis": "model"}, pa.ArgumentError, r"axis: .* got 'model' and \('context',\)"),
        ({"mesh": None, "axis": "context"}, pa.ArgumentError, "axis: expected the name of an axis of a .*Mesh"),
        ({**whole, "layout": "snake"}, pa.ArgumentError, "layout: expected one of contiguous, zigzag"),
        ({**whole, "mask": x > 0}, pa.ArgumentError, "mask: expected None, .* use causal"),
        ({**whole, "bias": x}, pa.ArgumentError, "bias: expected a structured bias"),
        ({**whole, "dropout": 0.5, "seed": 1}, pa.ShapeError, "k: expected pieces of a multiple of 4 keys.*pad it"),
        ({**whole, "key_lengths": 7}, pa.ArgumentError, "key_lengths: expected lengths from 0 to n_k=6"),
    ):
        with pytest.raises(kind, match=message):
            attention(x, x, x, **arguments)
    odd = x[:, :, :5]
    with pytest.raises(pa.ShapeError, match="q: expected a positive length that 2 pieces divide, got 5; pad it"):
        attention(odd, odd, odd, **whole, layout="zigzag")
    host = np.ones((1, 2, 6, 4), dtype=np.float32)
    with pytest.raises(pa.BackendMismatchError, match=r"q: expected a JAX array, .*to_backend\(q, 'jax'\)"):
        attention(host, host, host, **whole)
