"""Use polyattn in a Hugging Face model: compare logits and gradients with eager, train, and generate with a cache.

    python examples/hugging_face.py
    python examples/hugging_face.py --model qwen3 --backend numpy

Nothing is downloaded: the models are small, with random weights. For a pretrained model these lines are enough::

    from polyattn.interop.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained("…", attn_implementation="polyattn")

"eager" is transformers' own attention in plain torch; the rest of the model is the same code in both runs.
With ``--backend`` another library computes attention. Needs: pip install "polyattn[transformers]"
"""

import argparse
import sys
from typing import Any

import torch
import transformers
from threadpoolctl import threadpool_limits
from torch.nn import functional

import polyattn as pa
from polyattn.interop.transformers import register

NUMBERS, PADDING, LENGTH = 32, 32, 12
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": NUMBERS + 1}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PADDING}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **SPECIAL, num_key_value_heads=2, intermediate_size=128),
    "gpt2": lambda: transformers.GPT2Config(**SIZES, **SPECIAL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen3": lambda: transformers.Qwen3Config(
        **SIZES, **SPECIAL, num_key_value_heads=2, head_dim=16, intermediate_size=128
    ),
}

Tensor = torch.Tensor


def rows(count: int, length: int = LENGTH) -> Tensor:
    """Return arithmetic sequences modulo 32, each with its own start and step."""
    start, step = torch.randint(NUMBERS, (count, 1)), torch.randint(1, 8, (count, 1))
    return (start + step * torch.arange(length)) % NUMBERS


def loss_of(logits: Tensor, ids: Tensor, there: Tensor) -> Tensor:
    """Return the cross-entropy of predicting each next number that is not padding."""
    return functional.cross_entropy(logits[:, :-1][there[:, 1:].bool()], ids[:, 1:][there[:, 1:].bool()])


def logits_and_gradients(model: Any, implementation: str, ids: Tensor, there: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits at positions that are not padding, and the gradients of their loss."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=there).logits
    loss_of(logits, ids, there).backward()
    return logits[there.bool()].detach(), [p.grad for p in model.parameters() if p.grad is not None]


def differences(model: Any) -> tuple[float, float]:
    """Return the largest differences from eager in logits and gradients, relative to the largest element."""
    ids, there = rows(8), torch.ones(8, LENGTH, dtype=torch.long)
    there[::2, -5:] = 0  # every other row is shorter, and padded
    ids = torch.where(there.bool(), ids, PADDING)
    (ours, grads), (eager, eager_grads) = (
        logits_and_gradients(model, implementation, ids, there) for implementation in ("polyattn", "eager")
    )
    largest = max(float(g.abs().max()) for g in eager_grads)
    apart = max(float((g - e).abs().max()) for g, e in zip(grads, eager_grads, strict=True))
    return float((ours - eager).abs().max() / eager.abs().max()), apart / largest


def train(model: Any, steps: int) -> list[float]:
    """Train the model to continue sequences, with polyattn's backward in attention; return the losses."""
    model.set_attn_implementation("polyattn")
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        ids = rows(32)
        loss = loss_of(model(input_ids=ids).logits, ids, torch.ones_like(ids))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def continued(model: Any, implementation: str, start: Tensor, count: int) -> Tensor:
    """Return what the model generates after the start, one token at a time, with a key-value cache."""
    model.set_attn_implementation(implementation)
    written = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=count, do_sample=False, use_cache=True
    )
    return written[:, start.shape[1] :]


def main(arguments: list[str] | None = None) -> tuple[float, float, list[float], float, bool]:
    parser = argparse.ArgumentParser(description="Use polyattn in a Hugging Face model.")
    parser.add_argument("--model", choices=MODELS, default="llama", help="default: %(default)s")
    parser.add_argument("--backend", help="the backend of attention; default: POLYATTN_BACKEND, or torch")
    parser.add_argument("--steps", type=int, default=150, help="training steps; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)

    register(backend=options.backend)
    torch.manual_seed(options.seed)
    with threadpool_limits(1):  # threads do not speed up matrices of this size
        model = transformers.AutoModelForCausalLM.from_config(MODELS[options.model]())
        logits, grads = differences(model)
        print(f"logits within {logits:.1e} of eager's, gradients within {grads:.1e}")

        losses = train(model, options.steps)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps")

        whole, model = rows(64, 14), model.eval()
        start, wanted = whole[:, :6], whole[:, 6:]
        written = continued(model, "polyattn", start, wanted.shape[1])
        same = torch.equal(written, continued(model, "eager", start, wanted.shape[1]))
    right = float((written == wanted).float().mean())
    print(f"{start[0].tolist()} goes on {written[0].tolist()}")
    print(f"{right:.1%} of what it writes is right; eager writes {'the same' if same else 'something else'}")
    return logits, grads, losses, right, same


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"hugging_face: {error}")
