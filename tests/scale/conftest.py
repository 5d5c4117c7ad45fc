"""What the programs of several processes found, each started once."""

import json

import pytest


@pytest.fixture(scope="session")
def found(program):
    """Return what a program in ``tests/programs`` prints as JSON; it is run once."""
    known = {}

    def run(name, *arguments, **variables):
        if (name, arguments) not in known:
            known[name, arguments] = json.loads(program(name, *arguments, **variables).splitlines()[-1])
        return known[name, arguments]

    return run
