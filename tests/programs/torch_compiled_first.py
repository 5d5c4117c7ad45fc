"""A program whose first call of polyattn is one that torch compiles. Run by backends/torch/test_compile_table.py."""

import sys

import polyattn as pa
from polyattn import functional as F

assert "torch" not in sys.modules

import torch  # noqa: E402  # after polyattn on purpose


def model(x, weight):
    x = F.rotary_embedding(F.linear(x, weight), scaling=F.LinearScaling(2.0))
    return pa.attention(x, x, x, bias=pa.alibi_bias(3), causal=True)


x, weight = torch.randn(2, 3, 5, 4), torch.nn.Parameter(torch.randn(4, 4))
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
(got,) = torch.autograd.grad(compiled(x, weight).sum(), weight)
with torch.compiler.set_stance("fail_on_recompile"):  # what polyattn has learnt since changes nothing
    compiled(x, weight)
(want,) = torch.autograd.grad(model(x, weight).sum(), weight)
torch.testing.assert_close(got, want)
with torch.compiler.set_stance("fail_on_recompile"):
    compiled(x, weight)
assert "polyattn.interop.torch" not in sys.modules
