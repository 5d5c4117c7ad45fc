"""Every attention class of the installed transformers agrees with its own eager attention here, or raises.

The classes are found in transformers' source: each that asks for the attention of the implementation. Each call of it
is repeated, with the arguments that the class names, on its eager function and on ours.
"""

from __future__ import annotations

import ast
import importlib
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import polyattn as pa

torch = pytest.importorskip("torch", reason='pip install "polyattn[torch]"')
transformers = pytest.importorskip("transformers", reason="nox -s interop, which installs it")

from transformers import masking_utils as masking  # noqa: E402  # below what may skip

from polyattn.interop import transformers as interop  # noqa: E402

MODELS = Path(transformers.__file__).parent / "models"
MASKS = {
    "others": ("none", "causal", "padded"),
    "modernbert_decoder": ("causal", "padded"),  # its eager function adds the mask even if there is none
    "vjepa2": ("none",),  # its eager function reads no mask, and the model passes none
}
B, H, N, D = 2, 4, 5, 8


class Call(NamedTuple):
    """A call of an attention implementation: the class, the eager function that it replaces, the arguments' source."""

    module: str
    owner: str
    eager: str
    named: dict[str, str]
    has_sinks: bool


def calls() -> list[Call]:
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        classes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
        found += [
            Call(module, owner.name, *call, "self.sinks" in ast.unparse(owner).replace("self.sinks = None", ""))
            for owner in classes
            for call in calls_in(owner)
        ]
    return found


def calls_in(owner: ast.ClassDef) -> list[tuple[str, dict[str, str]]]:
    eager: dict[str, str] = {}
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign) and "S.get_interface(" in ast.unparse(node):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            eager[ast.unparse(target)] = ast.unparse(node.value.args[1])  # type: ignore[union-attr]
    return [
        (eager[ast.unparse(node.func)], arguments_of(node))
        for node in ast.walk(owner)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in eager
    ]


def arguments_of(node: ast.Call) -> dict[str, str]:
    positional = dict(zip(("module", "query", "key", "value", "attention_mask"), node.args, strict=False))
    named = {word.arg: word.value for word in node.keywords if word.arg}
    return {name: ast.unparse(value) for name, value in {**positional, **named}.items()}


def agrees(call: Call, mask: str, is_causal: bool | None) -> bool:
    """Whether ours agrees with eager if the module sets `is_causal`; False if ours raises."""
    generator = torch.Generator().manual_seed(0)
    sinks = torch.randn(H, generator=generator) if call.has_sinks else None
    stub = SimpleNamespace(training=False, head_dim=D, num_key_value_groups=2, sinks=sinks)
    if is_causal is not None:
        stub.is_causal = is_causal
    eager = getattr(importlib.import_module(call.module), call.eager)
    grouped = "num_key_value_groups" in (*eager.__code__.co_names, *eager.__code__.co_consts)
    groups = stub.num_key_value_groups if grouped else 1
    q, k, v = (torch.randn(B, heads, N, D, generator=generator) for heads in (H, H // groups, H // groups))
    values = {
        "scaling": 0.3, "dropout": 0.0, "softcap": 2.0, "s_aux": sinks, "is_causal": is_causal,
        "output_attentions": False, "position_bias": torch.randn(1, H, N, N, generator=generator),
        "sinks": torch.randn(B, H, N, 1, generator=generator),
    }  # fmt: skip
    named = {
        # An argument not known to this test is an array: it would show if eager read it and ours did not.
        name: None if source == "None" else values.get(name, torch.arange(N))
        for name, source in call.named.items()
        if name not in ("module", "query", "key", "value", "attention_mask")
    }
    there = {"attention_mask": torch.tensor([[True] * N, [True] * (N - 1) + [False]])} if mask == "padded" else {}
    shape = {"batch_size": B, "q_length": N, "kv_length": N}
    masks = [
        None if mask == "none" or call.named.get("attention_mask") == "None" else make(**shape, **there)
        for make in (masking.eager_mask, masking.ALL_MASK_ATTENTION_FUNCTIONS["polyattn"])
    ]
    expected = eager(stub, q, k, v, masks[0], **named)[0]
    try:
        ours = transformers.AttentionInterface()["polyattn"](stub, q, k, v, masks[1], **named)[0]
    except pa.ArgumentError:
        return False
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    return True


def same_call(call: Call) -> tuple[Any, ...]:
    """Return what the result of `agrees` depends on: most classes copy the same function."""
    code = getattr(importlib.import_module(call.module), call.eager).__code__
    return code.co_code, code.co_names, str(code.co_consts), tuple(sorted(call.named.items())), call.has_sinks


def test_every_attention_class_agrees_with_eager_or_raises() -> None:
    interop.register()
    every = calls()
    assert len({(call.module, call.owner) for call in every}) > 300
    agreed, refused, wrong = 0, 0, []
    for call in {same_call(call): call for call in every}.values():
        for mask, is_causal in product(MASKS["others"], (None, False, True)):
            if mask not in MASKS.get(call.module.split(".")[2], MASKS["others"]):
                continue
            try:
                if agrees(call, mask, is_causal):
                    agreed += 1
                else:
                    refused += 1
                    assert interop.UNKNOWN.keys() & call.named.keys()
            except AssertionError as error:
                wrong.append(f"{call}, mask {mask}, is_causal {is_causal}: {error}")
    assert not wrong, "\n".join(wrong)
    assert refused < agreed / 5
