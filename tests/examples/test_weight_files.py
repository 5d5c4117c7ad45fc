"""The example of weights in files: the same bits in another library, and a damaged file is refused."""

from pathlib import Path
from types import ModuleType

import pytest

import polyattn as pa

pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 needs it: pip install ml_dtypes")


@pytest.mark.parametrize(("writer", "reader"), [("numpy", "torch"), ("torch", "jax"), ("jax", "numpy")])
def test_the_same_bits(example: ModuleType, writer: str, reader: str, tmp_path: Path) -> None:
    for name in {writer, reader} - {"numpy"}:
        pytest.importorskip(name, reason=f"{name} is not installed")
    files, same, told = example.main(["--folder", str(tmp_path / "new"), "--writer", writer, "--reader", reader])
    assert files == 4
    assert same
    assert "damaged" in told


def test_other_bits_are_seen(example: ModuleType) -> None:
    assert example.bits(example.blocks("numpy", 0)) != example.bits(example.blocks("numpy", 1))


def test_a_library_without_bfloat16(example: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
    with pytest.raises(pa.DTypeError, match="bfloat16"):
        example.main(["--folder", str(tmp_path / "new"), "--reader", "array-api-strict"])
    assert list(tmp_path.iterdir()) == []
