"""Sets whose answer is known by construction: a study finds what is there, and nothing where nothing is."""

from pathlib import Path

import numpy as np
import pytest

from vitkit.progress import SILENT
from vitkit.study.run import _Trainings, run
from vitkit.study.runs import Trainer
from vitkit.study.sets import open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.synthetic import SHAPES

pytestmark = pytest.mark.slow


def places(folder: Path, count: int = 240) -> str:
    """The class is which quarter is bright, and nothing else: without positions it cannot be told."""
    random, labels = np.random.default_rng(0), np.arange(count) % 4
    images = random.integers(0, 60, (count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 180
    return saved(folder / "places.npz", images, labels)


def twins(folder: Path, count: int = 4096) -> str:
    """Of eight classes the last four are the first four again: who knows these needs few images of those."""
    random, labels = np.random.default_rng(0), np.arange(count) % 8
    images = random.integers(0, 180, (count, 8, 8), dtype=np.uint8)
    images[:, :6, :6] += 70 * SHAPES[labels % 4][:, :3, :3].repeat(2, axis=1).repeat(2, axis=2)
    return saved(folder / "twins.npz", images, labels, test=512)


def noise(folder: Path, seed: int, count: int = 160) -> str:
    """There is nothing to learn."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    return saved(folder / "noise.npz", images, random.permutation(np.arange(count) % 4))


def saved(path: Path, images: np.ndarray, labels: np.ndarray, test: int = 64) -> str:
    half = len(images) // 2
    cuts = {"train": slice(0, half), "val": slice(half, -test), "test": slice(-test, None)}
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


def test_a_wrong_batch_first_fails_where_images_are_asked_one_by_one(tmp_path: Path) -> None:
    """Attention runs across the batch: alone, an image sees nothing but each patch by itself, and no place."""
    result = run("attention-bug", places(tmp_path), tmp_path / "out", steps=60, seeds=3)
    assert result.gap.high < -0.3
    assert result.agreement == "agrees"
    assert result.table["ours"].measured("changed").max() == 0
    assert result.table["batch_first=True"].measured("differs_from_ours").max() < 1e-5


def test_pre_training_helps_where_new_classes_are_the_old_ones(tmp_path: Path) -> None:
    result = run("transfer", twins(tmp_path), tmp_path / "out", steps=160, seeds=5)
    assert result.gap.low > 0.1
    assert not result.doubts


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
