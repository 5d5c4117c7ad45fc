"""The axes of an attention problem."""

from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """The axes of a problem; ``q``, ``k`` and ``v`` are the axes before the heads, which broadcast."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    heads: int
    kv_heads: int
    n_q: int
    n_k: int
    d_k: int
    d_v: int

    @property
    def lead(self):
        return np.broadcast_shapes(self.q, self.k, self.v)

    @property
    def scores(self):
        return (*self.lead, self.heads, self.n_q, self.n_k)

    @property
    def shapes(self):
        """The shapes of q, k, v and dout."""
        return {
            "q": (*self.q, self.heads, self.n_q, self.d_k),
            "k": (*self.k, self.kv_heads, self.n_k, self.d_k),
            "v": (*self.v, self.kv_heads, self.n_k, self.d_v),
            "dout": (*self.scores[:-1], self.d_v),
        }
