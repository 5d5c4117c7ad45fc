"""The library has exactly the features that the plugin does not declare in ``lacks``."""

from typing import Any

import pytest

from polyattn.backend import FEATURES, feature_of

ASKED = {name: feature.ask for name, feature in FEATURES.items() if feature.ask is not None}


def test_what_is_lacking_has_a_name_and_a_reason(contract: Any) -> None:
    assert set(contract.lacks) <= set(FEATURES)
    assert all(isinstance(reason, str) and reason.strip() for reason in contract.lacks.values())


@pytest.mark.parametrize("name", ASKED)
def test_what_is_said_is_so(contract: Any, name: str) -> None:
    """A feature that is declared lacking but works fails the check, as an expected failure that passes does."""
    said, answer = feature_of(contract, name), ASKED[name](contract)
    if answer is None:
        assert said.present, f"{contract.name} has {name}, and declares in lacks: {said.reason}"
    else:
        assert not said.present, f"{contract.name} lacks {name} without declaring it in lacks: {answer}"
