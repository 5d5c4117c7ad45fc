"""Write one checkpoint over the other until killed: ``python write_checkpoints.py PATH``."""

import sys

import numpy as np

from polyattn.checkpoint import write_tensors

for step in range(10**6):
    write_tensors(sys.argv[1], {"x": np.full(50_000, float(step))}, {"step": str(step)})
