"""Short runs on a small set of images that is made here."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> str:
    """8x8 grey images of two kinds that are easy to tell apart, as an .npz: 96 to train on, 32 to evaluate on."""
    random = np.random.default_rng(0)
    labels = np.arange(128) % 2
    images = random.integers(0, 60, (128, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, 2:6, 2:6] += 150
    path = tmp_path_factory.mktemp("squares") / "squares.npz"
    parts = {"x_train": images[:96], "y_train": labels[:96], "x_val": images[96:], "y_val": labels[96:]}
    np.savez(path, **parts)
    return str(path)


@pytest.fixture
def short(squares: str, tmp_path: Path) -> dict:
    """Settings of a run of 24 steps that takes a second or two."""
    from vitkit.data import preset

    changes = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 32}
    return {
        "data": squares,
        "model": "vit-8px/2",
        "changes": changes,
        "out": str(tmp_path / "run"),
        "steps": 24,
        "batch_size": 16,
        "evaluations": 3,
        "log_every": 2,
        "optimizer": "adamw",
        "lr": 3e-3,
        "augment": preset("light", flip=0.0),
    }
