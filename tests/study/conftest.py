"""A set so small that a study takes a second: grey images of 8 pixels whose class is where they are bright."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 96), ("val", 24), ("test", 32)):
        labels = np.arange(count) % 4
        images = random.integers(0, 60, (count, 8, 8), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 2)
            image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 180
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
    path: Path = tmp_path_factory.mktemp("sets") / "tiny.npz"
    np.savez(path, **arrays)
    return str(path)
