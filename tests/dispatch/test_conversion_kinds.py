"""Every kind of array of each library, to every library, with each ``copy``: unchanged and truly accounted for, or an
error that says why. ``dlpack`` stands for objects of which nothing is known but ``__dlpack__``."""

import importlib.util
from contextlib import nullcontext

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.backend import dtype_name

READY = [info.name for info in pa.list_backends() if info.state == "ready"]
BASE = np.arange(12.0).reshape(3, 4) - 5
BASE.flags.writeable = False  # each kind has memory of its own
BITS = np.array([[0x0000, 0x8000, 0x3F80, 0xC020], [0x7F80, 0xFF80, 0x0001, 0x7F7F]], dtype=np.uint16)


def torch():
    import torch

    return torch


def jax():
    import jax

    return jax


def strict():
    import array_api_strict

    return array_api_strict


def brain():
    """Return NumPy's bfloat16, which is of another package."""
    import ml_dtypes

    return BITS.copy().view(ml_dtypes.bfloat16)


def tensor():
    return torch().tensor(BASE)


def brain_tensor():
    return torch().tensor(BITS.view(np.int16)).view(torch().bfloat16)


def complex_tensor():
    return torch().complex(tensor(), tensor() + 1)


def read_only(x):
    x.flags.writeable = False
    return x


def misaligned():
    view = np.zeros(BASE.nbytes + 1, dtype=np.uint8)[1:].view(BASE.dtype).reshape(BASE.shape)
    view[...] = BASE
    return view


class Exported:
    """An object that can be imported through DLPack, and does nothing else."""

    def __init__(self, x):
        self.inner = x

    def __dlpack__(self, **options):
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


class WithNames(Exported):
    """As TensorFlow's, it has a dtype and a shape too, the names of which are its own."""

    dtype = type("dtype", (), {"name": "double"})()
    shape = property(lambda self: "any")


class Old(Exported):
    """It keeps to the protocol of before 2023, which knows no read-only memory."""

    def __dlpack__(self, stream=None):
        return self.inner.__dlpack__()


class Elsewhere(Exported):
    """It lies on an accelerator, and comes to the host when asked."""

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device != (1, 0):
            raise BufferError("not from here")
        return self.inner.copy().__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return (2, 7)


class Stuck(Elsewhere):
    def __dlpack__(self, **options):
        raise BufferError("it stays where it is")


class OldAndElsewhere(Elsewhere):
    def __dlpack__(self, stream=None):
        raise AssertionError("it cannot be asked to come to the host")


class Deviceless:
    def __dlpack__(self, **options):
        raise AssertionError("it was asked for before its device was")


KINDS = {
    "numpy": {
        "packed": lambda: BASE.copy(),
        "Fortran order": lambda: np.asfortranarray(BASE),
        "negative strides": lambda: BASE.copy()[::-1, ::-1],
        "every other": lambda: BASE.copy()[:, ::2],
        "zero strides": lambda: np.broadcast_to(BASE[0].copy(), (3, 4)),
        "read-only": lambda: read_only(BASE.copy()),
        "read-only, strided": lambda: read_only(BASE.copy())[:, ::2],
        "misaligned": misaligned,
        "big-endian": lambda: BASE.astype(">f8"),
        "complex, strided": lambda: (BASE + 1j)[:, ::2],
        "real part": lambda: (BASE + 1j).real,
        "0-d": lambda: np.array(2.5),
        "0-d, read-only": lambda: read_only(np.array(2.5)),
        "0-d integer": lambda: np.array(7),
        "0-d boolean": lambda: np.array(True),
        "scalar": lambda: np.float32(2.5),
        "empty": lambda: np.zeros((0, 3)),
        "bfloat16": brain,
        "bfloat16, negative strides": lambda: brain()[::-1, ::-1],
        "bfloat16, every other": lambda: brain()[:, ::2],
        "bfloat16, read-only": lambda: read_only(brain()),
        "bfloat16, 0-d": lambda: brain()[1:, 3:].reshape(()),
    },
    "torch": {
        "packed": tensor,
        "transposed": lambda: tensor().T,
        "every other": lambda: tensor()[:, ::2],
        "expanded": lambda: tensor()[:1].expand(3, 4),
        "0-d": lambda: tensor()[1, 2],
        "empty": lambda: tensor()[3:],
        "boolean": lambda: tensor() > 0,
        "bfloat16": brain_tensor,
        "bfloat16, transposed": lambda: brain_tensor().T,
        "bfloat16, every other": lambda: brain_tensor()[:, ::2],
        "bfloat16, 0-d": lambda: brain_tensor()[1, 2],
        "complex": complex_tensor,
        "conjugate": lambda: complex_tensor().conj(),
        "conjugate, transposed": lambda: complex_tensor().mH,
        "conjugate, 0-d": lambda: complex_tensor()[1, 2].conj(),
        "negated": lambda: complex_tensor().conj().imag,
        "parameter that is fixed": lambda: torch().nn.Parameter(tensor(), requires_grad=False),
        "detached": lambda: tensor().requires_grad_().detach(),
        "inference": lambda: torch().inference_mode()(tensor)(),
    },
    "jax": {
        "packed": lambda: jax().numpy.asarray(BASE),
        "transposed": lambda: jax().numpy.asarray(BASE).T,
        "every other": lambda: jax().numpy.asarray(BASE)[:, ::2],
        "complex": lambda: jax().numpy.asarray(BASE + 1j),
        "conjugate": lambda: jax().numpy.asarray(BASE + 1j).conj(),
        "boolean": lambda: jax().numpy.asarray(BASE > 0),
        "0-d": lambda: jax().numpy.asarray(2.5),
        "empty": lambda: jax().numpy.zeros((0, 3)),
        "bfloat16": lambda: jax().numpy.asarray(brain()),
        "bfloat16, transposed": lambda: jax().numpy.asarray(brain()).T,
        "bfloat16, 0-d": lambda: jax().numpy.asarray(brain())[1, 2],
    },
    "array-api-strict": {
        "packed": lambda: strict().asarray(BASE, copy=True),
        "transposed": lambda: strict().asarray(BASE, copy=True).T,
        "every other": lambda: strict().asarray(BASE, copy=True)[:, ::2],
        "expanded": lambda: strict().broadcast_to(strict().asarray(BASE[:1], copy=True), (3, 4)),
        "negative strides": lambda: strict().asarray(BASE, copy=True)[::-1, :],
        "conjugate": lambda: strict().conj(strict().asarray(BASE + 1j)),
        "0-d": lambda: strict().asarray(BASE, copy=True)[1, 2],
        "empty": lambda: strict().zeros((0, 3)),
        "on another device": lambda: strict().asarray(BASE, device=strict().Device("device1"), copy=True),
    },
    "dlpack": {
        "packed": lambda: Exported(BASE.copy()),
        "with names": lambda: WithNames(BASE.copy()),
        "negative strides": lambda: Exported(BASE.copy()[::-1, ::-1]),
        "every other": lambda: Exported(BASE.copy()[:, ::2]),
        "zero strides": lambda: Exported(np.broadcast_to(BASE[0].copy(), (3, 4))),
        "read-only": lambda: Exported(read_only(BASE.copy())),
        "complex": lambda: Exported(BASE + 1j),
        "boolean": lambda: Exported(BASE > 0),
        "0-d": lambda: Exported(np.array(2.5)),
        "empty": lambda: Exported(np.zeros((0, 3))),
        "old protocol": lambda: Old(BASE.copy()),
        "old protocol, 0-d": lambda: Old(np.array(2.5)),
        "on an accelerator": lambda: Elsewhere(BASE.copy()),
        "of torch": lambda: Exported(tensor()),
        "of torch, transposed": lambda: Exported(tensor().T),
        "of jax": lambda: Exported(jax().numpy.asarray(BASE)),
    },
}

# What does not go to another library, and what is said of it.
REFUSED = {
    "torch": {
        "requires gradients": (lambda: tensor().requires_grad_(), "requires gradients"),
        "parameter": (lambda: torch().nn.Parameter(tensor()), "requires gradients"),
        "computed": (lambda: tensor().requires_grad_() * 2, "requires gradients"),
        "0-d, requires gradients": (lambda: tensor().requires_grad_().sum(), "requires gradients"),
        "conjugate, requires gradients": (lambda: complex_tensor().requires_grad_().conj(), "requires gradients"),
        "sparse": (lambda: tensor().to_sparse(), "is sparse"),
        "meta": (lambda: torch().empty(3, device="meta"), "has no values to move|copy=None"),
    },
    "dlpack": {
        "bfloat16": (lambda: Exported(brain_tensor()), "cannot be imported through DLPack"),
        "requires gradients": (lambda: Exported(tensor().requires_grad_()), "cannot be imported through DLPack"),
        "conjugate": (lambda: Exported(complex_tensor().conj()), "cannot be imported through DLPack"),
        "old protocol, read-only": (lambda: Old(read_only(BASE.copy())), "cannot be imported .* read-?only"),
        "stuck": (lambda: Stuck(BASE), "it stays where it is|copy=None"),
        "old protocol, stuck": (lambda: OldAndElsewhere(BASE), "cannot be imported through DLPack|copy=None"),
        "without a device": (lambda: Deviceless(), "no attribute '__dlpack_device__'"),
    },
}
# The library that an object of ``dlpack`` hides, if not NumPy.
HIDDEN = {"of torch": "torch", "of torch, transposed": "torch", "of jax": "jax",
          "bfloat16": "torch", "requires gradients": "torch", "conjugate": "torch"}  # fmt: skip


def here(library, kind):
    """Say whether this machine has what a kind is made of."""
    if kind.startswith("bfloat16") and importlib.util.find_spec("ml_dtypes") is None:
        return False
    return (HIDDEN.get(kind, "numpy") if library == "dlpack" else library) in READY


def cases(table):
    return [
        pytest.param(library, kind, id=f"{library}, {kind}")
        for library, kinds in table.items()
        for kind in kinds
        if here(library, kind)
    ]


def values(x):
    """Return the values by the library's own means, on the host, in a dtype that holds all others."""
    x = x.inner if isinstance(x, Exported) else x
    shape = tuple(x.shape)
    if hasattr(x, "detach"):
        x = x.detach().resolve_conj().resolve_neg().tolist()
    elif type(x).__module__.startswith("array_api_strict"):
        x = np.from_dlpack(x.to_device(strict().Device("CPU_DEVICE")))
    x = np.array(x).reshape(shape)
    return (x.astype(np.float64) if x.dtype.name == "bfloat16" else x).astype(np.complex128)


def change(x):
    """Write other values into an array by its library's means; False where that cannot be."""
    x = x.inner if isinstance(x, Exported) else x
    if type(x).__module__.startswith("jax") or tuple(x.shape) == () or 0 in x.shape:
        return False
    one, other = (True, False) if "bool" in str(x.dtype) else (1.0, 2.0)
    try:
        x[...] = one
        x[0, ...] = other
    except (RuntimeError, ValueError):  # read-only, of inference, or one element for many
        return False
    return True


def seen(x, there):
    """Say whether a change of one array shows in the other; None where neither can be changed."""
    for one, other in ((x, there), (there, x)):
        before = values(other)
        if change(one):
            return not np.array_equal(values(other), before)
    return None


@pytest.mark.parametrize(("library", "kind"), cases(KINDS))
def test_it_arrives_unchanged(library, kind, target):
    for copy in (None, True, False):
        expect_arrival(library, kind, target, copy)


def expect_arrival(library, kind, target, copy):
    x = KINDS[library][kind]()
    expected = values(x)
    name = dtype_name((x.inner if isinstance(x, Exported) else x).dtype)
    with pa.transfers() as account:
        try:
            there = pa.to_backend(x, target, copy=copy)
        except pa.DTypeError as error:
            problem = error
        except pa.BackendMismatchError as error:
            assert copy is False, error  # noqa: PT017  # copy=None and True always find a way
            problem = error
        else:
            problem = None
    np.testing.assert_array_equal(values(x), expected)
    if isinstance(problem, pa.DTypeError):
        assert account.count == 0
        with pytest.raises(pa.DTypeError, match=name):
            registry.load(target).dtype(name)
        return
    if problem is not None:
        assert account.count == 0
        assert "copy=None" in str(problem)
        return
    assert registry.load(target).owns(there)
    assert dtype_name(there.dtype) == name
    assert tuple(there.shape) == expected.shape
    np.testing.assert_array_equal(values(there), expected)
    if library == target:
        assert account.count == 0
        assert copy or there is x or kind == "scalar"
        assert not copy or not seen(x, there)
        return
    (crossing,) = account.crossings
    assert not (copy and not crossing.copied and expected.size)
    assert not (copy is False and crossing.copied)
    if target == "numpy":
        assert there.flags.writeable
    shared = seen(x, there)
    assert shared is None or shared is not crossing.copied


@pytest.mark.parametrize(("library", "kind"), cases(REFUSED))
def test_it_is_refused(library, kind, target):
    make, reason = REFUSED[library][kind]
    x = make()
    if library == target and not reason.startswith("is "):  # it may stay where it is
        assert pa.to_backend(x, target) is x
        return
    for copy in (None, True, False):
        with pytest.raises(pa.BackendMismatchError, match=rf"^x: .*({reason})"), pa.transfers() as account:
            pa.to_backend(x, target, copy=copy)
        assert account.count == 0


def test_what_offers_nothing_is_refused(target):
    for x in ([1.0], "text", 2.5, None, memoryview(b"bytes"), BASE.copy().__dlpack__()):
        with pytest.raises(pa.BackendMismatchError, match="x: expected an array, got "):
            pa.to_backend(x, target)


def test_float8_says_who_does_not_take_it(target):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy has float8 with ml_dtypes")
    x = np.ones(3, dtype=ml_dtypes.float8_e4m3fn)
    if target == "numpy":
        assert pa.to_backend(x, target) is x
        return
    with pytest.raises(pa.PolyattnError, match=rf"^x: {target} (does not take this array|has no dtype 'float8)"):
        pa.to_backend(x, target)


def test_a_foreign_object_is_accounted_for_by_its_name(target):
    with pa.transfers() as account:
        pa.to_backend(Exported(BASE.copy()), target)
    (crossing,) = account.crossings
    assert crossing.source.endswith(f"{__name__}.Exported on cpu")
    assert crossing.target == f"{target} on cpu"
    with pytest.raises(pa.BackendMismatchError, match="transfers are forbidden here"), pa.transfers("forbid"):
        pa.to_backend(Exported(BASE.copy()), target)
    with pytest.raises(pa.BackendMismatchError, match=r"^[qkv]: expected an array, got Exported"):
        pa.attention(Exported(BASE), Exported(BASE), Exported(BASE), backend=target)


@pytest.mark.skipif("jax" not in READY, reason="jax is not installed")
def test_jax_in_32_bits_refuses_what_it_would_round():
    """The view of a foreign object is looked at before it goes over."""
    jax().config.update("jax_enable_x64", False)
    try:
        with pytest.raises(pa.DTypeError, match="x: jax is in 32-bit mode and has no float64"):
            pa.to_backend(Exported(BASE.copy()), "jax")
    finally:
        jax().config.update("jax_enable_x64", True)


@pytest.mark.skipif("jax" not in READY, reason="jax is not installed")
@pytest.mark.parametrize("selected", [None, *(name for name in READY if name != "jax")])
def test_arrays_that_jax_traces_stay(selected):
    """Under jit, grad and vmap an array never leaves JAX, and nothing is counted; with nothing selected it computes."""
    x = jax().numpy.linspace(0.0, 1.0, 12).reshape(3, 4)
    expected = pytest.raises(pa.BackendMismatchError, match=r"x: this array is being traced by JAX.*select jax")

    def loss(t):
        return (pa.functional.softmax(t) ** 2).sum()

    with pa.transfers() as account, pa.use_backend(selected) if selected else nullcontext():
        for transform in (jax().jit, jax().grad, lambda f: jax().vmap(lambda row: f(row[None]))):
            with expected if selected else nullcontext():
                transform(loss)(x)
    assert account.count == 0
