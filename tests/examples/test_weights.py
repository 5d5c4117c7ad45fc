"""The example that trains a torch encoder by our backward: the same outputs before and after, and it learns."""

from types import ModuleType

import numpy as np
import pytest

import polyattn as pa

torch = pytest.importorskip("torch", reason='the example is about torch: pip install "polyattn[torch]"')


def test_the_encoder_learns_by_our_backward(example: ModuleType, backend: str) -> None:
    losses, difference, learnt = example.main(["--backend", backend, "--seed", "2"])
    assert difference <= 1e-5
    assert losses[0] > 0.5
    assert learnt < 0.25 * losses[0]


def test_the_gradients_are_autograd_s(example: ModuleType) -> None:
    torch.manual_seed(1)
    model, layers = example.encoder(), example.our_layers()
    example.weights.load(layers, example.weights.from_torch(model.state_dict(), layers))
    x = np.random.default_rng(0).standard_normal((3, 5, example.WIDTH), dtype=np.float32)
    dy = np.random.default_rng(1).standard_normal(x.shape, dtype=np.float32)
    _, caches = example.forward(layers, x)
    grads = example.weights.to_torch(example.backward(layers, dy, caches), layers)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    model(torch.from_numpy(x), mask=hidden, is_causal=True).backward(torch.from_numpy(dy))
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_misspelt_backend_is_named(example: ModuleType) -> None:
    with pytest.raises(pa.UnknownBackendError, match="numpi"):
        example.main(["--backend", "numpi"])
