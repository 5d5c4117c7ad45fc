"""The settings of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ArgumentError
from ..kernels import FLOAT_DTYPES

__all__ = ["Config", "OptionError", "resolve"]


class OptionError(ArgumentError):
    """An option that is out of range, or that conflicts with another."""


@dataclass(frozen=True)
class Config:
    """The settings on which the results of a run depend; stored in its checkpoint.

    Only ``steps`` may change when a run is resumed, and no other setting depends on
    ``steps``: a run that is stopped and resumed, or continued for more steps, gives
    the same results as an uninterrupted one.
    """

    dtype: str = "float32"
    steps: int = 2000
    batch: int = 64
    sequence: int = 8
    width: int = 8
    heads: int = 2
    learning_rate: float = 0.05
    weight_decay: float = 0.0  # decay would prevent the large scores that put all weight on one position
    seed: int = 0
    data: str | None = None
    data_digest: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in FLOAT_DTYPES:
            raise OptionError(f"--dtype: expected one of {', '.join(FLOAT_DTYPES)}, got {self.dtype!r}")
        for name, least in (("steps", 1), ("batch", 1), ("sequence", 1), ("width", 1), ("heads", 1), ("seed", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise OptionError(f"--{name}: expected at least {least}, got {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{_option(name)}: expected a finite number of at least 0, got {getattr(self, name)}")
        if self.width % self.heads:
            raise OptionError(f"--heads: {self.heads} heads do not divide a width of {self.width}; choose a divisor")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)


def resolve(given: Mapping[str, Any], stored: Mapping[str, Any] | None = None, folder: str = "") -> Config:
    """Return the settings of a run: those given, else those of the resumed run in ``folder``, else the defaults.

    Raises
    ------
    OptionError
        If a value is out of range, or differs from that of the resumed run.
    """
    if stored is None:
        return Config(**given)
    movable = ("steps", "data")  # a data file may have moved: compare its content, not its path
    differing = [
        "other samples in --data"
        if name == "data_digest"
        else f"{_option(name)} {value} (the run has {stored.get(name)})"
        for name, value in given.items()
        if name not in movable and stored.get(name) != value
    ]
    if differing:
        raise OptionError(
            f"--resume: the run in {folder} was trained with other settings: {', '.join(differing)}; "
            "leave these options out, or begin a new run with another --output"
        )
    known = {field.name for field in fields(Config)}
    return Config(**{name: value for name, value in {**stored, **given}.items() if name in known})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
