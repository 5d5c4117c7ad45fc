"""The digits example, whole, on the backend under test: it learns, and leaves a picture that shows something."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install scikit-learn")
pytest.importorskip("matplotlib", reason='the picture needs matplotlib: pip install "polyattn[plot]"')


def test_digits_are_read_and_the_heads_drawn(example: ModuleType, backend: str, tmp_path: Path) -> None:
    picture = tmp_path / "new folder" / "digits.png"
    accuracy = example.main(["--backend", backend, "--seed", "3", "--output", str(picture)])
    assert 0.95 <= accuracy <= 1.0

    from matplotlib.image import imread

    pixels = imread(picture)
    assert min(pixels.shape[:2]) > 400
    assert len(np.unique(np.reshape(pixels, (-1, pixels.shape[-1])), axis=0)) > 100


def test_the_gradients_are_those_of_the_loss(example: ModuleType) -> None:
    """Central differences along the gradient itself, in float64 by way of one small model."""
    import polyattn as pa

    (x, labels), _ = example.digits(seed=0)
    x, labels = x[:6].astype(np.float64), labels[:6]
    model = example.DigitReader(width=8, heads=2, dtype="float64")
    parameters = model.parameters()

    def loss_of(values: dict[str, np.ndarray]) -> float:
        logits, _ = model.with_parameters(values).forward(x)
        return float(pa.functional.cross_entropy(logits, labels))

    logits, caches = model.forward(x)
    loss, loss_cache = pa.functional.cross_entropy_forward(logits, labels)
    dlogits = pa.functional.cross_entropy_backward(np.ones_like(loss), loss_cache).logits
    grads = model.backward(dlogits, caches)
    assert sorted(grads) == sorted(parameters)
    for name, gradient in grads.items():
        norm = float(np.sqrt(np.sum(gradient * gradient)))
        if name == "attention.k_proj.bias":  # zero by mathematics: softmax does not see what all keys share
            assert norm < 1e-12
            continue
        step = 1e-5 * gradient / norm
        above, below = (loss_of({**parameters, name: parameters[name] + sign * step}) for sign in (1, -1))
        assert (above - below) / 2e-5 == pytest.approx(norm, rel=1e-6, abs=1e-9), name


def test_a_misspelt_backend_is_named(example: ModuleType, tmp_path: Path) -> None:
    import polyattn as pa

    with pytest.raises(pa.UnknownBackendError, match="numpi"):
        example.main(["--backend", "numpi", "--output", str(tmp_path / "digits.png")])
    assert list(tmp_path.iterdir()) == []
