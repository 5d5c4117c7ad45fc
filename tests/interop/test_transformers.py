"""Hugging Face's models with our attention agree with eager attention: logits, gradients, generated text.

``nox -s interop`` runs it: transformers is no part of the environments of the other sessions.
"""

from __future__ import annotations

from typing import Any

import pytest

import polyattn as pa

torch = pytest.importorskip("torch", reason='pip install "polyattn[torch]"')
transformers = pytest.importorskip("transformers", reason="nox -s interop, which installs it")

from transformers import masking_utils as masking  # noqa: E402  # below what may skip

from polyattn.interop import transformers as interop  # noqa: E402

HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "hidden_size": 32}
GROUPED = {**HEADS, "num_key_value_heads": 2, "intermediate_size": 37}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", {**HEADS, "intermediate_size": 37}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 7},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 5, "intermediate_size": 32, "num_local_experts": 4,
         "num_experts_per_tok": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
         "decoder_start_token_id": 0},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    interop.register()
    interop.register("polyattn-numpy", backend="numpy")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls of our attention, to detect a model that does not use it."""
    noted: list[str] = []
    original = interop.attention_forward

    def counted(module: Any, *tensors: Any, **arguments: Any) -> Any:
        noted.append(type(module).__name__)
        return original(module, *tensors, **arguments)

    monkeypatch.setattr(interop, "attention_forward", counted)
    return noted


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    kind, config, settings = MODELS[request.param]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()


def batch(model: Any) -> tuple[dict[str, Any], Any]:
    """Return the inputs, the first sequence padded on the left, and which results count."""
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    there = torch.ones(2, 12, dtype=torch.long)
    there[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": there}
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": ids[:, :6]}, torch.ones(2, 6, dtype=torch.bool)
    return inputs, there.bool()


def results(model: Any, implementation: str) -> tuple[Any, dict[str, Any]]:
    """Return the logits at positions that are not padded, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    inputs, counts = batch(model)
    logits = model(**inputs).logits[counts]
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["polyattn", "polyattn-numpy"])
def test_logits_and_gradients(model: Any, implementation: str, calls: list[str]) -> None:
    logits, grads = results(model, "eager")
    assert not calls
    ours, our_grads = results(model, implementation)
    layers = sum("attention" in type(m).__name__.lower() for m in model.modules() if hasattr(m, "is_causal"))
    assert len(calls) >= max(layers, 2)
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
    largest = max(float(gradient.abs().max()) for gradient in grads.values())
    for name, gradient in grads.items():
        torch.testing.assert_close(our_grads[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


def test_generation_with_a_cache(model: Any, calls: list[str]) -> None:
    if not model.can_generate():
        pytest.skip("this model fills in masked words, it does not generate")
    inputs, _ = batch(model)
    inputs.pop("decoder_input_ids", None)
    texts = []
    for implementation in ("eager", "polyattn"):
        model.set_attn_implementation(implementation)
        texts.append(model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0))
    assert calls
    assert torch.equal(*texts)


def test_a_static_cache_has_room_to_the_right(calls: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    ids = torch.randint(3, 50, (2, 9))
    texts = []
    for implementation in ("eager", "polyattn"):
        model.set_attn_implementation(implementation)
        texts.append(
            model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, cache_implementation="static",
                           disable_compile=True)
        )  # fmt: skip
    assert calls
    assert torch.equal(*texts)


def test_weights_when_they_are_asked_for() -> None:
    module = torch.nn.Identity()
    q, k, v = (torch.randn(1, heads, 5, 4) for heads in (4, 2, 2))
    out, weights = interop.attention_forward(module, q, k, v, None, is_causal=True, output_attentions=True)
    assert weights.shape == (1, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 5))
    assert (weights.triu(1) == 0).all()
    assert out.shape == (1, 5, 4, 4)
    assert interop.attention_forward(module, q, k, v, None, is_causal=True)[1] is None


def test_exclusion_written_as_a_number() -> None:
    q = torch.randn(1, 2, 3, 4)
    bias = torch.randn(1, 1, 3, 3)
    allowed = torch.tensor([True, True, False])
    for number in (torch.finfo(torch.float32).min, -torch.inf):
        written = torch.where(allowed, bias, number)
        out, _ = interop.attention_forward(torch.nn.Identity(), q, q, q, written)
        torch.testing.assert_close(out.transpose(1, 2), pa.attention(q, q, q, mask=allowed, bias=bias))


def test_dropout_follows_torchs_seed() -> None:
    q = torch.randn(1, 2, 8, 4)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(interop.attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.5, is_causal=False)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_is_causal_comes_from_the_argument_or_the_module_and_is_not_guessed() -> None:
    q = torch.randn(1, 2, 8, 4)
    module = torch.nn.Identity()
    with pytest.raises(pa.ArgumentError, match="is_causal: expected True or False, or an attention_mask; Identity"):
        interop.attention_forward(module, q, q, q, None)
    for causal in (True, False):
        module.is_causal = causal  # type: ignore[assignment]  # torch takes any attribute
        out, _ = interop.attention_forward(module, q, q, q, None)
        torch.testing.assert_close(out.transpose(1, 2), pa.attention(q, q, q, causal=causal))
        out, _ = interop.attention_forward(module, q, q, q, None, is_causal=not causal)
        torch.testing.assert_close(out.transpose(1, 2), pa.attention(q, q, q, causal=not causal))


@pytest.mark.parametrize("name", ["Splinter", "ClapText", "AlignText", "MarkupLM", "LayoutLM"])
def test_an_encoder_whose_attention_has_no_is_causal_sees_to_the_right(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=10,
        initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    assert not hasattr(model.encoder.layer[0].attention.self, "is_causal")
    ids = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4]])
    for inputs in ({}, {"attention_mask": torch.ones_like(ids)}):
        states = []
        for implementation in ("eager", "polyattn"):
            model.set_attn_implementation(implementation)
            states.append(model(ids, **inputs).last_hidden_state[:, 0].detach())
        eager, ours = states
        assert (eager[0] - eager[1]).abs().max() > 1e-3
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-6)


def test_masks_are_eagers_and_hold_no_numbers_until_they_are_read() -> None:
    causal = {"batch_size": 2, "q_length": 3, "kv_length": 3}
    decode = {"batch_size": 2, "q_length": 1, "kv_length": 3, "q_offset": 2}
    padded = {**causal, "attention_mask": torch.tensor([[False, True, True], [True, True, True]])}
    full = {**causal, "mask_function": masking.bidirectional_mask_function, "allow_is_causal_skip": False}
    for arguments in (causal, decode, padded, full):
        ours = masking.ALL_MASK_ATTENTION_FUNCTIONS["polyattn"](**arguments)
        eager = masking.eager_mask(**arguments)
        assert ours.numbers is None
        assert ours.shape == eager.shape
        torch.testing.assert_close(ours + 0, eager)
        torch.testing.assert_close(ours[..., :2], eager[..., :2])
    skipped = {**full, "allow_is_bidirectional_skip": True}
    assert masking.eager_mask(**skipped) is masking.ALL_MASK_ATTENTION_FUNCTIONS["polyattn"](**skipped) is None


@torch.no_grad()
def test_layers_compiled_one_by_one_take_the_masks() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    inputs, counts = batch(model)
    every = ({"input_ids": inputs["input_ids"]}, inputs)
    model.set_attn_implementation("eager")
    eager = [model(**given).logits for given in every]
    model.set_attn_implementation("polyattn")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for given, expected in zip(every, eager, strict=True):
        torch.testing.assert_close(model(**given).logits[counts], expected[counts], rtol=0, atol=1e-5)


def test_what_a_model_writes_into_its_mask_counts() -> None:
    q = torch.randn(1, 2, 3, 4)
    forward = transformers.AttentionInterface()["polyattn"]
    mask = masking.ALL_MASK_ATTENTION_FUNCTIONS["polyattn"](batch_size=1, q_length=3, kv_length=3)
    torch.testing.assert_close(
        forward(torch.nn.Identity(), q, q, q, mask)[0].transpose(1, 2), pa.attention(q, q, q, causal=True)
    )
    assert mask.numbers is None
    mask[..., 2, 0] = torch.finfo(torch.float32).min
    allowed = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
    torch.testing.assert_close(
        forward(torch.nn.Identity(), q, q, q, mask)[0].transpose(1, 2), pa.attention(q, q, q, mask=allowed)
    )


def test_what_is_not_understood_is_refused() -> None:
    q = torch.randn(1, 2, 8, 4)
    for name, reason in interop.UNKNOWN.items():
        with pytest.raises(pa.ArgumentError, match=f"polyattn does not know this model's {name}.*{reason}"):
            interop.attention_forward(torch.nn.Identity(), q, q, q, None, is_causal=False, **{name: object()})
    with pytest.raises(pa.UnknownBackendError):
        interop.register("nowhere", backend="nowhere")
