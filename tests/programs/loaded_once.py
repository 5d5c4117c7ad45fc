"""A plugin "slow" that counts its imports in ``builtins.loads``, selected by sixteen threads at once."""

import builtins
import threading

from polyattn import registry

gate, got = threading.Barrier(16), []


def ask():
    gate.wait()
    got.append(registry.ready("slow"))


threads = [threading.Thread(target=ask) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(got), len({id(backend) for backend in got}), builtins.loads)
