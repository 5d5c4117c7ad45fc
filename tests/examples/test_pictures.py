"""The example that draws pictures: the layer learns, and each picture shows what it should."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import polyattn as pa

pytest.importorskip("matplotlib.figure", reason='the pictures need matplotlib: pip install "polyattn[plot]"')


def test_the_heads_learn_where_to_look_and_all_is_drawn(example: ModuleType, backend: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert example.main(["--backend", backend, "--seed", "1", "--output", str(folder)]) > 0.75

    from matplotlib.image import imread

    assert sorted(path.name for path in folder.iterdir()) == ["heads.png", "masks.png", "tiles.png", "training.png"]
    for path in folder.iterdir():
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 400, path.name
        assert len(np.unique(np.reshape(pixels, (-1, pixels.shape[-1])), axis=0)) > 50, path.name


def test_what_the_pictures_show(example: ModuleType) -> None:
    n = example.LENGTH
    weights = np.random.default_rng(0).dirichlet(np.ones(n), size=(example.HEADS, n))
    figures = example.draw(weights, [1.0, 0.1, 0.01])
    heads = [axes for axes in figures["heads"].axes if axes.get_title()]
    for axes, of_head in zip(heads, weights, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), of_head)
        assert "".join(label.get_text() for label in axes.get_xticklabels()) == example.WORD
        assert "".join(label.get_text() for label in axes.get_yticklabels()) == example.WORD[::-1]
    shares = [int(axes.images[0].get_array().sum()) for axes in figures["masks"].axes]
    assert shares == [16 * 17 // 2, 5 * 16 - 10, 21 + 10 + 21]
    (curve, baseline) = figures["training"].axes[0].get_lines()
    np.testing.assert_array_equal(curve.get_ydata(), [1.0, 0.1, 0.01])
    rows = example.written(np.arange(26 * n).reshape(26, n) // n)  # every letter at every place
    assert baseline.get_ydata()[0] == pytest.approx(np.mean(np.var(rows, axis=(0, 1))), rel=1e-5)


def test_a_misspelt_backend_is_named(example: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(pa.UnknownBackendError, match="numpi"):
        example.main(["--backend", "numpi", "--output", str(tmp_path / "folder")])
    assert list(tmp_path.iterdir()) == []
