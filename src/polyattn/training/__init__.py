"""The training job of the command line; private.

The results of a run are a pure function of its settings and of the step. So a run
that was killed and resumed gives the same results as an uninterrupted one, and
every backend trains on the same samples.
"""

from ._config import Config, OptionError
from ._trainer import train

__all__ = ["Config", "OptionError", "train"]
