"""Models in several files: files of transformers are read, and transformers loads ours, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_shards

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("mapped", [False, True])
def test_what_transformers_saves_is_read(model: Any, tmp_path: Path, mapped: bool) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tensors, _ = read_tensors(tmp_path / INDEX, mapped=mapped)
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, x in tensors.items():
        assert torch.equal(pa.to_backend(x, "torch").view(torch.int16), expected[name].view(torch.int16)), name


def test_what_is_written_transformers_loads(model: Any, tmp_path: Path) -> None:
    model.config.save_pretrained(tmp_path)
    assert len(write_shards(tmp_path / INDEX, model.state_dict(), {"format": "pt"}, shard_size=20_000)) > 1
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(loaded[name].view(torch.int16), x.view(torch.int16)), name
