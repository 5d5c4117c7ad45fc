"""``polyattn train``: its accuracy, its files, and its backend."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import polyattn as pa
from polyattn.backend import Status
from polyattn.checkpoint import read_tensors
from polyattn.registry import load
from polyattn.training import _pictures
from polyattn.training._config import Config
from polyattn.training._measure import measure
from polyattn.training._model import Model, inverse_sqrt
from polyattn.training._progress import Reporter
from polyattn.training._samples import PointerCopy

KEYS = {
    "backend", "device", "dtype", "steps", "resumed_from", "seconds", "steps_per_second", "loss", "baseline_loss",
    "loss_ratio", "pointer_accuracy", "evaluated_on", "output",
}  # fmt: skip
SMALL = ("--batch", 8, "--sequence", 4, "--width", 4, "--json")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_defaults_learn_the_task_in_time(process: Any, backend: str, tmp_path: Path) -> None:
    began = time.monotonic()
    result = process("train", "--backend", backend, "--json").result
    seconds = time.monotonic() - began
    assert result.keys() >= KEYS
    assert result["backend"] == backend
    assert result["loss_ratio"] <= 0.02
    assert result["loss"] / result["baseline_loss"] == result["loss_ratio"]
    assert result["pointer_accuracy"] >= 0.98
    assert result["steps"] == len(lines(tmp_path / result["output"])) == 2000
    if backend == "numpy":
        assert seconds < 30


def test_a_run_writes_its_files(command: Any, backend: str, tmp_path: Path) -> None:
    result = command("train", "--backend", backend, "--steps", 30, "--output", "run", *SMALL).result
    assert result["output"] == "run"
    assert result["device"] in load(backend).devices()
    names = {"checkpoint.safetensors", "metrics.jsonl", "loss.png", "attention.png"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    logged = lines(tmp_path / "run")
    assert [line["step"] for line in logged] == list(range(1, 31))
    assert logged[0]["loss"] > logged[-1]["loss"] > 0
    assert logged[0]["learning_rate"] == 0.05 / 200
    tensors, metadata = read_tensors(tmp_path / "run" / "checkpoint.safetensors")
    assert metadata["step"] == "30"
    layer = pa.MultiHeadAttention(4, 2)
    layer.load_parameters({name: x for name, x in tensors.items() if not name.startswith("optim.")})
    assert {f"optim.mean.{name}" for name in layer.parameters()} < tensors.keys()
    for name in ("loss.png", "attention.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")


def test_the_saved_layer_gives_the_reported_loss(command: Any, backend: str, tmp_path: Path) -> None:
    result = command("train", "--backend", backend, "--steps", 20, "--output", "run", *SMALL).result
    tensors, _ = read_tensors(tmp_path / "run" / "checkpoint.safetensors")
    layer = pa.MultiHeadAttention(4, 2)
    layer.load_parameters({name: x for name, x in tensors.items() if not name.startswith("optim.")})
    x, y = PointerCopy(4, 4, 8, 0).evaluation()
    error = np.mean((np.float64(layer(x.astype(np.float32))) - y) ** 2)
    np.testing.assert_allclose(result["loss"], error, rtol=1e-5)
    np.testing.assert_allclose(result["baseline_loss"], np.mean((y - y.mean((0, 1))) ** 2), rtol=1e-12)


def test_without_options_each_run_has_a_folder_of_its_own(command: Any, tmp_path: Path) -> None:
    outputs = [command("train", "--steps", 1, *SMALL).result["output"] for _ in range(2)]
    assert len(set(outputs)) == 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(Path(path).name for path in outputs)


def test_the_summary_is_for_people(command: Any) -> None:
    code, out, err = command("train", "--steps", 5, "--output", "run", *SMALL[:-1])
    assert code == 0
    for words in ("numpy on cpu, float32: step 5", "loss", "predicting the mean row", "pointer accuracy", "run"):
        assert words in out
    assert "step 5/5  loss" in err


def test_the_environment_selects(command: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", backend)
    assert command("train", "--steps", 1, *SMALL).result["backend"] == backend
    monkeypatch.setenv("POLYATTN_BACKEND", "array-api-strict")
    assert command("train", "--backend", "numpy", "--steps", 1, *SMALL).result["backend"] == "numpy"
    monkeypatch.setenv("POLYATTN_BACKEND", "torhc")
    assert "POLYATTN_BACKEND=torhc" in command("train", "--steps", 1, *SMALL).refused(2)
    monkeypatch.delenv("POLYATTN_BACKEND")
    assert command("train", "--steps", 1, *SMALL).result["backend"] == "numpy"


def test_a_backend_that_cannot_be_used_is_told_with_its_remedy(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status = Status("not installed", reason="the package cupy is missing", install='pip install "polyattn[cuda12x]"')
    monkeypatch.setattr(type(load("cupy")), "status", lambda _: status)
    monkeypatch.setattr(sys.modules["polyattn.registry"]._registry, "ready", {})
    told = command("train", "--backend", "cupy").refused(1)
    assert "the package cupy is missing" in told
    assert 'pip install "polyattn[cuda12x]"' in told


def test_every_dtype_of_the_library_trains(command: Any, backend: str, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="checkpoints of bfloat16 need ml_dtypes")
    result = command("train", "--backend", backend, "--dtype", dtype, "--steps", 3, *SMALL).result
    assert result["dtype"] == dtype
    assert 0 < result["loss"] < 10


@pytest.mark.parametrize("other", ["torch", "jax", "array-api-strict", "cupy"])
def test_the_loss_curves_of_all_backends_agree_in_float64(float64_curve: Any, other: str, backend: str) -> None:
    info = next(info for info in pa.list_backends() if info.name == other)
    if info.state != "ready" and other != backend:
        pytest.skip(f"{other} cannot be used here: {info.reason}")
    assert len(float64_curve(other)) == 100
    np.testing.assert_allclose(float64_curve(other), float64_curve("numpy"), rtol=1e-11, atol=0)


def test_the_help_tells_the_defaults(process: Any) -> None:
    code, out, _ = process("train", "--help", variables={"COLUMNS": "200"})
    assert code == 0
    defaults = {name: value for name, value in Config().to_dict().items() if value is not None}
    assert len(defaults) == 9
    for name, value in {**defaults, "checkpoint_every": 200}.items():
        (line,) = [line for line in out.splitlines() if f"--{name.replace('_', '-')} " in line]
        assert f"[default: {value}]" in line
    assert "POLYATTN_BACKEND, else numpy" in out


def test_a_terminal_has_a_bar_and_a_pipe_has_lines() -> None:
    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=100)
        with Reporter(0, 10, console) as reporter:
            reporter.update(5, 0.25)
            reporter.update(10, 0.125)
        shown = screen.getvalue()
        assert "10/10" in shown
        assert "0.125" in shown
        assert "steps/s" in shown
        assert ("━" in shown) == terminal
        assert ("ETA" in shown) == terminal
    assert len(shown.splitlines()) == 1


def test_a_step_moves_nothing_between_libraries(backend: str) -> None:
    model = Model(Config(batch=4), backend, None)
    params, state = model.start()
    x, y = (model.native(array) for array in PointerCopy(8, 8, 4, 0).batch(0))
    with pa.use_backend(backend), pa.transfers("forbid") as record:
        params, state, loss = model.step(params, state, x, y)
    assert record.count == 0
    assert model.fetch([loss]).shape == (1,)
    assert model.finite({**params, **state})


def test_the_samples_are_a_pure_function_of_seed_and_step() -> None:
    x, y = PointerCopy(5, 3, 7, seed=1).batch(11)
    again, _ = PointerCopy(5, 3, 7, seed=1).batch(11)
    np.testing.assert_array_equal(x, again)
    winners = x[np.arange(7), np.argmax(x[:, :, 0], axis=1)]
    np.testing.assert_array_equal(y, np.repeat(winners[:, None, :], 5, axis=1))
    for other in (PointerCopy(5, 3, 7, seed=2).batch(11)[0], PointerCopy(5, 3, 7, seed=1).batch(12)[0]):
        assert not np.any(x == other)
    assert not np.any(PointerCopy(5, 3, 7, seed=1).batch(0)[0] == PointerCopy(5, 3, 7, seed=1).evaluation()[0][:7])


def test_the_schedule_rises_then_falls_with_the_root_and_has_no_end() -> None:
    schedule = inverse_sqrt(0.1, warmup=4)
    np.testing.assert_allclose([schedule(i) for i in (0, 1, 3, 15, 1599)], [0.025, 0.05, 0.1, 0.05, 0.005], rtol=1e-15)


def test_the_measure_knows_right_from_wrong() -> None:
    x, y = PointerCopy(6, 4, 1, 0).evaluation()
    assert measure(lambda _: y[:256], (x[:256], y[:256])) == {
        "loss": 0.0,
        "baseline_loss": pytest.approx(float(np.var(y[:256] - y[:256].mean((0, 1)))), rel=1e-12),
        "loss_ratio": 0.0,
        "pointer_accuracy": 1.0,
    }
    mean_row = y.mean((0, 1))
    mean = measure(lambda inputs: np.broadcast_to(mean_row, inputs.shape), (x, y))
    assert mean["loss_ratio"] == pytest.approx(1.0, rel=1e-12)
    own_row = measure(lambda inputs: inputs, (x, y))
    assert own_row["pointer_accuracy"] == pytest.approx(1 / 6)
    assert measure(lambda inputs: inputs, (x, x + 1))["pointer_accuracy"] is None
    constant = measure(lambda inputs: inputs, (x, np.ones_like(x)))
    assert constant["baseline_loss"] == 0
    assert constant["loss_ratio"] is None


def test_without_matplotlib_only_the_pictures_are_left_out(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = command("train", "--steps", 2, "--output", "run", *SMALL)
    assert outcome.result["steps"] == 2
    assert 'no pictures: they need matplotlib, pip install "polyattn[plot]"' in outcome.err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint.safetensors", "metrics.jsonl"]


@pytest.mark.parametrize(("heads", "length"), [(1, 1), (2, 8), (6, 40), (17, 3)])
def test_the_attention_picture_has_labelled_axes_and_a_mark_on_each_target(heads: int, length: int) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    weights = np.random.default_rng(0).dirichlet(np.ones(length), size=(heads, length))
    targets = np.full(length, length - 1)
    figure = _pictures.attention_picture(weights, targets, "title")
    panels = [axes for axes in figure.axes if axes.get_xlabel() == "key position"]
    assert len(panels) == min(heads, 16)
    assert all(axes.get_ylabel() == "query position" for axes in panels)
    np.testing.assert_array_equal(panels[0].images[0].get_array(), weights[0])
    np.testing.assert_array_equal(panels[0].lines[0].get_xydata(), np.stack([targets, np.arange(length)], axis=-1))
    assert "attention weight" in {axes.get_ylabel() for axes in figure.axes}
    figure.draw_without_rendering()


def test_the_loss_picture_has_a_log_axis_and_the_baseline() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    losses = [1 / step for step in range(1, 101)]
    (axes,) = _pictures.loss_picture(range(1, 101), losses, 0.9, "title").axes
    assert axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", "mean squared error (log scale)")
    every, median, baseline = axes.lines
    np.testing.assert_array_equal(every.get_ydata(), losses)
    assert median.get_ydata()[0] == np.median(losses[:2])
    assert set(baseline.get_ydata()) == {0.9}


def test_a_single_loss_is_seen() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    (axes,) = _pictures.loss_picture([1], [0.5], 0.9, "title").axes
    assert axes.lines[0].get_marker() == "o"
    axes.figure.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_weights_that_are_all_small_use_the_whole_scale() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    weights = np.random.default_rng(0).dirichlet(np.full(50, 100.0), size=(2, 50))
    for axes in _pictures.attention_picture(weights, None, "title").axes[:2]:
        assert axes.images[0].get_clim() == (0.0, weights.max())
