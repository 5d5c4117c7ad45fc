"""One attention problem: its arrays and arguments, as arrays of a library and as a program that can be pasted."""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from arrays_in_memory import Given, values
from attention_reference import Made, attention
from attention_sizes import Sizes


@dataclass(frozen=True)
class Problem:
    """One attention problem: arrays as :class:`Given`, the other arguments as they are passed."""

    backend: str
    seed: int
    index: int
    inputs: dict[str, Given]
    """q, k and v."""
    arguments: dict[str, Any]
    upstream: dict[str, Given]
    """dout, and dlse if it is given."""
    elsewhere: dict[str, str]
    """``backend`` or ``kernel``, if the call names one."""
    sizes: Sizes
    exact: bool
    """Whether the scores have no rounding error."""

    @property
    def dtypes(self):
        """The dtypes of the arrays other than q, k and v; that of the table of a structured bias."""
        arrays = {name: x.arguments[0] if isinstance(x, Made) else x for name, x in self.arguments.items()}
        return {name: x.dtype for name, x in arrays.items() if isinstance(x, Given)}

    def native(self, target):
        """Return the inputs, the arguments and the upstream gradients as arrays of the library."""
        parts = (self.inputs, self.arguments, self.upstream)
        inputs, arguments, upstream = ({name: native(x, target) for name, x in part.items()} for part in parts)
        return list(inputs.values()), arguments | self.elsewhere, upstream

    def answer(self):
        """Return the reference's results."""
        given_ = self.inputs | self.arguments | self.upstream
        return attention(**{name: values(x) for name, x in given_.items()})

    def source(self):
        """Return the problem as a program that can be pasted."""
        named = self.inputs | self.upstream
        lines = [
            "import operator, numpy as np, polyattn as pa",
            "from numpy import inf, nan",
            "from polyattn.testing.target import open_backend",
            f"target = open_backend({self.backend!r}); make, xp = target.make, target.xp",
            *(f"{name} = {source(x)}" for name, x in named.items()),
        ]
        more = "".join(f", {name}={source(x)}" for name, x in (self.arguments | self.elsewhere).items())
        return "\n".join([
            f"# seed {self.seed}, problem {self.index} of {self.backend}",
            *lines,
            f"out, cache = pa.attention_forward(q, k, v{more})",
            f"grads = pa.attention_backward(dout, cache{', dlse' * ('dlse' in self.upstream)})",
        ])  # fmt: skip


def native(x, target):
    """Return an argument with arrays of the library."""
    if isinstance(x, Given):
        return x.native(target)
    if isinstance(x, Made):
        return x.by(*[native(y, target) for y in x.arguments], **x.options)
    return tuple([native(y, target) for y in x]) if type(x) is tuple else x


def source(x):
    """Return an argument as text."""
    if isinstance(x, Given):
        return x.source()
    if isinstance(x, Made):
        where = "operator" if x.by is operator.and_ else "pa"
        more = [f"{name}={value!r}" for name, value in x.options.items()]
        return f"{where}.{x.by.__name__}({', '.join([*map(source, x.arguments), *more])})"
    if type(x) is tuple:
        return f"({', '.join(map(source, x))},)"
    return f"np.{x!r}" if isinstance(x, np.generic) and not repr(x).startswith("np.") else repr(x)
