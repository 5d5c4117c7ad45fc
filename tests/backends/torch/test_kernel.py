"""torch's fused attention: the reference's values, no more than it can do, and nothing that is not finite hidden."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import polyattn as pa
from polyattn.functional._arguments import checked_call, make_problem
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn_native import NativeKernel
from polyattn_torch import _kernel, _operations

REFUSED = {
    "softcap",
    "bias",
    "bias-of-heads",
    "bias-of-keys",
    "bias-excluding",
    "bias-softcap",
    "one-kv-head",
    "everything",
}
COMPUTED = [case for case in CASES if case.name not in REFUSED]


@pytest.fixture
def handed(monkeypatch):
    """Return the list of what was handed to the tiles."""
    calls, tiles = [], _kernel.TILED

    def hand(name):
        return lambda *arrays: (calls.append(name), getattr(tiles, name)(*arrays))[1]

    monkeypatch.setattr(_kernel, "TILED", SimpleNamespace(forward=hand("forward"), backward=hand("backward")))
    return calls


@pytest.fixture
def operands(monkeypatch):
    """Return the list of operands (q, k, v, causal, mask) of each fused forward."""
    calls, run = [], _operations.Cpu.forward
    monkeypatch.setattr(_operations.Cpu, "forward", staticmethod(lambda *a: (calls.append(a[:5]), run(*a))[1]))
    return calls


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(inputs, dout, dlse=None, kernel="fused", **arguments):
    """Return out, lse and the gradients that there are."""
    out, cache = pa.attention_forward(*inputs, kernel=kernel, **arguments)
    grads = pa.attention_backward(dout, cache, dlse)
    return [out, cache.lse, *(gradient for gradient in grads if gradient is not None)]


def problem_of(*shapes, dtype=torch.float32, device=None, **arguments):
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    arrays, options = checked_call(q, k, v, **arguments)
    given = {name: x for name, x in (arrays | options).items() if name not in ("q", "k", "v", "kernel")}
    return make_problem(pa.registry.ready("torch"), q, device or "cpu", **given)


@pytest.mark.parametrize("bands", ["whole", "narrow"])
@pytest.mark.parametrize("case", COMPUTED, ids=lambda case: case.name)
def test_every_case(case, bands, make, to_np, monkeypatch, handed):
    if bands == "narrow":
        monkeypatch.setattr(_kernel, "MASKED", 8)
        monkeypatch.setattr(_kernel, "LEAST", 2)
    problem = case.problem()
    inputs, arguments = problem.native(make, "float64")
    out, lse, *grads = run(inputs, make(problem.dout), make(problem.dlse), **arguments)
    expected = ref.attention(*problem.inputs, **problem.arguments)
    slopes = ref.attention_gradients(problem.dout, *problem.inputs, **{"dlse": problem.dlse, **problem.arguments})
    assert_close(to_np(out), expected.out.reshape(problem.dout.shape), what="out")
    assert_close(to_np(lse), expected.lse.reshape(problem.dlse.shape), what="lse")
    wanted = [slope for slope in slopes if slope is not None]
    for gradient, slope in zip(grads, wanted, strict=True):
        assert_close(to_np(gradient), slope)
    assert handed == (["backward"] if case.name == "large-scores" else [])  # one rounded log-sum-exp is not enough


@pytest.mark.parametrize("n_q", [1, 2, 3, 6])
@pytest.mark.parametrize("n_k", [1, 2, 4, 6])
def test_parts_cover_a_causal_problem_once(n_q, n_k):
    for offset in range(-n_q - 1, n_k + 2):
        for lengths in (None, 0, n_k // 2):
            arguments = {"causal": True, "q_offset": offset, "key_lengths": lengths}
            covered = np.zeros((n_q, n_k), dtype=int)
            for part in _kernel.parts(problem_of((1, n_q, 2), (1, n_k, 2), (1, n_k, 2), **arguments)):
                here = covered[part.rows, part.keys]
                assert not part.causal or here.shape[0] == here.shape[1]
                assert not part.masked
                assert part.more == (
                    here.size > 0 and part.rows.start < part.rows.stop and bool(covered[part.rows].any())
                )
                here += np.tri(*here.shape, dtype=int) if part.causal else 1
            want = ref.allowed_pairs((1, n_q, n_k), **{key: x for key, x in arguments.items() if x is not None})
            np.testing.assert_array_equal(covered, want[0])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"causal": True}, {"causal": True, "q_offset": 0}, {"window": (40, 0)}, {"key_lengths": 700}, {"scale": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_longer_than_torchs_own_tiles(arguments, kv_heads, handed):
    inputs = tensors((1, 4, 800, 16), (1, kv_heads, 1100, 16), (1, kv_heads, 1100, 16), dtype=torch.float32)
    (dout,) = tensors((1, 4, 800, 16), dtype=torch.float32, seed=1)
    for fused, tiled in zip(
        run(inputs, dout, **arguments), run(inputs, dout, kernel="tiled", **arguments), strict=True
    ):
        assert_close(fused.numpy(), tiled.numpy(), "float32")
    assert handed == (["backward"] if "scale" in arguments else [])  # one rounded log-sum-exp is not enough


def test_masks_of_pairs_are_made_a_band_at_a_time(operands, handed):
    inputs = tensors(*[(1, 1, 2500, 8)] * 3, dtype=torch.float32)
    mask = torch.rand((1, 1, 2500, 2500), generator=torch.Generator().manual_seed(2)) < 0.9
    results = [run(inputs, inputs[0], kernel=kernel, mask=mask) for kernel in ("fused", "tiled")]
    for fused, tiled in zip(*results, strict=True):
        assert_close(fused.numpy(), tiled.numpy(), "float32")
    assert len(operands) > 1
    assert max(mask.numel() for *_, mask in operands) <= _kernel.MASKED
    assert not handed


@pytest.mark.parametrize("arguments", [{"window": (64, 64)}, {"causal": True, "window": (100, None)}], ids=str)
def test_keys_outside_a_window_are_not_read(arguments, operands):
    pa.attention(*tensors(*[(1, 1, 4096, 8)] * 3, dtype=torch.float32), kernel="fused", **arguments)
    assert sum(q.shape[2] * k.shape[2] for q, k, *_ in operands) < 4096 * 4096 / 6


@pytest.fixture
def no_library(monkeypatch):
    """There is no native library."""
    monkeypatch.setattr(NativeKernel, "supports", lambda self, problem: "there is no library")


@pytest.mark.usefixtures("no_library")
class TestChoice:
    """Without native kernels it has every torch tensor that it can compute, and says why of the others."""

    def test_it_is_chosen(self):
        q, k, v = tensors((2, 3, 4), (2, 5, 4), (2, 5, 4))
        assert pa.attention_forward(q, k, v)[1].kernel == pa.explain(q, k, v).kernel == "fused"
        assert pa.attention_forward(q, k, v, softcap=1.0)[1].kernel == "tiled"
        layer = pa.MultiHeadAttention(4, 2, dtype="float64", backend="torch")
        assert layer.forward(q)[1].kernel == "fused"

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"softcap": 1.0}, "no softcap"),
            ({"dropout": 0.5, "seed": 0}, "torch's own random numbers"),
            ({"bias": torch.zeros(5)}, "no gradient of a bias"),
            ({"scale": 0.0}, "the scale must be positive, not 0.0"),
            ({"scale": -1.0}, "the scale must be positive, not -1.0"),
        ],
        ids=lambda x: str(x),
    )
    def test_reasons(self, arguments, reason):
        q, k, v = tensors((2, 3, 4), (2, 5, 4), (2, 5, 4), dtype=torch.float32)
        with pytest.raises(pa.KernelUnsupportedError, match=reason):
            pa.attention(q, k, v, kernel="fused", **arguments)
        assert pa.attention_forward(q, k, v, **arguments)[1].kernel == "tiled"

    def test_reasons_of_devices(self, monkeypatch):
        kernel, shapes = _kernel.FusedKernel(), [(2, 3, 4, 8)] * 3
        assert "no fused operation on meta" in kernel.supports(problem_of(*shapes, device="meta"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        for arguments, reason in (
            ({}, None),
            ({"dtype": torch.float16, "causal": True}, None),
            ({"dtype": torch.float64}, "no float64"),
            ({"dtype": torch.bfloat16}, "no bfloat16 on this device"),
            ({"window": (1, 1)}, "no mask is given"),
            ({"key_lengths": torch.tensor([1, 2])}, "no mask is given"),
        ):
            found = kernel.supports(problem_of(*shapes, device="cuda:0", **arguments))
            assert (found is None) == (reason is None)
            assert reason is None or reason in found
        assert "65535" in kernel.supports(problem_of(*[(70000, 1, 4, 8)] * 3, device="cuda:0"))

    @pytest.mark.parametrize(
        ("dtype", "width", "capability", "name"),
        [
            (torch.float16, 64, (8, 0), "Flash"),
            (torch.float16, 64, (7, 5), "Efficient"),
            (torch.bfloat16, 257, (9, 0), "Efficient"),
            (torch.float32, 64, (9, 0), "Efficient"),
        ],
    )
    def test_the_operation_on_cuda(self, dtype, width, capability, name, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        problem = problem_of(*[(2, 3, 4, width)] * 3, dtype=dtype, device="cuda:0")
        assert _operations.operation(problem) is getattr(_operations, name)

    @pytest.mark.parametrize(("name", "dtype"), [("Flash", torch.float16), ("Efficient", torch.float32)])
    def test_the_calls_on_cuda_are_ones_that_torch_knows(self, name, dtype):
        """On its meta device: names, arguments and shapes, where there is no CUDA to compute."""
        run = getattr(_operations, name)
        q, k = (torch.empty(2, 3, n, 8, dtype=dtype, device="meta") for n in (70, 50))
        out, lse = run.forward(q, k, k, False, None, 0.5)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
        grads = run.backward(out, q, k, k, out, lse, False, None, 0.5)
        assert [gradient.shape for gradient in grads] == [q.shape, k.shape, k.shape]


class TestNotFinite:
    """What is not finite is judged by the tiles, and nothing else is."""

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"causal": True},
            {"causal": True, "q_offset": -2},
            {"key_lengths": 3},
            {"window": (1, 0)},
            {"mask": torch.tensor([True, True, True, False, True, True, False])},
            {"causal": True, "sinks": torch.tensor([0.5, -1.0], dtype=torch.float64)},
        ],
        ids=lambda arguments: "-".join(arguments) or "full",
    )
    def test_as_the_tiles(self, poison, which, arguments):
        q, k, v, dout = tensors((2, 5, 4), (2, 7, 4), (2, 7, 4), (2, 5, 4))
        {"q": q, "k": k, "v": v, "dout": dout}[which][0, 3, 1] = poison
        for fused, plain in zip(
            run((q, k, v), dout, **arguments), run((q, k, v), dout, kernel="plain", **arguments), strict=True
        ):
            assert_close(fused.numpy(), plain.numpy())

    def test_a_row_of_minus_infinities_is_nan(self):
        q, k = torch.ones(1, 3, 2), torch.full((1, 4, 2), -math.inf)
        out, cache = pa.attention_forward(q, k, torch.ones(1, 4, 2), kernel="fused")
        assert out.isnan().all()
        assert cache.lse.isnan().all()

    def test_scores_that_overflow(self, handed):
        big = torch.full((1, 3, 2), 3e30)
        for sign in (1, -1):
            results = [pa.attention(big, sign * big, big, kernel=kernel) for kernel in ("fused", "plain")]
            assert torch.equal(*results) or all(x.isnan().all() for x in results)
        assert handed == ["forward", "forward"]

    def test_a_log_sum_exp_of_zero_is_one(self, handed):
        """Of the first row of zero queries, say, which torch's operation leaves like an empty row."""
        q, k, v = tensors((1, 4, 2), (1, 4, 2), (1, 4, 2))
        q[:] = 0
        out, lse, *_ = run((q, k, v), v, causal=True)
        assert lse[0, 0] == 0
        assert_close(out.numpy(), (v.cumsum(1) / torch.arange(1, 5)[:, None]).numpy())
        assert not handed

    def test_large_sums_are_not_taken_for_infinite(self):
        """The total of the output overflows, not the output."""
        q, k = tensors((1, 16, 2), (1, 16, 2), dtype=torch.float32)
        v = torch.full((1, 16, 64), 1e36)
        assert_close(pa.attention(q, k, v, causal=True, kernel="fused").numpy(), v.numpy(), "float32")


LAYOUTS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.flip(-1).contiguous().flip(-1),
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "heads last": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "one row": lambda x: x[..., :1, :].expand_as(x),
    "overlapping rows": lambda x: x.reshape(-1).as_strided(x.shape, (*x.stride()[:-2], 1, 1)),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arguments", [{}, {"causal": True}], ids=str)
def test_layouts(layout, arguments, handed):
    arrays = tensors(*[(2, 3, 6, 5)] * 4)
    for position in range(4):
        views = [LAYOUTS[layout](x) if i == position else x for i, x in enumerate(arrays)]
        packed = [x.clone(memory_format=torch.contiguous_format) for x in views]
        results = (run(views[:3], views[3], **arguments), run(packed[:3], packed[3], **arguments))
        for got, want in zip(*results, strict=True):
            assert_close(got.numpy(), want.numpy(), scale=1.0)
    assert not handed


@pytest.mark.parametrize("layout", ["packed", "heads last"])
def test_nothing_is_copied_without_need(layout, operands):
    arrays = tensors(*[(2, 3, 6, 4)] * 3)
    views = arrays if layout == "packed" else [LAYOUTS[layout](x) for x in arrays]
    out = pa.attention(*views, causal=True, kernel="fused")
    ((*seen, _, _),) = operands
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in views]
    assert out.stride() == views[0].stride()


def test_grouped_heads_that_see_every_key_are_not_repeated(operands):
    q, k, v = tensors((2, 6, 1, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    out = pa.attention(q, k, v, causal=True, kernel="fused")
    ((_, seen, *_),) = operands
    assert seen.data_ptr() == k.data_ptr()
    assert seen.numel() == k.numel()
    assert_close(out.numpy(), ref.attention(q.numpy(), k.numpy(), v.numpy(), causal=True).out)


def test_dlse_is_no_column_of_sixteen_bits(handed):
    """It keeps its precision: with few bits for it the tiles take the backward, or float32 does."""
    for dtype in (torch.float16, torch.bfloat16):
        inputs = tensors(*[(1, 6, 4)] * 3, dtype=dtype)
        dout, dlse = torch.zeros(1, 6, 4, dtype=dtype), torch.full((1, 6), 1.0 + 2**-10)
        _, _, dq, *_ = run(inputs, dout, dlse)
        want = ref.attention_gradients(np.zeros((1, 6, 4)), *(x.double().numpy() for x in inputs), dlse=dlse.numpy())
        assert_close(dq.double().numpy(), want.q, str(dtype).removeprefix("torch."))
    assert not handed


@pytest.mark.parametrize("causal", [False, True])
def test_precision_at_length(causal):
    """Within 2e-6 in float32, and nowhere worse than torch's own by more than a factor of two."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        n = 4096 if dtype == torch.float32 else 256
        q, k, v, dout = tensors(*[(1, 1, n, 64)] * 4, dtype=dtype)

        def by_torch(*leaves, dout=dout):
            leaves = [x.detach().requires_grad_() for x in leaves]
            out = sdpa(*leaves, is_causal=causal)
            return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

        ours, theirs = run((q, k, v), dout, causal=causal), by_torch(q, k, v)
        for got, own, want in zip(
            [ours[0], *ours[2:]], theirs, by_torch(*(x.double() for x in (q, k, v))), strict=True
        ):
            error, of_torch = (float((x.double() - want).abs().max() / want.abs().max()) for x in (got, own))
            assert error <= max(2 * of_torch, 1e-7)
            assert error <= 2e-6 or dtype != torch.float32


class TestFollowed:
    """Nothing that torch follows through the call meets an operation without a derivative."""

    def test_no_graph_is_kept(self):
        leaves = [x.requires_grad_() for x in tensors(*[(1, 2, 5, 4)] * 3)]
        out, cache = pa.attention_forward(*leaves, causal=True, kernel="fused")
        assert cache.kernel == "fused"
        assert out.grad_fn is None
        assert all(x is None or x.grad_fn is None for x in pa.backend.flatten(cache)[0])

    def test_autograd_runs_the_fused_backward(self, handed):
        leaves = [x.requires_grad_() for x in tensors(*[(1, 2, 5, 4)] * 3)]
        (dout,) = tensors((1, 2, 5, 4), seed=1)
        got = torch.autograd.grad(pa.attention(*leaves, causal=True), leaves, dout)
        want = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True), leaves, dout
        )
        for a, b in zip(got, want, strict=True):
            assert_close(a.numpy(), b.numpy())
        assert not handed

    @pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (1, 1)}], ids=str)
    def test_second_derivatives(self, arguments, handed):
        """They have formulas of their own, beside the fused forward and backward."""
        leaves = [x.requires_grad_() for x in tensors(*[(1, 3, 2)] * 3)]
        assert torch.autograd.gradgradcheck(lambda q, k, v: pa.attention(q, k, v, **arguments), leaves)
        assert not handed

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, of forward mode
    def test_transforms(self):
        q, k, v = tensors(*[(2, 2, 3, 4)] * 3)

        def loss(q):
            return (pa.attention(q, k[0], v[0], causal=True) ** 2).sum()

        jacobian = torch.func.jacrev(loss)(q[0])
        assert_close(torch.func.jacfwd(loss)(q[0]).numpy(), jacobian.numpy())
        each = torch.func.vmap(pa.attention)(q, k, v)
        assert_close(each.numpy(), pa.attention(q, k, v).numpy())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q[0], q[0])
            slope = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
        assert_close(slope.numpy(), (jacobian * q[0]).sum().numpy())

    def test_tracing(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        q, k, v = tensors(*[(2, 2, 3, 4)] * 3)
        graph = make_fx(lambda q, k, v: pa.attention(q, k, v))(q, k, v)
        assert_close(graph(q, k, v).numpy(), pa.attention(q, k, v).numpy())
        with FakeTensorMode():
            assert pa.attention(*[torch.zeros(2, 3, 4)] * 3).shape == (2, 3, 4)

    @pytest.mark.filterwarnings("ignore::UserWarning")  # that it cannot trace all of it, which it need not
    @pytest.mark.parametrize("arguments", [{}, {"causal": True}], ids=str)
    def test_compiled(self, arguments, handed):
        compiled = torch.compile(lambda q, k, v: pa.attention(q, k, v, **arguments), backend="eager")
        arrays = tensors(*[(2, 2, 3, 4)] * 3)
        assert_close(compiled(*arrays).numpy(), pa.attention(*arrays, **arguments).numpy())
        assert not handed

    def test_inference_mode(self):
        arrays = tensors(*[(2, 2, 3, 4)] * 3)
        want = pa.attention(*arrays, causal=True)
        with torch.inference_mode():
            assert torch.equal(pa.attention(*arrays, causal=True), want)
