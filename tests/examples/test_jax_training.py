"""The JAX example: it learns, and its gradients are those of the hand-written backward."""

from types import ModuleType

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")


def test_it_learns(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = example.main(["--seed", "1"])
    assert accuracy > 0.99
    assert "of the letters of unseen texts are right" in capsys.readouterr().out


def test_the_gradients_are_those_of_the_hand_written_backward(example: ModuleType) -> None:
    model, text = example.new_model(seed=2), example.texts(np.random.default_rng(2), 8)
    by_jax = jax.jit(jax.grad(example.loss_of))(model, text)
    by_hand = jax.jit(example.gradients_by_hand)(model, text)
    assert jax.tree.structure(by_jax) == jax.tree.structure(by_hand) == jax.tree.structure(model)
    for (path, got), want in zip(jax.tree.leaves_with_path(by_jax), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(
            got, want, atol=1e-6 * (1 + np.max(np.abs(want))), err_msg=jax.tree_util.keystr(path)
        )
