"""ALiBi: a bias linear in the distance of key and query."""

from __future__ import annotations

import math

from ..errors import ArgumentError
from ..kernels import AlibiBias
from ..kernels._static import concrete
from ._checks import is_number, shown

__all__ = ["alibi_bias"]


def alibi_bias(num_heads: int, *, max_bias: float = 8.0) -> AlibiBias:
    r"""Return ALiBi's linear bias, for the argument ``bias`` of :func:`polyattn.attention`.

    .. math:: \mathrm{bias}_{hij} = -m_h\, |p_j - p_i|

    with the positions :math:`p_j = j` of keys and :math:`p_i = i + \mathtt{q\_offset}` of queries, and the slopes
    :math:`m_h = 2^{-8h/H}` for h from 1 to H. It is computed tile by tile, and has no gradient.

    Parameters
    ----------
    num_heads : int
        H, the number of query heads. If it is no power of two, the slopes are those of the next lower power, followed
        by every other slope of the next higher power, as in the authors' code.
    max_bias : float
        The 8 in the exponent.

    Returns
    -------
    AlibiBias
        A small object; its attribute ``slopes`` holds :math:`m_h`.

    Raises
    ------
    ArgumentError
        If ``num_heads`` is no positive integer or ``max_bias`` no positive number. The attention call raises
        ShapeError if the number of heads is not that of the queries.

    Notes
    -----
    Press, Smith and Lewis, "Train short, test long: attention with linear biases enables input length
    extrapolation" (2022). There attention is causal; without ``causal`` the bias is symmetric in the distance.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> x = np.zeros((2, 1, 4))
    >>> pa.attention_weights(x, np.zeros((2, 3, 4)), bias=pa.alibi_bias(2, max_bias=2), causal=True).round(2)
    array([[[0.19, 0.31, 0.51]],
    <BLANKLINE>
           [[0.25, 0.33, 0.42]]])
    """
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or num_heads < 1:
        raise ArgumentError(f"num_heads: expected a positive integer, got {shown(num_heads)}")
    if not is_number(max_bias) or not 0 < max_bias < math.inf:
        raise ArgumentError(f"max_bias: expected a positive number, got {shown(max_bias)}")
    num_heads, max_bias = concrete(num_heads), concrete(float(max_bias))
    power = 2 ** (num_heads.bit_length() - 1)
    more = _slopes(2 * power, max_bias)[::2]
    return AlibiBias((*_slopes(power, max_bias), *more[: num_heads - power]))


def _slopes(heads: int, max_bias: float) -> list[float]:
    return [2 ** (-max_bias * head / heads) for head in range(1, heads + 1)]
