"""Tensors of every kind: those that require gradients stay, those without plain memory raise, others are converted."""

import warnings

import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F
from polyattn import registry

torch = pytest.importorskip("torch", reason="torch is not installed")

HOST = np.random.default_rng(4).standard_normal((3, 4))
OTHERS = [info.name for info in pa.list_backends() if info.state == "ready" and info.name != "torch"]
pytestmark = pytest.mark.parametrize("other", OTHERS)


def tensor():
    return torch.tensor(HOST)


VIEWS = {
    "expanded": lambda: tensor()[:1].expand(3, 4),
    "transposed": lambda: tensor().T,
    "strided": lambda: tensor()[:, ::2],
    "flipped": lambda: tensor().flip(0),
    "negated": lambda: torch.complex(tensor(), tensor()).conj().imag,  # the sign is pending, not stored
    "real": lambda: torch.complex(tensor(), tensor()).conj().real,
    "detached": lambda: tensor().requires_grad_().detach(),
    "of another class": lambda: torch.nn.Parameter(tensor(), requires_grad=False),
    "on cpu:0": lambda: torch.tensor(HOST, device="cpu:0"),
    "inference": lambda: torch.inference_mode()(tensor)(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_go_over_and_results_come_back(view, other):
    """The transfer log is correct: a write to the tensor changes the other library's array unless it was copied."""
    x = VIEWS[view]()
    before = x.clone().numpy()
    with pa.transfers() as account:
        there = pa.to_backend(x, other)
    np.testing.assert_array_equal(pa.to_backend(there, "numpy"), before)
    (crossing,) = account.crossings
    assert view not in ("negated", "expanded") or crossing.copied
    if view not in ("expanded", "inference"):
        x.fill_(7.0)
        shared = bool(np.all(pa.to_backend(there, "numpy") == 7.0))
        assert crossing.copied is not shared
    y = F.softmax(VIEWS[view]())
    with pa.use_backend(other):
        z = F.softmax(VIEWS[view]())
    assert type(y) is type(z) is torch.Tensor
    torch.testing.assert_close(y, z)


def test_cpu_and_cpu_0_are_one_device(other):
    q, k = tensor(), torch.tensor(HOST, device="cpu:0")
    with pa.transfers("forbid"):
        assert pa.attention(q, k, q).shape == (3, 4)
    with pa.use_backend("torch", device="cpu:0"), pa.transfers("forbid"):
        pa.attention(q, k, k)
    assert pa.attention(q, k, q, backend=other).shape == (3, 4)


@pytest.mark.parametrize("mode", ["plain", "no_grad", "parameter", "computed"])
def test_what_requires_gradients_stays(mode, other):
    x = torch.nn.Parameter(tensor()) if mode == "parameter" else tensor().requires_grad_()
    x = x * 2 if mode == "computed" else x
    context = torch.no_grad() if mode == "no_grad" else torch.enable_grad()
    with context, pa.use_backend(other), pa.transfers() as account:
        for attempt in (
            lambda: F.softmax(x),
            lambda: pa.attention(tensor(), tensor(), x),
            lambda: pa.to_backend(x, other),
            lambda: pa.Projection(4, 2, dtype="float64")(x),
        ):
            with pytest.raises(pa.BackendMismatchError, match=r"(x|v): this array requires gradients \(detach\(\) it"):
                attempt()
    # What stands before it in the call may have gone over; it itself has not, and no gradient was lost on the way.
    assert all(crossing.what in ("q", "k") for crossing in account.crossings)
    with pa.transfers("forbid"):
        F.softmax(x).sum().backward()


def test_gradients_flow_with_nothing_selected_or_torch(other):
    """And ``op_forward`` records no graph."""
    for selected in (None, "torch"):
        x = tensor().requires_grad_()
        pa.attention(x, x, x, backend=selected).square().sum().backward()
        assert torch.isfinite(x.grad).all()
        y, cache = pa.attention_forward(x, x, x, backend=selected)
        assert not y.requires_grad
        assert not cache.lse.requires_grad


def test_what_torch_func_follows_stays(other):
    def loss(t):
        return pa.attention(t, t, t, causal=True, backend=other).sum()

    for transform in (torch.func.grad(loss), torch.func.vmap(lambda row: loss(row[None]))):
        with pytest.raises(
            pa.BackendMismatchError, match=r"q: this array (requires gradients|is being traced by torch)"
        ):
            transform(tensor())
    assert torch.func.grad(lambda t: pa.attention(t, t, t).sum())(tensor()).shape == (3, 4)


def test_fake_tensors_stay(other):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(3, 4)
        assert F.softmax(x).shape == (3, 4)
        with pytest.raises(pa.BackendMismatchError, match="x: this array is being traced by torch"):
            pa.to_backend(x, other)
        labels = torch.zeros(3, dtype=torch.int64)
        assert F.cross_entropy(x, labels, reduction="none").shape == (3,)


def test_the_meta_device_has_shapes_only(other):
    """It computes shapes, with masks too, if nothing is selected; it has no values to transfer."""
    x = torch.zeros(2, 3, 4, device="meta")
    mask = torch.ones(3, 3, dtype=torch.bool, device="meta")
    with pa.transfers("forbid"):
        out, cache = pa.attention_forward(x, x, x, mask=mask, causal=True, key_lengths=2)
        grads = pa.attention_backward(out, cache)
    assert {t.device.type for t in (out, cache.lse, grads.q)} == {"meta"}
    assert out.shape == grads.v.shape == (2, 3, 4)
    for name in (other, "torch"):
        with pytest.raises(pa.BackendMismatchError, match="x: a tensor on torch's meta device has no values"):
            pa.to_backend(x, name, device="cpu")
    with pytest.raises(pa.BackendMismatchError, match="q is torch on meta, k is torch on cpu"):
        pa.attention(x, torch.zeros(2, 3, 4), x)


@pytest.mark.parametrize("kind", ["sparse", "sparse rows"])
def test_sparse_tensors_are_refused(kind, other):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that its sparse rows are new
        x = tensor().to_sparse() if kind == "sparse" else tensor().to_sparse_csr()
    for selected in (None, "torch", other):
        with pytest.raises(pa.BackendMismatchError, match=r"q: .* is sparse \(to_dense\(\) makes an array of it\)"):
            pa.attention(x, tensor(), tensor(), backend=selected)
    with pytest.raises(pa.BackendMismatchError, match=r"x: .* is sparse"):
        pa.to_backend(x, other)


def test_bfloat16(other):
    """It is converted exactly, or there is a DTypeError; it is never widened silently."""
    x = tensor().to(torch.bfloat16)
    try:
        registry.load(other).dtype("bfloat16")
    except pa.DTypeError:
        with pytest.raises(pa.DTypeError, match=r"x: .*bfloat16"):
            pa.to_backend(x, other)
        return
    with pa.use_backend(other):
        y = F.softmax(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, F.softmax(x))


def test_a_layer_copies_parameters_without_their_graph(other):
    """load_parameters copies values; with_parameters uses the given tensors, and they get gradients."""
    layer = pa.Projection(4, 2, bias=False, dtype="float64", backend="torch")
    weight = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    layer.load_parameters({"weight": weight})
    assert not layer.parameters()["weight"].requires_grad
    layer.with_parameters({"weight": weight})(tensor()).sum().backward()
    assert weight.grad is not None
    with pytest.raises(pa.BackendMismatchError, match="weight: this array requires gradients"):
        layer.with_parameters({"weight": weight}).to(other)
