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
from vitkit.data import open_data
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.tasks.classify import Classify
from vitkit.tasks.trainee import FeatureTrainee, Teacher, Trainee, apart
from vitkit.training.config import TrainConfig
from vitkit.training.run import train

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
    loss = (share or 0.5) * taught + (1 - (share or 0.5)) * cross(logits[0], labels)
    torch.testing.assert_close(task.loss(trainee, x, labels), loss + 0.7 * (1 - cosine).mean())
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


# --- patch tokens ------------------------------------------------------------------------------------

WIDE = {**SMALL, "image_size": (8, 16)}  # a grid of 4 x 8: one that is turned around would not fit


def wide_images(count: int, seed: int) -> Tensor:
    coarse = torch.randn(count, 1, 4, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=(8, 16), mode="bilinear")


def test_a_student_that_is_the_teacher_has_no_patch_loss_and_a_mirrored_one_has() -> None:
    teacher = randomize(vitkit.create("vit-8px/2", classes=0, registers=2, **WIDE), seed=3)
    student = randomize(vitkit.create("vit-8px/2", classes=3, registers=2, **WIDE), seed=4)
    student.load_state_dict(teacher.state_dict(), strict=False)
    guide, x, labels = Teacher(teacher, student, 0.0, 0.0, 1e-9, 1.0), wide_images(6, 0), torch.arange(6) % 3
    guide.standardise(wide_images(40, 1))
    task, trainee = learned_by(student, guide)
    assert isinstance(trainee, FeatureTrainee)
    assert trainee.patches is not None
    trainee.patches.weight.data = torch.diag(1 / guide.patch_deviation)
    trainee.patches.bias.data = -guide.patch_mean / guide.patch_deviation
    plain = task.criterion(student(x), labels).detach()
    assert abs(float(task.loss(trainee, x, labels).detach() - plain)) < 1e-4
    mirrored = guide.taught(x.flip(-1)).patches
    ours = guide.taught(x).patches
    assert mirrored is not None
    assert ours is not None
    assert float(apart(ours, mirrored)) > 0.1


def test_the_patch_loss_is_what_it_says_on_another_grid() -> None:
    """Derived once more: the teacher's 4 x 8 tokens become 2 x 4, the means of neighbours."""
    teacher = randomize(vitkit.create("vit-8px/2", classes=0, **{**WIDE, "width": 48}), seed=3)
    student = randomize(vitkit.create("vit-8px/2", classes=3, patch_size=4, **WIDE), seed=4)
    guide, x, labels = Teacher(teacher, student, 0.0, 0.0, 0.5, 0.7), wide_images(6, 0), torch.arange(6) % 3
    guide.standardise(seen := wide_images(40, 1))
    task, trainee = learned_by(student, guide)
    with torch.no_grad():
        known, now = (teacher.features(part, norm=True)[0][:, 1:] for part in (seen, x))
    target = (now - known.mean((0, 1))) / known.std((0, 1), correction=0)
    target = target.mT.unflatten(-1, (4, 8))  # 6 48 4 8
    small = nn.functional.interpolate(target, (2, 4), mode="bilinear", antialias=True).flatten(2).mT
    projected = student.tokens(x)[:, 1:] @ trainee.patches.weight.T + trainee.patches.bias
    cosine = nn.functional.cosine_similarity(projected, small, dim=-1).mean()
    without = Teacher(teacher, student, 0.0, 0.0, 0.5)
    without.mean, without.deviation = guide.mean, guide.deviation
    other, bare = learned_by(student, without)
    bare.projection.load_state_dict(trainee.projection.state_dict())
    expected = other.loss(bare, x, labels) + 0.7 * (1 - cosine)
    torch.testing.assert_close(task.loss(trainee, x, labels), expected)


def explained(patches: float, seed: int) -> float:
    """Share of the variance of the teacher's patch tokens that a linear map of the student's has, on new images."""
    teacher, x, unseen = teacher_of(seed + 10), images(64, seed), images(128, seed + 100)
    torch.manual_seed(seed)
    student = vitkit.create("vit-8px/2", classes=2, depth=1, width=16, heads=2, mlp_width=32, channels=1, patch_size=4)
    task = Classify(Outputs(), 2)
    task.learn_from(guide := Teacher(teacher, student, 0.0, 0.0, 1.0, patches))
    guide.standardise(x)
    trainee = task.trainee(student).train()
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(trainee, x, torch.arange(64) % 2).backward()
        optimizer.step()
    with torch.no_grad():
        ours = student.eval().tokens(unseen)[:, 1:].double()  # B 4 D
        theirs = nn.functional.avg_pool2d(teacher.features(unseen, norm=True, grid=True)[0], 2).flatten(2).mT.double()
        a, b = ((t - t.mean((0, 1))).flatten(0, 1) for t in (ours, theirs))
        left = b - a @ torch.linalg.lstsq(a, b).solution
    return float(1 - left.square().sum() / b.square().sum())


def test_patch_tokens_of_the_teacher_are_learned() -> None:
    """The truth is planted in the teacher's tokens; its pooled features alone tell less of where."""
    gains = [explained(1.0, seed) - explained(0.0, seed) for seed in range(2)]
    assert min(gains) > 0.03, gains


def test_patch_tokens_that_cannot_be_compared_are_refused() -> None:
    student = teacher_of(0, classes=4)
    with pytest.raises(ConfigError, match="add --set teacher_features=1"):
        Teacher(teacher_of(1, classes=4), student, 0.5, 0.0, 0.0, 1.0)
    with pytest.raises(ConfigError, match="a ResNet has none"):
        Teacher(vitkit.create("resnet-32px", classes=0), student, 0.0, 0.0, 1.0, 1.0)
    task = Classify(Outputs(), 4)
    task.learn_from(Teacher(teacher_of(1), student, 0.0, 0.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="leave out patch_dropout"):
        task.trainee(student, patch_dropout=0.5)


def test_a_run_learns_from_patch_tokens(taught: dict) -> None:
    settings = TrainConfig(**{**taught, "steps": 8}, teacher_patches=0.5)
    result = train(settings, dataset=open_data(settings.data))
    assert not any("patches" in name for name in set(result.model.state_dict()) - set(teacher_of(0).state_dict()))
    chosen = json.loads((Path(taught["out"]) / "config.json").read_text())["chosen"]
    assert any(line.endswith("and its patch tokens, with a weight of 0.5") for line in chosen)
