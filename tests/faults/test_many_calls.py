"""Very many small calls.

A process makes small calls on one library: attention, its backward, row operations, selections and steps of decoding.
Nothing grows: neither the memory of the process nor Python's objects, threads or file descriptors. The short form has
NumPy and torch.
"""

import json

MEBIBYTE = 2**20
# Of what Python and the libraries keep besides, for any number of calls.
MOST = {"bytes": 8 * MEBIBYTE, "blocks": 3000, "objects": 1000}


def pytest_generate_tests(metafunc):
    names = ["numpy", "torch", "jax", "array-api-strict"]
    metafunc.parametrize("name", names if metafunc.config.getoption("--long") else names[:2])


def test_nothing_grows(name, program, amount, tried):
    found = json.loads(program("many_calls", name, str(amount(3000, 10**6)), timeout=3000))
    calls = found.pop("calls")
    assert all(grown <= MOST.get(what, 0) for what, grown in found.items()), found
    grown = f"memory +{found['bytes'] / MEBIBYTE:.1f} MiB, no more objects, threads or file descriptors"
    tried(f"calls on {name}", calls, grown)
