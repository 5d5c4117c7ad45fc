"""polyattn in a second interpreter of the process: ``python subinterpreter.py alone|beside``.

NumPy is in that interpreter only, or in the main one before. Prints the bits of attention, or that NumPy refused.
"""

import sys

if sys.version_info >= (3, 13):
    from _interpreters import create
    from _interpreters import exec as run
else:
    from _xxsubinterpreters import create
    from _xxsubinterpreters import run_string as run

SOURCE = """
import warnings
warnings.simplefilter("ignore")  # NumPy warns that it does not support this properly
try:
    import numpy as np
except ImportError as refused:
    assert "once per process" in str(refused) or "in subinterpreters" in str(refused), refused
    print("refused by NumPy")
else:
    import polyattn as pa
    x = np.arange(8000, dtype=np.float32).reshape(2, 40, 100) % 13
    with pa.use_backend("numpy"):
        out, cache = pa.attention_forward(x, x, x, causal=True)
        print(out.tobytes().hex(), pa.attention_backward(out, cache).q.tobytes().hex())
"""

if sys.argv[1] == "beside":
    import numpy  # noqa: F401  # to load it
failure = run(create(), SOURCE)
assert failure is None, failure
