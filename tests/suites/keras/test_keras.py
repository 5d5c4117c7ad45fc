"""Keras's own attention tests, on the backend of the same name: those that pass there must pass with ours."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest


class Module(NamedTuple):
    """The number of a module's tests that pass with Keras's attention, and the least number of calls of ours."""

    passes: dict[str, int]
    attention: int
    attention_weights: int


# In keras 3.15.1. The layers' half precision is tested on numpy and JAX only.
MODULES = {
    "additive_attention_test": Module({"numpy": 4, "torch": 4, "jax": 4}, 6, 6),
    "attention_test": Module({"numpy": 32, "torch": 32, "jax": 32}, 16, 16),
    "grouped_query_attention_test": Module({"numpy": 28, "torch": 30, "jax": 30}, 43, 12),
    "multi_head_attention_test": Module({"numpy": 47, "torch": 50, "jax": 50}, 93, 51),
    "nn_test": Module({"numpy": 32, "torch": 29, "jax": 33}, 27, 0),
}


@pytest.fixture(scope="module")
def runs(backend, run_foreign, tmp_path_factory):
    """Return the run with Keras's own attention, and the one with ours."""
    root = Path(find_spec("keras").origin).parents[1]
    files = [root / "keras/src/layers/attention", root / "keras/src/ops/nn_test.py"]
    arguments = [f"--rootdir={root}", *files, "-k", "attention"]
    if backend == "numpy":
        arguments += ["-m", "not requires_trainable_backend"]  # as Keras's conftest.py has it, which the wheel has not
    env = {"KERAS_BACKEND": backend, "KERAS_HOME": str(tmp_path_factory.mktemp("keras"))}
    plugin = Path(__file__).with_name("keras_routed.py")
    return run_foreign(*arguments, **env), run_foreign(*arguments, plugin=plugin, **env)


@pytest.mark.parametrize("module", MODULES)
def test_what_passes_with_keras_passes_with_us(module, runs, backend):
    own, routed = runs
    assert len(own.passed(module)) == MODULES[module].passes[backend], own.output
    assert own.passed(module) <= routed.passed(module), routed.output


@pytest.mark.parametrize("module", MODULES)
def test_it_is_we_who_compute(module, runs):
    _, routed = runs
    calls = routed.calls[module]
    assert calls["attention"] >= MODULES[module].attention
    assert calls["attention_weights"] >= MODULES[module].attention_weights
    assert set(calls) <= {"attention", "attention_weights"}, "polyattn refused what it was given"
