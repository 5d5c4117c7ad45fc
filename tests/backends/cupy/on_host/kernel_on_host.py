"""The CuPy backend's kernel as NumPy's own, on the stand-in for CuPy.

As a pytest plugin it is so for the whole run: ``DEVICE_CODE`` names a folder to compile in,
``TINY_TILES`` makes tiles of 2 queries and 4 keys of one batch entry.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import cupy_on_host as on_host
import numpy as np

from polyattn import registry
from polyattn.backend import AttentionGrads, RowStatistics
from polyattn_cupy._kernel import CublasKernel

TINY = {"SIDE": 4, "LEAST": 2, "SCORES": 32}


class OnHost(CublasKernel):
    """The kernel, given NumPy's arrays as the stand-in's."""

    def forward(self, q, k, v, problem):
        out, statistics = super().forward(*map(on_host.array, (q, k, v)), self.native(problem))
        return np.asarray(out), RowStatistics(*map(np.asarray, statistics))

    def backward(self, dout, dlse, q, k, v, out, statistics, problem):
        arrays = map(on_host.array, (dout, dlse, q, k, v, out))
        statistics = RowStatistics(*map(on_host.array, statistics))
        grads = super().backward(*arrays, statistics, self.native(problem))
        return AttentionGrads(*(None if x is None else np.asarray(x) for x in grads))

    @staticmethod
    def native(problem):
        return replace(problem, **{name: on_host.array(x) for name, x in vars(problem).items() if name != "backend"})


def pytest_configure(config):
    if "DEVICE_CODE" in os.environ:
        sys.modules["cupy"] = on_host.Cupy(Path(os.environ["DEVICE_CODE"]))
        type(registry.ready("numpy")).kernels = (OnHost(),)
        if os.environ.get("TINY_TILES"):
            import polyattn_cupy._work as work

            vars(work).update(TINY)
