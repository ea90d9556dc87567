"""Sets whose answer is known by construction: a study finds what is there, and nothing where nothing is."""

from pathlib import Path

import numpy as np
import pytest

from vitkit.progress import SILENT
from vitkit.study.run import _Trainings, run
from vitkit.study.runs import Trainer
from vitkit.study.sets import open_sets
from vitkit.study.studies import STUDIES

pytestmark = pytest.mark.slow


def places(folder: Path, count: int = 240) -> str:
    """The class is which quarter is bright, and nothing else: without positions it cannot be told."""
    random, labels = np.random.default_rng(0), np.arange(count) % 4
    images = random.integers(0, 60, (count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 180
    return saved(folder / "places.npz", images, labels)


def noise(folder: Path, seed: int, count: int = 160) -> str:
    """There is nothing to learn."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    return saved(folder / "noise.npz", images, random.permutation(np.arange(count) % 4))


def saved(path: Path, images: np.ndarray, labels: np.ndarray) -> str:
    cuts = {"train": slice(0, len(images) // 2), "val": slice(len(images) // 2, -64), "test": slice(-64, None)}
    parts = {f"{split}_images": images[cut] for split, cut in cuts.items()}
    parts |= {f"{split}_labels": labels[cut] for split, cut in cuts.items()}
    np.savez(path, **parts)
    return str(path)


def test_positions_are_needed_where_the_class_is_a_place(tmp_path: Path) -> None:
    result = run("positions", places(tmp_path), tmp_path / "out", steps=120, seeds=3)
    gap = result.table.gap("none", "1-D learned")
    assert gap.high < -0.3  # a quarter is guessed
    assert not result.doubts
    assert "as in the paper" in result.finding.sentences[0]


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    """100 small studies of noise: the 95% interval of the main difference excludes zero in at most 5 of them.

    A rate of exactly 5% would give more in a third of all draws; the seeds are fixed, so this draw does not change.
    """
    study, found = STUDIES["pooling"], 0
    for seed in range(100):
        open_sets.cache_clear()
        sets = open_sets(noise(tmp_path, seed))
        with Trainer(sets, tmp_path / str(seed), workers=1) as trainer:
            work = _Trainings(study, sets, trainer, SILENT)
            work.steps, work.rates = 3, dict.fromkeys(study.contrast, 4e-3)
            table = work.table(4, [arm for arm in work.arms if arm.name in study.contrast])
        found += not table.gap(*study.contrast).covers_zero
    assert found <= 5
