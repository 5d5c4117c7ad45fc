"""What programs ask after a call that did not end as others do: the same bits, and what the process shares."""

import sys

import numpy as np

import polyattn as pa
from polyattn import account, selection
from polyattn_native import _threads


def equal(a, b):
    """Return whether two records, dicts or arrays have the same bits."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(x, b[name]) for name, x in a.items())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(equal, a, b))
    if a is None or b is None:
        return a is b
    return np.array_equal(*(np.asarray(pa.to_backend(x, "numpy")) for x in (a, b)))


def shared():
    """Return what a call may change only while it runs."""
    torch = sys.modules.get("torch")
    return {
        "scopes": selection._scopes.get(),
        "accounts": account._accounts.get(),
        "warnings of NumPy": np.geterr(),
        "recording of torch": torch is None or torch.is_grad_enabled(),
        "threads of the BLAS": _threads._blas_threads(),
        "holders of its limit": set(_threads._guard.holders),
    }
