"""JAX in a process that was forked: XLA's threads exist only in the parent, so that computing would never end."""

import os

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_says_why_jax_cannot_compute(program):
    program("fork_with_jax")
