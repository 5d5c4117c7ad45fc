"""``polyattn backends --features``: the features of each library, and the reasons where one is lacking."""

import json
from pathlib import Path
from typing import Any

import polyattn as pa
from polyattn import registry
from polyattn.backend import FEATURES, features_of

MARKS = {True: "yes", False: "no", None: "?"}


def test_the_table_says_what_the_backends_say(command: Any) -> None:
    code, out, _ = command("backends", "--features")
    assert code == 0
    infos = pa.list_backends()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    said = {info.name: features_of(registry.load(info.name), ready=info.state == "ready") for info in infos}
    assert rows == [[name, *(MARKS[found[name].present] for found in said.values())] for name in FEATURES]
    text = " ".join(out.split())
    for backend, found in said.items():
        for name, (present, reason) in found.items():
            assert FEATURES[name].meaning in text
            assert present is not False or f"no on {backend}: {' '.join(reason.split())}" in text


def test_it_fits_into_eighty_columns(process: Any) -> None:
    code, out, _ = process("backends", "--features", variables={"COLUMNS": "80"})
    assert code == 0
    commands = [f"{info.name}: " for info in pa.list_backends() if info.state != "ready"]  # how to install it
    lines = [line for line in out.splitlines() if not line.startswith(tuple(commands))]
    assert len(lines) > 2 * len(FEATURES)
    assert max(map(len, lines)) <= 80


def test_as_json_it_is_honest_about_a_library_that_cannot_be_asked(process: Any, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise ImportError('it is broken here')\n")
    code, out, _ = process("backends", "--features", "--json", variables={"PYTHONPATH": str(tmp_path)})
    assert code == 0
    entries = {entry["name"]: entry for entry in json.loads(out)}
    assert {tuple(entry["features"]) for entry in entries.values()} == {tuple(FEATURES)}
    assert entries["numpy"]["features"]["in_place"] == {"present": True, "reason": ""}
    jax = entries["jax"]
    assert jax["state"] == "unavailable"
    assert jax["features"]["autograd"]["present"] is True  # the plugin gives the hook
    assert jax["features"]["float64"]["present"] is None
    assert "cannot be used here" in jax["features"]["float64"]["reason"]
    assert jax["features"]["any_shape"] == {"present": False, "reason": registry.load("jax").lacks["any_shape"]}


def test_without_the_option_nothing_is_said_of_them(command: Any) -> None:
    assert "features" not in json.loads(command("backends", "--json").out)[0]
