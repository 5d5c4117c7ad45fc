"""Flax's own attention tests: those that pass with JAX's attention must pass with ours."""

import os
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

# In flax 0.12.8: how many tests pass with JAX's attention, and how often at least they must come to ours.
PASSES = 114
CALLS = {"attention": 109, "attention_weights": 6}


@pytest.fixture(scope="module")
def runs(run_foreign, tmp_path_factory):
    """Return the runs with JAX's attention and with ours, of the tests in the sdist at FLAX_SDIST."""
    sdist, name = Path(os.environ.get("FLAX_SDIST", "")), f"flax-{version('flax')}"
    assert sdist.name == f"{name}.tar.gz", f"FLAX_SDIST names no {name}.tar.gz; nox -s 'suites(jax)' fetches it"
    folder = tmp_path_factory.mktemp("flax")
    with tarfile.open(sdist) as archive:
        archive.extract(f"{name}/tests/nnx/nn/attention_test.py", folder, filter="data")
    plugin = Path(__file__).with_name("flax_routed.py")
    return run_foreign(folder), run_foreign(folder, plugin=plugin)


def test_what_passes_with_flax_passes_with_us(runs):
    own, routed = runs
    assert len(own.passed("attention_test")) == PASSES, own.output
    assert own.passed("attention_test") <= routed.passed("attention_test"), routed.output


def test_it_is_we_who_compute(runs):
    _, routed = runs
    calls = routed.calls["attention_test"]
    assert all(calls[name] >= least for name, least in CALLS.items()), calls
    assert set(calls) <= set(CALLS), "polyattn refused what it was given"
