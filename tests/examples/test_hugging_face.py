"""The example of a Hugging Face model with our attention: as eager's, wherever it is computed, and it learns.

``nox -s interop`` runs it: transformers is no part of the environments of the other sessions.
"""

from types import ModuleType

import pytest

import polyattn as pa

pytest.importorskip("torch", reason='pip install "polyattn[torch]"')
pytest.importorskip("transformers", reason="nox -s interop, which installs it")


@pytest.mark.parametrize(("arguments", "least"), [((), 0.9), (("--model", "gpt2", "--backend", "numpy"), 0.2)])
def test_as_eager_and_it_learns(example: ModuleType, arguments: tuple[str, ...], least: float) -> None:
    logits, grads, losses, right, same = example.main([*arguments, "--seed", "1"])
    assert max(logits, grads) < 1e-5
    assert losses[-1] < losses[0] / 2
    assert right > least
    assert same


def test_a_misspelt_backend_is_named(example: ModuleType) -> None:
    with pytest.raises(pa.UnknownBackendError, match="numpi"):
        example.main(["--backend", "numpi"])
