"""The exports of polyattn: ``__all__`` is correct, and no function has the name of a module."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import polyattn

PUBLIC = ["polyattn", "polyattn.backend", "polyattn.errors", "polyattn.functional", "polyattn.layers", "polyattn.optim"]


def submodules(module: ModuleType) -> list[str]:
    return [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))]


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_true(name: str) -> None:
    module = importlib.import_module(name)
    exported = list(module.__all__)
    assert len(exported) == len(set(exported)), "__all__ names something twice"
    assert not [entry for entry in exported if entry.startswith("_") and entry != "__version__"]
    assert not [entry for entry in exported if not hasattr(module, entry)], "__all__ names what does not exist"
    assert set(exported) <= set(dir(module))


@pytest.mark.parametrize("name", ["polyattn", "polyattn.functional", "polyattn.layers", "polyattn.optim"])
def test_nothing_public_is_left_out(name: str) -> None:
    """A name without an underscore must be exported or be a module of the package."""
    module = importlib.import_module(name)
    visible = {entry for entry in vars(module) if not entry.startswith("_")}
    assert visible - set(module.__all__) - set(submodules(module)) - {"annotations"} == set()


@pytest.mark.parametrize("name", ["polyattn", "polyattn.functional", "polyattn.layers", "polyattn.optim"])
def test_no_module_bears_the_name_of_an_exported_function(name: str) -> None:
    module = importlib.import_module(name)
    clashes = [
        entry
        for entry in set(module.__all__) & set(submodules(module))
        if not isinstance(getattr(module, entry), ModuleType)
    ]
    assert clashes == []


@pytest.mark.parametrize(
    "name",
    [
        "attention", "attention_backward", "attention_forward", "attention_merge", "attention_weights",
        "explain", "get_backend", "list_backends", "set_backend", "to_backend", "transfers", "use_backend",
        "KVCache", "Embedding", "FeedForward", "LayerNorm", "MultiHeadAttention", "Projection", "RMSNorm",
        "ScaledDotProductAttention", "PagedKVCache", "SlidingKVCache", "TransformerBlock",
        "BackendMismatchError", "BackendUnavailableError", "CheckpointError", "DTypeError", "EngineError",
        "KernelUnsupportedError", "PolyattnError", "ShapeError", "UnknownBackendError",
        "functional", "optim",
    ],
)  # fmt: skip
def test_the_design_s_names_are_exported(name: str) -> None:
    assert name in polyattn.__all__


def test_every_operation_is_a_triple_and_documented() -> None:
    functional = polyattn.functional
    operations = [name for name in functional.__all__ if f"{name}_forward" in functional.__all__]
    assert {
        "softmax", "log_softmax", "linear", "layer_norm", "rms_norm", "attention", "mse_loss", "cross_entropy",
        "relu", "gelu", "silu", "swiglu", "geglu", "embedding",
    } <= set(operations)  # fmt: skip
    for name in operations:
        assert f"{name}_backward" in functional.__all__, name
        assert getattr(functional, name).__doc__, name
