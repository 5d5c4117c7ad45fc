"""Kernels and problems with small tiles, so that few queries and keys need several."""

from polyattn import registry
from polyattn.functional._arguments import checked_call, make_problem
from polyattn.kernels import TiledKernel


def in_tiles(contract, n_q, n_k):
    """Return a backend's kernels and the generic one; those that take a tile have tiles of at most n_q × n_k."""
    kernels = (*contract.kernels, TiledKernel())
    return tuple(type(kernel)(tile=(n_q, n_k)) if hasattr(kernel, "tile") else kernel for kernel in kernels)


def tiled_problem(q, k, *, tile=None, **arguments):
    """Return the problem of NumPy arrays, with the keys as values, in tiles of at most ``tile``."""
    arrays, options = checked_call(q, k, k, **arguments)
    given = {name: x for name, x in (arrays | options).items() if name not in ("q", "k", "v", "kernel")}
    return make_problem(registry.ready("numpy"), q, "cpu", **given, tile=tile)
