"""Random attention problems over all arguments, dtypes, layouts and special values, by seed and number."""

import operator
import random

import numpy as np
from arrays_in_memory import Given, given, rounded, values
from attention_problem import Problem
from attention_reference import Made, Pairs
from attention_sizes import Sizes

import polyattn as pa

FAR = 2**40
EXTREMES = (FAR, -FAR, 2**31 - 1, -(2**31))
"""Positions at the ends of int32 and beyond."""

# A library that compiles does so for each new shape: there the shapes come from a few.
FEW = (
    Sizes((2,), (2,), (2,), 4, 2, 5, 7, 4, 3),
    Sizes((), (), (), 2, 2, 9, 6, 8, 8),
    Sizes((2,), (1,), (), 2, 1, 1, 19, 3, 5),
    Sizes((), (), (), 1, 1, 3, 4, 2, 2),
)


def problem(target, seed, index, kinds=None, kernels=(), others=()):
    """Return the problem with this number, for arrays of the target's library.

    With ``kinds``, problems whose numbers differ by a multiple of it differ in the values of their arrays only, for
    libraries that compile a program for all else.
    """
    return Drawing(target, seed, index, kinds).problem(kernels, others)


class Drawing:
    """The random choices of one problem."""

    def __init__(self, target, seed, index, kinds=None, sizes=None):
        self.target, self.seed, self.index, self.few = target, seed, index, kinds is not None
        self.draw = random.Random(f"{target.name} {seed} {index % kinds if kinds else index}")
        self.rng = np.random.default_rng([seed, index])
        self.sizes = sizes or (self.draw.choice(FEW) if self.few else self._sizes())
        self.dtype, self.other = (self.draw.choice(target.dtypes) for _ in range(2))
        self.kind = self.draw.choices(("normal", "grid", "tiny", "wide", "equal"), (12, 3, 1, 1, 1))[0]
        if self.kind == "grid":
            self.other = self.dtype
        # On the grid inputs are 0, 1 or 2 times a power of two, and so is the scale. Where that is large, a score has
        # one term: so ties remain ties, in whatever order factors are multiplied.
        limits = {"float16": 3, "bfloat16": 40, "float32": 40, "float64": 300}
        self.power = self.draw.choice([0, 0, 2, limits[self.dtype]]) if self.kind == "grid" else 0
        self.scale = 2.0 ** self.draw.randint(-3, 0) if self.kind == "grid" else None

    def chance(self, share):
        return self.draw.random() < share

    # ---- sizes and numbers ---------------------------------------------------------------------------------------

    def _sizes(self):
        draw = self.draw
        lead = tuple(draw.choice((1, 2, 2)) for _ in range(draw.choice((0, 1, 1, 2))))
        lead = tuple(0 if self.chance(0.01) else n for n in lead)
        kv_heads, group = draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 3))
        n_q, n_k = (draw.randint(1, 40) if self.chance(0.1) else draw.randint(0, 6) for _ in "qk")
        d_k, d_v = (0 if self.chance(0.02) else draw.randint(1, 9) for _ in "kv")
        leads = [self.narrowed(lead) for _ in range(3)]
        return Sizes(*leads, kv_heads * group, kv_heads, n_q, n_k, d_k, d_v)

    def narrowed(self, shape):
        """Return a shape that broadcasts to ``shape``: some axes one, some of the first left out."""
        if self.few:
            return self.draw.choice((shape, shape, (*(1 for _ in shape[:-1]), *shape[-1:])))
        kept = [n if self.chance(0.7) else 1 for n in shape]
        return tuple(kept[self.draw.randint(0, len(kept)) if self.chance(0.4) else 0 :])

    def numbers(self, shape):
        """Return inputs of the problem's kind."""
        if self.kind == "equal":
            return np.full(shape, self.draw.choice((0.0, 1.0, -0.5)))
        if self.kind == "grid":
            x = self.rng.integers(-2, 3, shape) * 2.0**self.power
            one = np.arange(shape[-1]) == self.rng.integers(0, max(shape[-1], 1), (*shape[:-1], 1))
            return np.where(one, x, 0.0) if self.power > 2 else x
        x = self.rng.standard_normal(shape)
        if self.kind == "tiny":
            return x * {"float16": 2.0**-6, "float64": 2.0**-300}.get(self.dtype, 2.0**-40)
        return x * 10.0 ** self.rng.uniform(-2, 2, (*shape[:-1], 1)) if self.kind == "wide" else x

    def scores(self, shape):
        """Return numbers that are added to scores: on the grid of the scores, if there is one."""
        unit = 2.0 ** (2 * self.power) * (self.scale or 0.0) if self.kind == "grid" else None
        return self.rng.standard_normal(shape) if unit is None else self.rng.integers(-3, 4, shape) * unit

    # ---- arrays and arguments ------------------------------------------------------------------------------------

    def given(self, x, dtype):
        return given(self.draw, self.target, x, dtype)

    def integers(self, low, high, shape):
        """Return integers in any dtype that holds them."""
        kinds = ["int32", "int32", "int64", "int8", "int16"] + (["uint8", "uint32", "uint64"] if low >= 0 else [])
        kind = "int32" if self.few else self.draw.choice([x for x in kinds if high <= np.iinfo(x).max])
        return self.given(self.rng.integers(low, high, shape), kind)

    def per_entry(self, low, high):
        """Return an integer, a 0-d array or an array of one for each entry of the batch."""
        shape = self.draw.choice([None, None, (), self.narrowed(self.sizes.lead)])
        return self.draw.randint(low, high - 1) if shape is None else self.integers(low, high, shape)

    def mask(self):
        sizes, draw = self.sizes, self.draw
        if self.chance(0.7):
            shape = self.narrowed(sizes.scores)
            return self.given(self.rng.random(shape) < draw.choice((0.3, 0.9, 0.0, 1.0)), "bool")
        made = [self.block_mask(), Made(pa.prefix_mask, (self.per_entry(0, sizes.n_k + 3),), {})]
        if self.chance(0.3):
            return Made(operator.and_, tuple(made), {})
        return draw.choice(made)

    def block_mask(self):
        sizes = self.sizes
        sides = (self.draw.randint(1, 5), self.draw.randint(1, 5))
        grid = (-(-sizes.n_q // sides[0]), -(-sizes.n_k // sides[1]))
        lead = self.narrowed((*sizes.lead, sizes.heads))
        blocks = self.rng.random((*lead, *grid)) < self.draw.choice((0.4, 0.8))
        return Made(pa.block_mask, (self.given(blocks, "bool"), sides), {})

    def bias(self):
        sizes, draw = self.sizes, self.draw
        structured = draw.random() < 0.3
        if structured and self.kind != "grid" and self.chance(0.5):
            return Made(pa.alibi_bias, (sizes.heads,), {"max_bias": draw.choice((8.0, 1.0))})
        if structured:
            both = self.chance(0.5)
            count = 2 * draw.randint(2, 5) if both else draw.randint(2, 9)
            table = self.excluding(self.scores((count, sizes.heads)))
            far = draw.choice((count, 20, 128))
            return Made(
                pa.relative_position_bias,
                (self.given(table, self.other),),
                {"bidirectional": both, "max_distance": far},
            )
        return self.given(self.excluding(self.scores(self.narrowed(sizes.scores))), self.other)

    def excluding(self, x):
        """Return numbers of which some may be −inf."""
        return np.where(self.rng.random(x.shape) < self.draw.choice((0, 0, 0.2, 0.9)), -np.inf, x)

    def q_offset(self):
        sizes = self.sizes
        if self.chance(0.05):
            return self.draw.choice(EXTREMES)
        return self.per_entry(-sizes.n_q - 1, sizes.n_k + 3)

    def window(self):
        return tuple([self.draw.choice((None, self.draw.randint(0, 4), self.draw.randint(0, 45), FAR)) for _ in "lr"])

    def segments(self):
        low, high = self.draw.choice(((0, 3), (-2, 2)))
        kind = "int32" if self.few else self.draw.choice(("int32", "int64", "int8"))
        lead = self.narrowed(self.sizes.lead)
        return tuple([
            self.given(np.sort(self.rng.integers(low, high, (*lead, n)), axis=-1), kind)
            for n in (self.sizes.n_q, self.sizes.n_k)
        ])  # fmt: skip

    def dropout(self):
        return self.draw.choice((0.0, 0.1, 0.5, 0.9, 1.0, 1))

    def seed_of_dropout(self):
        number = self.draw.choice((self.draw.getrandbits(64), -self.draw.getrandbits(62), 7))
        if self.chance(0.7):
            return number
        kind = self.draw.choice(("int64", "uint32", "int32"))
        return Given(np.asarray(number % 2**64, dtype=np.uint64).astype(kind), kind)

    def arguments(self):
        """Return any combination of the arguments."""
        sizes, grid = self.sizes, self.kind == "grid"
        recipes = {
            "mask": (0.3, self.mask),
            "bias": (0.0 if grid and self.power > 2 else 0.3, self.bias),
            "causal": (0.4, lambda: self.draw.choice((True, 1))),
            "q_offset": (0.3, self.q_offset),
            "window": (0.2, self.window),
            "key_lengths": (0.25, lambda: self.per_entry(0, sizes.n_k + 1)),
            "segment_ids": (0.2, self.segments),
            "scale": (0.3, lambda: self.draw.choice((0.1, 1, -0.7, 0.0, np.float32(0.25), np.float64(2.0)))),
            "softcap": (0.0 if grid else 0.2, lambda: self.draw.choice((0.5, 3.0, 30, np.float32(2.0)))),
            "sinks": (0.25, lambda: self.given(self.excluding(self.scores((sizes.heads,))), self.other)),
            "dropout": (0.2, self.dropout),
        }
        chosen = {name: recipe() for name, (share, recipe) in recipes.items() if self.chance(share)}
        if grid:
            chosen["scale"] = self.scale
        if 0 < chosen.get("dropout", 0) < 1 or self.chance(0.02):
            chosen["seed"] = self.seed_of_dropout()
        bias = chosen.get("bias")
        if isinstance(bias, Made) and bias.by is pa.alibi_bias and chosen.get("q_offset") in EXTREMES:
            del chosen["q_offset"]  # ALiBi is for positions of sequences
        return chosen

    # ---- the problem ---------------------------------------------------------------------------------------------

    def problem(self, kernels, others):
        sizes = self.sizes
        host = {name: rounded(self.numbers(shape), self.dtype) for name, shape in sizes.shapes.items()}
        arguments = self.arguments()
        if self.chance(0.1) and self.kind == "normal" and not arguments.get("dropout"):
            self.poison(host, arguments)
        elif self.kind == "grid":  # gradients of their own magnitude, so that none overflows
            host["dout"], host["v"] = (
                rounded(self.rng.standard_normal(host[x].shape), self.dtype) for x in ("dout", "v")
            )
        inputs = {name: self.headless(name, x) for name, x in host.items() if name != "dout"}
        flat = all(x.ndim == 2 for x in inputs.values())
        out = host["dout"].reshape(host["dout"].shape[1 * flat :])
        upstream = {"dout": self.given(out, self.dtype)}
        if self.chance(0.4):
            wide = "float64" if self.dtype == "float64" else "float32"
            upstream["dlse"] = self.given(self.rng.standard_normal(out.shape[:-1]), wide)
        elsewhere = {}
        if kernels and self.chance(0.2):
            elsewhere["kernel"] = self.draw.choice(kernels)
        elif others and self.chance(0.02):
            elsewhere["backend"] = self.draw.choice(others)
        given_ = {name: self.given(x, self.dtype) for name, x in inputs.items()}
        return Problem(
            self.target.name, self.seed, self.index, given_, arguments, upstream, elsewhere, sizes, self.kind == "grid"
        )

    def headless(self, name, x):
        """Return an array of one head with or without its head axis."""
        return x[0] if x.ndim == 3 and len(x) == 1 and self.chance(0.5) else x

    def poison(self, host, arguments):
        """Put NaN into rows, and inf into keys and values that every query excludes."""
        masks = {name: values(x) for name, x in arguments.items() if name in MASKS}
        allowed = Pairs(self.sizes.scores, masks.pop("bias", None), **masks).allowed
        unseen = ~np.any(allowed, axis=tuple(range(allowed.ndim - 1)))  # (n_k,)
        for name in self.draw.sample(("q", "k", "v", "dout"), 2):
            x = host[name]
            if name == "dout" and "sinks" in arguments:
                continue
            if name in "kv" and unseen.any():
                x[..., unseen, :] = self.draw.choice((np.nan, np.inf, -np.inf))
            elif x.size:
                x[tuple(self.draw.randrange(n) for n in x.shape)] = np.nan


MASKS = ("mask", "bias", "causal", "q_offset", "window", "key_lengths", "segment_ids")
