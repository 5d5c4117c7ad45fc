"""``polyattn explain``: its output on each backend, without arrays of the given shapes."""

import json
from typing import Any

import pytest

import polyattn as pa
from polyattn import registry


def test_it_says_what_pa_explain_says(command: Any, backend: str) -> None:
    native = registry.ready(backend)
    xp = native.namespace()
    q, k, v = (xp.zeros(shape, dtype=xp.float32) for shape in ((2, 4, 64, 16), (2, 2, 128, 16), (2, 2, 128, 8)))
    mask, bias = xp.ones((64, 128), dtype=xp.bool), xp.zeros((4, 1, 128), dtype=xp.float32)
    sinks, ids = xp.zeros(4, dtype=xp.float32), (xp.zeros(64, dtype=xp.int32), xp.zeros(128, dtype=xp.int32))
    expected = pa.explain(
        q, k, v, mask=mask, bias=bias, causal=True, window=(32, None), q_offset=-3, key_lengths=100, scale=0.5,
        softcap=20.0, sinks=sinks, dropout=0.25, seed=0, segment_ids=ids, backend=backend,
    )  # fmt: skip
    found = command(
        "explain", "--q", "2,4,64,16", "--k", "2,2,128,16", "--v", "2,2,128,8", "--mask", "64,128", "--bias", "4,1,128",
        "--causal", "--window", "32,", "--q-offset", -3, "--key-lengths", 100, "--scale", 0.5, "--softcap", 20,
        "--sinks", "--dropout", 0.25, "--segments", "--backend", backend, "--json",
    )  # fmt: skip
    assert found.result == json.loads(json.dumps({**vars(expected), "device": native.devices()[0]}))


def test_without_json_it_prints_the_same(command: Any, backend: str) -> None:
    code, out, err = command("explain", "--q", "1,8,256,64", "--backend", backend)
    assert (code, err) == (0, "")
    said = command("explain", "--q", "1,8,256,64", "--backend", backend, "--json").result
    assert out.splitlines()[0] == f"kernel    {said['kernel']}, on {backend} ({said['device']})"
    for name, reason in said["refusals"].items():
        assert f"not       {name}: {reason}" in out


def test_no_array_of_that_size_is_made(command: Any, backend: str) -> None:
    n = 10**9  # q alone would take 2 TiB, the mask 10^18 bytes
    arguments = ("--q", f"1,8,{n},64", "--mask", f"{n},{n}", "--causal", "--backend", backend, "--json")
    found = command("explain", *arguments).result
    assert found["bytes"] == 4 * 4 * 8 * 64 * n
    assert found["forward_flops"] == 2 * 8 * n * n * 128
    assert found["moved_from"] is None


def test_the_kernel_may_be_forced(command: Any, backend: str) -> None:
    arguments = ("explain", "--q", "2,64,16", "--backend", backend, "--kernel")
    assert command(*arguments, "plain", "--json").result["kernel"] == "plain"
    assert "no kernel 'flash'" in command(*arguments, "flash").refused(1)


def test_the_variable_selects_and_the_option_is_stronger(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("explain", "--q", "2,64,16", "--json")
    monkeypatch.setenv("POLYATTN_BACKEND", "nupmy")
    assert "Did you mean 'numpy'?" in command(*arguments).refused(2)
    assert command(*arguments, "--backend", "numpy").result["backend"] == "numpy"
    monkeypatch.delenv("POLYATTN_BACKEND")
    assert command(*arguments).result["backend"] == "numpy"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--q"),
        (("--q", "8"), "--q: expected 2 or more lengths of axes like 1,8,2048,64, got '8'"),
        (("--q", "1,x,3"), "got '1,x,3'"),
        (("--q", "2,64,16", "--mask", ""), "--mask: expected lengths of axes"),
        (("--q", "2,64,16", "--window", "3"), "--window: expected LEFT,RIGHT like 128,0"),
        (("--q", "2,64,16", "--dtype", "int8"), "--dtype: expected one of float16"),
        (("--q", "2,64,16", "--dropout", "much"), "--dropout"),
        (("--q", "2,64,16", "--device", "cpu"), "device: 'cpu' was given without a backend"),
    ],
)
def test_what_is_malformed_is_told(command: Any, arguments: tuple[str, ...], told: str) -> None:
    assert told in command("explain", *arguments).refused(2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--q", "2,64,16", "--k", "2,64,8"), "k: expected (…, n_k, 16) to match q's d_k=16, got (2, 64, 8)"),
        (("--q", "2,64,16", "--mask", "3,64"), "mask: expected a shape that broadcasts to"),
        (("--q", "2,64,16", "--key-lengths", 65), "key_lengths: expected lengths from 0 to n_k=64, got 65"),
        (("--q", "2,64,16", "--dropout", 2), "dropout: expected a probability"),
        (("--q", "2,64,16", "--backend", "numpy", "--device", "cuda:0"), "has no device 'cuda:0'"),
    ],
)
def test_what_attention_would_refuse_is_told(command: Any, arguments: tuple[Any, ...], told: str) -> None:
    assert told in command("explain", *arguments).refused(1)


def test_a_dtype_that_the_backend_lacks_is_told(command: Any) -> None:
    pytest.importorskip("array_api_strict", reason='pip install "polyattn[strict]"')
    found = command("explain", "--q", "2,64,16", "--dtype", "bfloat16", "--backend", "array-api-strict")
    assert "has no dtype 'bfloat16'" in found.refused(1)


def test_the_picture_shows_the_tiles(command: Any, backend: str, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    command(
        "explain", "--q", "1,8,4096,64", "--causal", "--backend", backend, "--plot", tmp_path / "tiles.png", "--json"
    )
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")
    refused = command("explain", "--q", "1,8,4096,64", "--plot", tmp_path / "tiles.jpg").refused(1)
    assert "plot: expected a file whose name ends in .png" in refused
