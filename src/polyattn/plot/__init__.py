"""Plots of attention: maps by head, masks, the tiles of a problem, learning curves. They need matplotlib.

Each function draws into the given Axes, or creates Axes with ``matplotlib.pyplot``, and returns them: save with
``axes.figure.savefig("file.png")``, show with ``matplotlib.pyplot.show()``.
"""

from ._attention_map import attention_map
from ._learning_curve import learning_curve
from ._mask import mask
from ._tile_schedule import tile_schedule

__all__ = ["attention_map", "learning_curve", "mask", "tile_schedule"]
