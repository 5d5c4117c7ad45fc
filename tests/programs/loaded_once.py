"""A plugin "slow" that counts its imports in ``builtins.loads``, selected by sixteen threads at once."""

import builtins

from at_once import run_at_once

from polyattn import registry

got = []


def ask(_):
    got.append(registry.ready("slow"))


run_at_once(ask, 16)
print(len(got), len({id(backend) for backend in got}), builtins.loads)
