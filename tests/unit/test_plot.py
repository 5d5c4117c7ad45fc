"""Plots: they show attention's masks, tiles and weights, and raise clear errors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn import plot

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
pytest.importorskip("matplotlib.figure")


@pytest.fixture
def axes() -> Any:
    return matplotlib.figure.Figure().subplots()


@pytest.fixture
def figure() -> Any:
    return matplotlib.figure.Figure(layout="constrained")


def test_a_map_for_each_head_on_one_scale(figure: Any) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(17, 3))
    panels = plot.attention_map(weights, queries=["a", "b", "c"], title="seventeen", figure=figure)
    figure.draw_without_rendering()
    assert panels.shape == (4, 4)
    for head, axes in enumerate(panels.flat):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights[head])
        assert axes.images[0].get_clim() == (0.0, weights[:16].max())
    assert [label.get_text() for label in panels[0, 0].get_yticklabels()] == ["a", "b", "c"]
    assert figure.get_suptitle() == "seventeen, the first 16 of 17 heads"


def test_a_map_of_two_axes_and_of_heads_that_do_not_fill_a_row(figure: Any) -> None:
    assert plot.attention_map(np.eye(3), figure=figure).shape == (1, 1)
    panels = plot.attention_map(np.ones((5, 2, 2)), figure=matplotlib.figure.Figure())
    assert [axes.get_visible() for axes in panels.flat] == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (2, None), "q_offset": 1},
        {"key_lengths": 3},
        {"segment_ids": (np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 2, 2]))},
        {"mask": np.arange(35).reshape(5, 7) % 3 > 0},
        {"bias": np.where(np.arange(7) < 4, 5.0, -np.inf)},
    ],
    ids=lambda arguments: "-".join(arguments) or "all",
)
def test_a_mask_is_that_of_attention(arguments: dict[str, Any], axes: Any) -> None:
    plot.mask(5, 7, axes=axes, **arguments)
    q, k = (np.random.default_rng(i).standard_normal((n, 3)) for i, n in enumerate((5, 7)))
    want = pa.attention_weights(q, k, **arguments) > 0
    np.testing.assert_array_equal(axes.images[0].get_array(), want)
    assert axes.get_title() == f"{want.sum()} of 35 pairs may attend ({want.mean():.0%})"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key position", "query position")


def test_a_mask_has_one_head(axes: Any) -> None:
    with pytest.raises(pa.ShapeError, match=r"mask: expected a shape .* = \(1, 2, 3\), got \(4, 2, 3\)"):
        plot.mask(2, 3, mask=np.ones((4, 2, 3), dtype=bool), axes=axes)
    with pytest.raises(pa.ShapeError, match="n_q, n_k: expected 1 or more, got 0 and 3"):
        plot.mask(0, 3, axes=axes)


@pytest.mark.parametrize(
    ("arguments", "whole", "masked"),
    [
        ({}, 9, 0),
        ({"causal": True}, 3, 3),
        ({"causal": True, "window": (600, None)}, 0, 5),
        ({"key_lengths": 10}, 0, 3),
    ],
    ids=str,
)
def test_tiles_are_skipped_masked_or_whole(arguments: dict[str, Any], whole: int, masked: int, axes: Any) -> None:
    plot.tile_schedule(3072, 3072, axes=axes, **arguments)
    colours = [matplotlib.colors.to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    assert colours.count("#0072B2") == whole
    assert colours.count("#E69F00") == masked
    assert [text.get_text() for text in axes.texts] == [str(n + 1) for n in range(whole + masked)]
    assert axes.get_title() == (
        f"{whole + masked} of 9 tiles of 1024 × 1024: {masked} with a mask, {9 - whole - masked} skipped"
    )


def test_a_curve_needs_a_step_for_each_loss(axes: Any) -> None:
    for steps, losses in (([], []), ([1, 2], [0.5])):
        with pytest.raises(pa.ShapeError, match="steps, losses: expected as many"):
            plot.learning_curve(steps, losses, axes=axes)


@pytest.mark.parametrize(
    ("weights", "words", "told"),
    [
        (np.ones(3), {}, r"weights: expected \(H, n_q, n_k\) or \(n_q, n_k\), none of them 0, got \(3,\)"),
        (np.ones((2, 0, 3)), {}, "none of them 0"),
        (np.ones((2, 3)), {"keys": ["one"]}, "keys: expected 3 words, one for each position, got 1"),
    ],
)
def test_weights_that_are_none(weights: Any, words: Any, told: str, figure: Any) -> None:
    with pytest.raises(pa.ShapeError, match=told):
        plot.attention_map(weights, figure=figure, **words)


def test_without_axes_pyplot_makes_some() -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    try:
        assert plot.mask(3, 3).figure.number in pyplot.get_fignums()
        assert plot.attention_map(np.eye(2))[0, 0].figure.number in pyplot.get_fignums()
    finally:
        pyplot.close("all")


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plot.mask(2, 2),
        lambda: plot.tile_schedule(2, 2),
        lambda: plot.attention_map(np.eye(2)),
        lambda: plot.learning_curve([1], [1.0]),
    ):
        with pytest.raises(pa.BackendUnavailableError, match=r'pip install "polyattn\[plot\]"'):
            draw()
