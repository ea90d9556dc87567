"""Photographs that nobody took, in folders of classes."""

from pathlib import Path

import pytest

from data.making import photo


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes in train and test, 20 images in all."""
    for i in range(20):
        path = tmp_path / "photos" / ("test" if i % 5 == 0 else "train") / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(i).save(path)
    return tmp_path / "photos"
