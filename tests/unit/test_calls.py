"""How many Python functions of polyattn a call of small arrays runs: their overhead is most of its time."""

import sys
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
import polyattn_native
import polyattn_numpy

FOLDERS = tuple(str(Path(module.__file__).parent) for module in (pa, polyattn_native, polyattn_numpy))
X, WEIGHT = np.ones((2, 4, 16), dtype=np.float32), np.ones(16, dtype=np.float32)
LAYER = pa.MultiHeadAttention(16, 4)
CALLS = {
    "attention": (80, lambda: pa.attention(X, X, X)),
    "multi-head attention": (149, lambda: LAYER.forward(X)),
    "layer norm": (53, lambda: pa.functional.layer_norm(X, WEIGHT, WEIGHT)),
    "softmax": (32, lambda: pa.functional.softmax(X)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_more_python_calls_than(name):
    most, call = CALLS[name]
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            called.append(frame.f_code.co_qualname)

    call()  # what is loaded at first use
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert 10 < len(called) <= most, called
