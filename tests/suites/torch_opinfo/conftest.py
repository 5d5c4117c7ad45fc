"""Conversion between torch's sample tensors and the arrays of the backend under test."""

import numpy as np
import pytest

from polyattn.backend import dtype_name
from polyattn.testing import TOLERANCES, assert_close

FEW = 4


@pytest.fixture
def give(make):
    """Return ``give(tensor)``: an array of the backend with the same values."""

    def give(x):
        x, dtype = x.detach(), dtype_name(x.dtype)
        return make((x.float() if dtype == "bfloat16" else x).numpy(), dtype)

    return give


@pytest.fixture
def agree(to_np):
    """Return ``agree(ours, theirs, exact)``: our results by name, torch's, and torch's in float64.

    Ours have torch's dtypes and shapes, and are as near to the exact ones as the tolerance of the dtype says,
    relative to the largest number or to one. Where a sample is so badly conditioned that torch itself is farther
    off in one of its results, they are within a few times that. ``slack`` is a factor of the tolerance.
    """

    def agree(ours, theirs, exact, slack=1.0):
        assert ours.keys() == theirs.keys() == exact.keys()
        sizes = {name: max(1.0, np.max(np.abs(numbers(x)), initial=0)) for name, x in exact.items()}
        errors = {name: numbers(x) - numbers(exact[name]) for name, x in theirs.items()}
        worst = max(np.max(np.abs(error), initial=0) / sizes[name] for name, error in errors.items())
        for name, x in ours.items():
            dtype = dtype_name(theirs[name].dtype)
            assert dtype_name(x.dtype) == dtype, name
            scale = sizes[name] * max(slack, FEW * worst / TOLERANCES[dtype])
            assert_close(to_np(x), numbers(exact[name]), dtype, scale=scale, what=name)

    return agree


def numbers(x):
    return x.detach().double().numpy()
