"""If inputs and the exact result are finite in the dtype, the result is finite, at both ends of the dtype's range.

Operation × dtype × magnitudes, against decimal numbers of any magnitude. A subnormal result may differ by a
few of the subnormal ones, and by the least normal number where a library flushes those to zero, as XLA does on the
CPU; inputs are normal numbers.
"""

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import TOLERANCES
from polyattn.testing.references import _exact as ref

F = pa.functional
LIMITS = {  # the largest number, the least normal one, the least subnormal one
    "float64": (np.finfo("f8").max, 2.0**-1022, 2.0**-1074),
    "float32": (float(np.finfo("f4").max), 2.0**-126, 2.0**-149),
    "bfloat16": (2.0**128 - 2.0**120, 2.0**-126, 2.0**-133),
    "float16": (65504.0, 2.0**-14, 2.0**-24),
}
MAGNITUDES = {  # tiny, ordinary, large, and close to the largest
    "float64": (1e-300, 1.0, 1e200, 1e308),
    "float32": (1e-36, 1.0, 2e19, 2e38),
    "bfloat16": (1e-36, 1.0, 3e19, 2e38),
    "float16": (1e-3, 1.0, 300.0, 3e4),
}


class Checker:
    """Arrays of a dtype, and the tolerance of results."""

    def __init__(self, make: Any, to_np: Any, dtype: str) -> None:
        self.dtype, self._make, self._to_np = dtype, make, to_np
        self.largest, least, subnormal = LIMITS[dtype]
        halved = make([least], dtype) * make([0.5], dtype)
        flushes = to_np(halved * make([1.0 / least if dtype != "float16" else 1024.0], dtype))[0] == 0
        self.slack = 2 * least if flushes else 4 * subnormal

    def arrays(self, *hosts: Any) -> list[tuple[Any, Any]]:
        """Return for each NumPy array that of the library, and its exact values."""
        natives = [self._make(np.clip(host, -self.largest, self.largest), self.dtype) for host in hosts]
        return [(native, ref.exact(self._to_np(native))) for native in natives]

    def check(self, actual: Any, expected: Any, what: str, *, size: Any = None) -> None:
        """Compare the results that are finite in the dtype, relative to each result or to ``size``."""
        got = self._to_np(actual)
        want = np.broadcast_to(np.asarray(expected, dtype=object), got.shape)
        size = np.abs(want) if size is None else np.broadcast_to(size, got.shape)
        fits = np.abs(want) <= Decimal(self.largest)
        assert np.isfinite(got[fits]).all(), (
            f"{what} ({self.dtype}): expected {want[fits].astype(float)}, got {got[fits]}"
        )
        allowed = size * (4 * Decimal(TOLERANCES[self.dtype])) + Decimal(self.slack)
        got = ref.exact(np.where(fits, got, 0))
        wrong = fits & (np.abs(got - want) > allowed)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{what}{list(at)} ({self.dtype}): expected {float(want[at])!r}, got {float(got[at])!r}"
            )


@pytest.fixture
def checker(make: Any, to_np: Any, dtype: Any) -> Checker:
    return Checker(make, to_np, dtype)


X = np.array([[1.0, -0.7, 0.4, 0.9, -0.1], [0.6, 0.5, -0.9, 0.2, 0.8], [-0.3, 1.0, 0.7, 0.6, 0.1]])
DY = np.array([[0.3, 0.8, -0.6, 0.1, 1.0], [-0.9, 0.4, 0.2, 0.7, -0.2], [0.5, -1.0, 0.3, 0.6, 0.9]])
WEIGHT = np.array([0.9, -0.5, 1.0, 0.4, -0.8])


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms(checker: Any, name: Any, eps: Any) -> None:
    """Rows of different magnitudes in one array; the gradient is 1 / root times that of the result."""
    scales = MAGNITUDES[checker.dtype]
    for of_x, of_dy, of_weight in itertools.product(scales, scales, scales):
        # Each row has one magnitude: products of both ends of the range within a row are not checked.
        rows = np.array([[of_x], [1.0], [of_x]])
        (x, x_), (weight, w_), (dy, dy_) = checker.arrays(X * rows, WEIGHT * of_weight, DY * of_dy)
        y, cache = getattr(F, f"{name}_forward")(x, weight, eps=eps)
        grads = getattr(F, f"{name}_backward")(dy, cache)
        want_y, want_dx, want_dw = ref.exactly(ref.norm_and_gradients, dy_, x_, w_, eps, name == "layer_norm")
        what = f"{name} of x {of_x:g}, dy {of_dy:g}, weight {of_weight:g}, eps {eps:g}: "
        for got, want, of in ((y, want_y, "y"), (grads.x, want_dx, "dx"), (grads.weight, want_dw, "dweight")):
            checker.check(got, want, what + of, size=np.max(np.abs(want), axis=-1, keepdims=True))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_of_the_largest(checker: Any, to_np: Any, name: Any) -> None:
    """The sum of equal numbers overflows, and their root may round up; two opposite numbers give ±1 and gradient 0."""
    bias = [] if name == "rms_norm" else checker.arrays(np.full(8, 0.5))
    for signs in (np.ones(8), np.array([1.0, -1.0] * 4)):
        ((x, _), (one, _)) = checker.arrays(checker.largest * signs[None], np.ones(8))
        y, cache = getattr(F, f"{name}_forward")(x, one, *(b for b, _ in bias))
        centred = signs if name == "rms_norm" or signs[1] < 0 else 0 * signs
        np.testing.assert_allclose(to_np(y)[0], centred + (0.5 if bias else 0.0), rtol=TOLERANCES[checker.dtype])
        dx = getattr(F, f"{name}_backward")(checker.arrays(np.ones((1, 8)))[0][0], cache).x
        assert np.isfinite(to_np(dx)).all()


ACTIVATIONS: dict[str, Any] = {
    "silu": ("silu", "swiglu", {}, ref.silu_and_slope),
    "gelu": ("gelu", "geglu", {}, ref.gelu_and_slope),
    "gelu-tanh": ("gelu", "geglu", {"approximate": "tanh"}, ref.gelu_tanh_and_slope),
}
INPUTS = {"silu": (-2e2, -150.0, -89.0), "gelu": (-25.0, -17.0, -13.3), "gelu-tanh": (-14.0, -9.5, -9.0)}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations(checker: Any, case: Any) -> None:
    """A factor that underflows is multiplied by a large dy or up, and a product that overflows by such a factor."""
    unit, gated, options, exact = ACTIVATIONS[case]
    low, _, _, high = MAGNITUDES[checker.dtype]
    far = INPUTS[case] if checker.dtype != "float64" else tuple(3 * x for x in INPUTS[case])
    gates = np.array([-checker.largest, -1e3, *far, -4.0, -0.3, -low, low, 0.3, 1.2, 4.0, 25.0, high, checker.largest])
    ends = np.array([low, -1e-2 * high**0.5, 1.0, -(high**0.5), 0.9 * checker.largest])
    grid = [part.reshape(-1) for part in np.meshgrid(gates, ends, ends, indexing="ij")]
    (gate, gate_), (up, up_), (dy, dy_) = checker.arrays(*grid)
    values = {x: ref.exactly(exact, x) for x in set(gate_)}
    value, slope = (np.array([values[x][i] for x in gate_]) for i in (0, 1))

    def products() -> Any:
        return value * up_, dy_ * slope, dy_ * up_ * slope, dy_ * value

    want_y, want_dx, want_dgate, want_dup = ref.exactly(products)
    y, cache = getattr(F, f"{unit}_forward")(gate, **options)
    checker.check(y, value, f"{case}: y")
    checker.check(getattr(F, f"{unit}_backward")(dy, cache).x, want_dx, f"{case}: dx")
    y, cache = getattr(F, f"{gated}_forward")(gate, up, **options)
    grads = getattr(F, f"{gated}_backward")(dy, cache)
    checker.check(y, want_y, f"{gated} ({case}): y")
    checker.check(grads.gate, want_dgate, f"{gated} ({case}): dgate")
    checker.check(grads.up, want_dup, f"{gated} ({case}): dup")


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activations_alone(checker: Any, case: Any) -> None:
    """One input at a time, so that no other element selects the formula, on both sides of the overflow of a power."""
    unit, gated, options, exact = ACTIVATIONS[case]
    edge = 709.7 if checker.dtype == "float64" else 88.7
    if case != "silu":  # where 2u of the tanh approximation is at the edge; exact gelu has none
        edge = 21.15 if checker.dtype == "float64" else 10.05
    for gate in (-1.02 * edge, -edge, -0.98 * edge, -1.0, edge):
        (x, x_), (up, up_) = checker.arrays([gate], [0.9 * checker.largest])
        value, _ = ref.exactly(exact, x_[0])
        checker.check(getattr(F, unit)(x, **options), [value], f"{case} of {gate}")
        checker.check(
            getattr(F, gated)(x, up, **options), ref.exactly(lambda v=value, up_=up_: v * up_), f"{gated} of {gate}"
        )


def test_relu(checker: Any) -> None:
    ((x, x_), (dy, dy_)) = checker.arrays(
        [checker.largest, -checker.largest, LIMITS[checker.dtype][1]], [checker.largest] * 3
    )
    y, cache = F.relu_forward(x)
    checker.check(y, [x_[0], Decimal(0), x_[2]], "relu: y")
    checker.check(F.relu_backward(dy, cache).x, [dy_[0], Decimal(0), dy_[2]], "relu: dx")


def test_linear(checker: Any) -> None:
    """Partial sums that overflow although the result is finite, in the product and over the rows; large times tiny."""
    top = 0.75 * checker.largest
    signs = np.array([[1.0, 1.0, -1.0, -1.0, 1.0, -1.0], [1.0, -1.0, 1.0, 1.0, -1.0, -1.0]])
    low = MAGNITUDES[checker.dtype][0]
    for of_x, of_weight, of_bias in (
        (top, 1.0, 1.0),
        (1.0, top, 1.0),
        (top, low, 1.0),
        (top, 2.0, top),
        (low, low, 1.0),
    ):
        # The first column is six products that cancel, the second one product and a bias of the other sign.
        hosts = of_x * signs, np.stack([np.full(6, of_weight), of_weight * np.eye(6)[0]], 1), np.full(2, -of_bias)
        (x, x_), (weight, w_), (bias, b_), (dy, dy_) = checker.arrays(*hosts, np.array([[1.0, 1.0], [-1.0, 1.0]]))
        y, cache = F.linear_forward(x, weight, bias)
        grads, what = F.linear_backward(dy, cache), f"linear of {of_x:g}, {of_weight:g}, {of_bias:g}: "
        for got, a, b, c, of in (
            (y, x_, w_, b_, "y"), (grads.x, dy_, w_.T, 0, "dx"), (grads.weight, x_.T, dy_, 0, "dweight"),
        ):  # fmt: skip
            want, size = ref.exactly(lambda a, b, c: (a @ b + c, abs(a) @ abs(b) + abs(c)), a, b, c)
            checker.check(got, want, what + of, size=size)


def test_sums_over_rows(checker: Any) -> None:
    """The gradients of bias, weight and table: +, +, −, − of a number larger than half of the largest."""
    top = 0.75 * checker.largest
    signs = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    (dy, dy_), (x, x_), (one, _), (zero, _) = checker.arrays(top * signs, [[1.0, -1.0]] * 5, np.ones(2), np.zeros(2))
    want = ref.exactly(lambda: np.sum(dy_, axis=0))
    checker.check(
        F.linear_backward(dy, F.linear_forward(x, checker.arrays(np.eye(2))[0][0], zero)[1]).bias, want, "dbias"
    )
    checker.check(F.layer_norm_backward(dy, F.layer_norm_forward(x, one, zero)[1]).bias, want, "dbias of a norm")
    for name, saved in (
        ("layer", F.layer_norm_forward(x, one, zero, eps=0.0)[1]),
        ("rms", F.rms_norm_forward(x, one, eps=0.0)[1]),
    ):
        checker.check(getattr(F, f"{name}_norm_backward")(dy, saved).weight, want * x_[0], f"dweight of {name}_norm")


def test_embedding(checker: Any, make: Any) -> None:
    """A row with five occurrences."""
    top = 0.75 * checker.largest
    (table, table_), (dy, dy_) = checker.arrays(
        np.full((2, 3), top), top * np.array([[1.0, 1, 1, -1, -1]]).T * np.ones((5, 3))
    )
    rows, cache = F.embedding_forward(make([1] * 5, "int64"), table)
    checker.check(rows, table_[1:], "embedding: y")
    checker.check(
        F.embedding_backward(dy, cache).weight[1:, :], ref.exactly(np.sum, dy_, 0)[None], "embedding: dweight"
    )


def test_rotary_embedding(checker: Any) -> None:
    """Cosines beyond 1, as tables and as YaRN's magnitude, whose products overflow where their difference does not."""
    cosine, sine = 1.2, 0.5
    (x, x_), (dy, dy_) = checker.arrays(
        checker.largest * np.array([[[0.9, 0.9], [0.4, -0.2]]]), checker.largest * np.array([[[0.9, -0.9]] * 2])
    )
    (cos, cos_), (sin, sin_) = checker.arrays(np.full((2, 1), cosine), np.full((2, 1), sine))

    def rotated(x: Any, sign: int) -> Any:
        c, s = cos_[:, 0], sign * sin_[:, 0]
        return np.stack([x[..., 0] * c - x[..., 1] * s, x[..., 1] * c + x[..., 0] * s], -1)

    y, cache = F.rotary_embedding_forward(x, tables=(cos, sin))
    checker.check(y, ref.exactly(rotated, x_, 1), "rotary: y")
    checker.check(F.rotary_embedding_backward(dy, cache).x, ref.exactly(rotated, dy_, -1), "rotary: dx")
