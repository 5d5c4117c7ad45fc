"""Prints done when ``import polyattn`` loads no other package, and the first function does."""

import sys

before = {name.partition(".")[0] for name in sys.modules}

import polyattn as pa  # noqa: E402

loaded = {name.partition(".")[0] for name in sys.modules} - before
assert loaded - set(sys.stdlib_module_names) == {"polyattn"}, loaded
assert "polyattn.kernels" not in sys.modules
assert "importlib.metadata" not in sys.modules
assert callable(pa.attention)
assert "numpy" in sys.modules
assert "attention" in vars(pa)
print("done")
