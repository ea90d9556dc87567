"""Kinds of trainings that arms may ask for: other classes, a head alone, parts of a batch, no labels; what is kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitkit.progress import SILENT
from vitkit.study import runs
from vitkit.study.run import _Trainings
from vitkit.study.runs import Run, Trainer, finish, start
from vitkit.study.sets import open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.synthetic import SHAPES, SYNTHETIC, made
from vitkit.study.table import Setting

S = Setting(8, 1, 4)
HALF = Setting(8, 1, 2)


def test_some_classes_are_numbered_anew(tiny: str) -> None:
    whole = open_sets(tiny)
    some = whole.of((1, 3))
    for split in ("train", "val", "test"):
        before, after = getattr(whole, split), getattr(some, split)
        wanted = np.isin(before.labels, (1, 3))
        assert torch.equal(after.pixels, before.pixels[torch.from_numpy(wanted)])
        assert (np.array((1, 3))[after.labels] == before.labels[wanted]).all()
        assert after.classes == (before.classes[1], before.classes[3])
    assert whole.of(()) is whole


@pytest.mark.parametrize("learns", ["head", "lora"])
def test_what_does_not_learn_stays(learns: str, tiny: str) -> None:
    sets = open_sets(tiny)
    before = Run(HALF.vit(), 3, 1e-3, 0, classes=(0, 1))
    after = Run(HALF.vit(), 4, 1e-2, 0, classes=(2, 3), learns=learns, before=before)
    old, new = runs._trained(before, sets)[0], runs._trained(after, sets)[0]
    first = start(after, sets)
    assert torch.equal(first.head.classifier.weight, torch.zeros_like(first.head.classifier.weight))  # other classes
    assert new.head.classifier.weight.abs().sum() > 0
    block, was = new.encoder.blocks[0], old.encoder.blocks[0]
    assert torch.equal(block.mlp.up.weight, was.mlp.up.weight)
    assert torch.equal(block.attention.qkv.weight, was.attention.qkv.weight) == (learns == "head")


@pytest.mark.parametrize(("variant", "same"), [("", True), ("batch-norm", False)])
def test_parts_of_a_batch(variant: str, same: bool, tiny: str) -> None:
    """With layer normalisation the gradients add up to those of the batch; batch normalisation looks at the part."""
    sets = open_sets(tiny)
    whole = Run(S.vit(pooling="mean", class_token=False), 3, 1e-2, 0, variant)
    losses = [runs._trained(run, sets)[1] for run in (whole, replace(whole, parts=8))]
    apart = np.abs(np.subtract(*losses)).max()
    assert (apart < 1e-5) == same


def test_pre_training_needs_no_labels_and_is_taken_over(tiny: str, tmp_path: Path) -> None:
    sets = open_sets(tiny)
    before = Run(S.vit(classes=0), 3, 1e-3, 0, task="masked-patch:pixels")
    found = finish(before, sets, tmp_path, keep=True)
    assert 0 <= found.accuracy <= 1  # of neighbours
    assert len(found.losses) == 3
    model = start(Run(S.vit(), 1, 1e-3, 0, before=before), sets, tmp_path)
    old = runs._trained(before, sets)[0]
    assert torch.equal(model.encoder.blocks[0].mlp.up.weight, old.encoder.blocks[0].mlp.up.weight)
    other = replace(sets, train=replace(sets.train, labels=sets.train.labels[::-1].copy()))
    assert runs._trained(before, other)[1] == found.losses


def test_weights_that_others_start_from_are_trained_once(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets, before = open_sets(tiny), Run(S.vit(), 2, 1e-3, 0)
    followers = [Run(S.vit(), 2, lr, 0, before=before) for lr in (1e-3, 2e-3)]
    trained: list[Run] = []
    real: Callable[..., object] = runs._trained
    monkeypatch.setattr(runs, "_trained", lambda run, *rest: trained.append(run) or real(run, *rest))
    with Trainer(sets, tmp_path, 1) as trainer:
        found = {number: outcome for number, outcome, _ in trainer([*followers, before])}
    assert sorted(found) == [0, 1, 2]
    assert trained.count(before) == 1
    monkeypatch.undo()
    alone = finish(followers[0], sets, tmp_path / "elsewhere")  # nothing is kept there: it is trained again
    assert alone.losses == found[0].losses
    kept = next(tmp_path.glob("*.safetensors"))
    kept.write_bytes(b"cut")
    (tmp_path / f"{followers[0].key(sets)}.json").unlink()
    assert finish(followers[0], sets, tmp_path).losses == alone.losses


def test_a_quarter_of_the_training_images(tiny: str) -> None:
    whole, quarter = open_sets(f"{tiny}@8"), open_sets(f"{tiny}@8/4")
    assert len(quarter.train) == len(whole.train) // 4
    assert torch.equal(quarter.test.pixels, whole.test.pixels)
    rows = {image.numpy().tobytes() for image in whole.train.pixels}
    assert all(image.numpy().tobytes() in rows for image in quarter.train.pixels)


@pytest.mark.parametrize("name", list(SYNTHETIC))
def test_made_up_sets_are_the_same_every_time(name: str) -> None:
    first, second = made(name), made(name)
    sets = open_sets(name)
    for split, (images, labels) in first.items():
        assert np.array_equal(images, second[split][0])
        assert np.array_equal(labels, second[split][1])
        assert len(getattr(sets, split)) == len(images)
        counts = np.bincount(labels)
        assert counts.min() > 0.5 * counts.mean()


def test_made_up_sets_are_what_they_say() -> None:
    images, labels = made("places")["test"]
    grid = images.reshape(-1, 4, 4, 4, 4).mean(axis=(2, 4))[:, :3, :3].reshape(-1, 9)
    assert (grid.argmax(axis=1) == labels).all()
    images, labels = made("pairs")["train"]
    corners = [(image > 100).astype(np.uint8) for image in (images[:, :4, :4], images[:, -4:, -4:])]
    kinds = [(c[:, None] == SHAPES).all(axis=(2, 3)).argmax(axis=1) for c in corners]
    assert ((kinds[0] == kinds[1]) == labels).all()
    for kind in range(4):  # one corner alone says nothing
        assert abs(labels[kinds[0] == kind].mean() - labels.mean()) < 0.05
    images, labels = made("objects")["train"]
    lit = [int((image > 100).sum()) for image in images]
    assert (np.array(lit) == SHAPES.sum(axis=(1, 2))[labels]).all()


def test_arms_that_the_study_is_not_about_get_few_seeds(tiny: str, tmp_path: Path) -> None:
    study, sets = STUDIES["head-type"], open_sets(tiny)
    with Trainer(sets, tmp_path, workers=1) as trainer:
        work = _Trainings(study, sets, trainer, SILENT)
        work.steps, work.rates = 1, {arm.name: 1e-3 for arm in work.arms}
        some = [arm for arm in work.arms if arm.name in study.contrast or arm.name.endswith(", 2 x")]
        table = work.table(5, some)
    counts = {row.name: len(row.accuracy) for row in table.rows}
    assert {name: counts[name] for name in study.contrast} == dict.fromkeys(study.contrast, 5)
    assert set(counts.values()) == {5, study.others}
    assert table.gap(*study.contrast).seeds == 5
    assert table.gap(study.contrast[0], some[-1].name).seeds == study.others
