"""The training job of the command line; private to it.

``train`` is the whole of it. The numbers of a run are a pure function of its
settings and of the step, so a run that was killed is resumed as if it had not
been, and every backend sees the same samples.
"""

from ._config import Config, OptionError
from ._trainer import train

__all__ = ["Config", "OptionError", "train"]
