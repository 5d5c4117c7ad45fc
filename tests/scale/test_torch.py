"""Attention on a sequence that processes of torch.distributed share: results, gradients, bytes, and bad input."""

import sys

import pytest

pytest.importorskip("torch", reason='torch shares the sequence: pip install "polyattn[torch]"')


@pytest.fixture(scope="module")
def shared(found):
    return found("torch_shared", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["ring", "all-to-all"])
def test_it_equals_one_process(shared, ranks, method):
    """Whatever the arguments, the layout and the lengths of the shards: result and all gradients, in float64."""
    errors = {name: error for name, error in shared["equal"].items() if name.startswith(f"{ranks} {method}")}
    assert len(errors) >= 30 or (method, ranks) == ("all-to-all", 3)  # three ranks do not divide four heads
    assert {name: error for name, error in errors.items() if not error <= 1e-11} == {}


def test_the_bytes_are_those_of_the_formula(shared):
    assert len(shared["bytes"]) == 17  # a rank of each group, by both methods where the heads can be divided
    assert {name: pair for name, pair in shared["bytes"].items() if pair[0] != pair[1]} == {}
    assert all(sum(pair[0]) > 0 for name, pair in shared["bytes"].items() if not name.startswith("1 "))


DISAGREE = {
    "dtype": "dtype: .*'float32' on rank 0 and 'float64' on rank 1",
    "heads": r"k: .*\(1, 4, 8\) on rank 0 and \(1, 2, 8\) on rank 1",
    "batch": r"q: expected the same on all ranks",
    "causal": "causal: .*False on rank 0 and True on rank 1",
    "scale": "scale: expected the same .* 0.5 on rank 1",
    "seed": "seed: expected the same .*none on rank 0 and 7 on rank 1",
    "lengths": r"key_lengths: expected the same .*None on rank 0 and \[1\] on rank 1",
    "method": "method: expected the same .*'ring' on rank 0 and 'all-to-all' on rank 1",
    "layout": "layout: expected the same",
    "segments": "segment_ids: expected the same",
}
ONE_IS_WRONG = {
    "bad shape": ("ShapeError", "v: expected .* to match k's n_k=6"),
    "bad array": ("BackendMismatchError", "q: expected an array, got list"),
    "bad window": ("ArgumentError", "window: expected a pair"),
    "bad layout": ("ArgumentError", "layout: expected one of contiguous, zigzag"),
}
ALL_ARE_WRONG = {
    "mask": "ArgumentError: mask: expected None, .* use causal, window",
    "array bias": "ArgumentError: bias: expected a structured bias",
    "no keys": "ShapeError: k: expected at least one key on some rank",
    "too long": "ArgumentError: key_lengths: expected lengths from 0 to n_k=12",
    "three heads": "ShapeError: method: .*use method='ring'",
    "second order": "BackendMismatchError: create_graph=True",
}


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_all_raise(shared, name):
    for rank in ("rank 0", "rank 1"):
        assert_matches(shared["refused"][rank][name], f"EngineError: {DISAGREE[name]}")


@pytest.mark.parametrize("name", ONE_IS_WRONG)
def test_bad_input_on_one_rank_raises_on_all(shared, name):
    kind, message = ONE_IS_WRONG[name]
    assert_matches(shared["refused"]["rank 1"][name], f"{kind}: {message}")
    assert_matches(shared["refused"]["rank 0"][name], f"EngineError: rank 1 refused its arguments.*{message}")


@pytest.mark.parametrize("name", ALL_ARE_WRONG)
def test_bad_input_on_all_ranks(shared, name):
    for rank in ("rank 0", "rank 1"):
        assert_matches(shared["refused"][rank][name], ALL_ARE_WRONG[name])


def assert_matches(text, pattern):
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_a_mesh_and_dtensors(shared):
    found = shared["dtensors"]
    assert found["error"] <= 1e-11
    assert (found["placements"], found["shape"]) == ("(Shard(dim=2),)", [1, 2, 11, 4])
    one, other = found["messages"]
    assert_matches(one, r"group: expected a mesh of one dimension, got .*'data', 'context'.*mesh\['context'\]")
    assert_matches(other, "k: expected a DTensor like the others, got Tensor")


def test_without_a_process_group():
    import torch

    import polyattn as pa
    from polyattn.distributed.torch import attention

    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(pa.EngineError, match="group: there is no process group; start the program with torchrun"):
        attention(x, x, x)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the threads of a process")
def test_the_end_of_a_group_ends_its_threads(program):
    """A thread that is left aborts the process where it releases a tensor while Python ends."""
    *errors, threads = program("torch_ended").splitlines()
    assert errors == ["axis: expected one of the 1 axes of x, got -2"] * 2
    assert threads == "[]"
