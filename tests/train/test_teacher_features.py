"""Learning from a teacher's features: the loss, a planted truth, runs that are killed."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vitkit
from peers import randomize
from train.test_runs import finished, run_killed
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.tasks.classify import Classify
from vitkit.tasks.trainee import FeatureTrainee, Teacher, Trainee
from vitkit.training.config import TrainConfig

SMALL = {"depth": 2, "width": 32, "heads": 2, "mlp_width": 64, "channels": 1}


def images(count: int, seed: int) -> Tensor:
    coarse = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")


def teacher_of(seed: int, classes: int = 0, **more: object) -> vitkit.ViT:
    return randomize(vitkit.create("vit-8px/2", classes=classes, **{**SMALL, **more}), seed=seed)


def learned_by(student: vitkit.ViT, teacher: Teacher) -> tuple[Classify, Trainee]:
    task = Classify(Outputs(), student.config.classes)
    task.learn_from(teacher)
    return task, task.trainee(student).train()


@pytest.mark.parametrize("two", [False, True], ids=["one token", "with a distillation token"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_loss_is_what_it_says(two: bool, share: float) -> None:
    """Derived once more from the public parts of the models."""
    ours = randomize(vitkit.create("vit-8px/2", classes=4, distillation_token=two, **SMALL))
    theirs = teacher_of(5, classes=4, width=48)
    x, labels, cross = images(8, 0), torch.arange(8) % 4, nn.functional.cross_entropy
    teacher = Teacher(theirs, ours, share, 0.0, features=0.7)
    teacher.standardise(seen := images(40, 1))
    task, trainee = learned_by(ours, teacher)
    assert isinstance(trainee, FeatureTrainee)
    with torch.no_grad():
        known, now = theirs.pooled(seen), theirs.pooled(x)
    target = (now - known.mean(0)) / known.std(0, correction=0)
    projected = ours.pooled(x) @ trainee.projection.weight.T + trainee.projection.bias
    cosine = (projected * target).sum(1) / projected.norm(dim=1) / target.norm(dim=1)
    logits = ours.head.both(ours.tokens(x)) if two else (ours(x), ours(x))
    taught = cross(logits[1], theirs(x).argmax(-1)) if share else cross(logits[1], labels)
    apart = (share or 0.5) * taught + (1 - (share or 0.5)) * cross(logits[0], labels)
    torch.testing.assert_close(task.loss(trainee, x, labels), apart + 0.7 * (1 - cosine).mean())
    trainee.eval()
    torch.testing.assert_close(trainee(x), ours(x))


def test_dropped_patches_and_a_resnet() -> None:
    student, teacher = teacher_of(0, classes=3), teacher_of(1)
    task = Classify(Outputs(), 3)
    task.learn_from(Teacher(teacher, student, 0.0, 0.0, 1.0))
    trainee = task.trainee(student, patch_dropout=0.5).train()
    assert task.loss(trainee, images(4, 0), torch.tensor([0, 1, 2, 0])).isfinite()
    resnet = vitkit.create("resnet-32px", classes=3)
    task, trainee = learned_by(resnet, Teacher(vitkit.create("mu", classes=0), resnet, 0.0, 0.0, 1.0))
    assert task.loss(trainee, torch.randn(2, 3, 32, 32), torch.tensor([0, 1])).isfinite()


def test_what_cannot_be_is_refused(short: dict) -> None:
    student = teacher_of(0, classes=4)
    with pytest.raises(
        ConfigError, match=r"the teacher has 0 outputs .* or learn from its features: --set teacher_feat"
    ):
        Teacher(teacher_of(1), student, 0.5, 0.0)
    with pytest.raises(ConfigError, match="teacher_share=0 leaves nothing"):
        Teacher(teacher_of(1), student, 0.0, 0.0)
    with pytest.raises(ConfigError, match=r"only a model of vitkit has features.*load it with vitkit\.load"):
        Teacher(nn.Flatten(), student, 0.0, 0.0, 1.0)
    with pytest.raises(ConfigError, match="name one with --set teacher=CHECKPOINT"):
        vitkit.train(TrainConfig(**short, teacher_features=1.0))
    with pytest.raises(ConfigError, match=r"teacher_share=2.0 must be at most 1"):
        TrainConfig(teacher_share=2.0)


def accuracy(seed: int, weight: float) -> float:
    """On new images, of a student that saw 64; the labels follow from the teacher's features."""
    teacher, x, unseen = teacher_of(seed + 10), images(64, seed), images(512, seed + 100)
    with torch.no_grad():
        features = teacher.pooled(torch.cat([x, unseen]))
    features = (features - features.mean(0)) / features.std(0)
    labels = (features @ torch.randn(32, 4, generator=torch.Generator().manual_seed(seed))).argmax(1)
    torch.manual_seed(seed)
    student = vitkit.create("vit-8px/2", classes=4, **SMALL)
    task = Classify(Outputs(), 4)
    if weight:
        task.learn_from(guide := Teacher(teacher, student, 0.0, 0.0, weight))
        guide.standardise(x)
    torch.manual_seed(seed)
    trainee = task.trainee(student).train()
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=2e-3)
    for _ in range(120):
        some = torch.randperm(64)[:32]
        optimizer.zero_grad()
        task.loss(trainee, x[some], labels[some]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((student.eval()(unseen).argmax(1) == labels[64:]).double().mean())


@pytest.mark.slow
def test_features_that_determine_the_label_teach_faster_than_labels() -> None:
    with_teacher, without = (sum(accuracy(seed, weight) for seed in range(3)) / 3 for weight in (1.0, 0.0))
    assert with_teacher > without + 0.03


@pytest.fixture
def taught(short: dict, tmp_path: Path) -> dict:
    """A run with a teacher that has no classifier and is wider."""
    vitkit.save(teacher_of(3, width=48), tmp_path / "teacher.safetensors")
    return {**short, "teacher": str(tmp_path / "teacher.safetensors"), "teacher_features": 0.5}


def test_a_run_keeps_the_projection_to_itself(taught: dict) -> None:
    result = vitkit.train(TrainConfig(**taught, ema=0.9))
    out = Path(taught["out"])
    assert result.best["top1"] > 0.9
    assert not any("projection" in name for name in result.model.state_dict())
    state = torch.load(next((out / "checkpoints").glob("step-*")) / "state.pt", weights_only=True)
    assert {name: tuple(t.shape) for name, t in state["task"].items()} == {
        "projection.weight": (48, 32),
        "projection.bias": (48,),
    }
    about = json.loads((out / "config.json").read_text())
    assert about["train"]["teacher_share"] == 0.0  # its outputs are not learned from unless that is asked for
    (line,) = [line for line in about["chosen"] if line.startswith("teacher")]
    assert re.search(r"teacher\.safetensors, its features, with a weight of 0\.5$", line)


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(taught: dict, tmp_path: Path) -> None:
    settings = TrainConfig(**taught, save_every=0.01)
    vitkit.train(settings.replace(out=str(tmp_path / "whole")))
    cut = settings.replace(out=str(tmp_path / "cut"))
    run_killed(cut.to_dict(), kills=1, seed=1)
    assert finished(tmp_path / "whole") == finished(tmp_path / "cut")
