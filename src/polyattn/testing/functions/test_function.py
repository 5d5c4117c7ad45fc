"""Each check of an attention function as a test of pytest; see :mod:`polyattn.testing.functions.plugin`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ._checks import CheckRow


def test_attention(attention_check: str, attention_rows: Mapping[str, CheckRow]) -> None:
    """Fail unless the check is right; a check that does not apply is skipped with the reason."""
    row = attention_rows[attention_check]
    if row.outcome == "declared":
        pytest.skip(row.detail)
    assert row.outcome == "right", f"{row.outcome}: {row.detail}"
