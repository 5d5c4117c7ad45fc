"""The kit forgets what JAX compiled before a process has no mappings left."""

import sys
from types import SimpleNamespace

import pytest

from polyattn.testing import plugin

HERE, NEXT = (SimpleNamespace(path=path) for path in ("here", "next"))


@pytest.mark.parametrize(
    ("mappings", "nextitem", "times"), [(26_000, NEXT, 1), (26_000, None, 1), (26_000, HERE, 0), (500, NEXT, 0)]
)
def test_between_files_where_there_are_many(monkeypatch, tmp_path, mappings, nextitem, times):
    calls = []
    (tmp_path / "maps").write_bytes(b"\n" * mappings)
    monkeypatch.setattr(plugin, "MAPPINGS", tmp_path / "maps")
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(clear_caches=lambda: calls.append(1)))
    plugin.pytest_runtest_teardown(HERE, nextitem)
    assert len(calls) == times
