"""JAX in 32-bit mode: narrowing one integer argument is a transfer, refused before it or counted after it."""

import jax.numpy as jnp
import numpy as np
import pytest

import polyattn as pa
from polyattn.conversion import move_argument, place_of

labels = np.array([1, 2])
source, place = place_of({"labels": labels}), place_of({"x": jnp.zeros(2)})
with pa.transfers("forbid") as account, pytest.raises(pa.BackendMismatchError, match=r"^labels: would go from numpy"):
    move_argument(labels, place, name="labels", source=source)
assert account.count == 0
with pa.transfers() as account:
    there = move_argument(labels, place, name="labels", source=source)
assert there.dtype == "int32"
assert account.count == 1
assert account.crossings[0].copied
