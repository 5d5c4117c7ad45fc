"""Optimisers as pure functions of dicts of arrays: ``init(params)`` and ``update(grads, state, params)``.

Parameters, gradients and state are flat dicts from name to array, all of one
library on one device. A state holds ``"step"``, the number of updates so far as
a 0-d int32 array, and slots such as ``"mean.q_proj.weight"``. It is saved,
loaded and compiled in the same way as parameters.

>>> import numpy as np
>>> optimizer = AdamW(lr=linear_warmup(cosine(1e-2, total_steps=990), warmup_steps=10))
>>> params = {"weight": np.zeros(3)}
>>> state = optimizer.init(params)
>>> grads, norm = clip_by_global_norm({"weight": np.ones(3)}, max_norm=1.0)
>>> params, state = optimizer.update(grads, state, params)
>>> int(state["step"])
1
"""

from ._adamw import AdamW
from ._clip import clip_by_global_norm
from ._schedules import constant, cosine, linear_warmup
from ._sgd import SGD

__all__ = ["SGD", "AdamW", "clip_by_global_norm", "constant", "cosine", "linear_warmup"]
