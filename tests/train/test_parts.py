"""The pieces of training, each against a closed form."""

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitkit
from peers import randomize
from tasks.test_add_one import Toy
from vitkit.data import Augment, open_data
from vitkit.data.preprocess import prepare_pixels
from vitkit.errors import CheckpointError, ConfigError
from vitkit.model import zoo
from vitkit.model.base import Outputs
from vitkit.model.stem import Whitening
from vitkit.progress import SILENT
from vitkit.tasks.classify import Classify
from vitkit.tasks.classify import classification_loss as loss_of
from vitkit.tasks.trainee import Teacher, Trainee, drop_patches
from vitkit.training import optim
from vitkit.training.config import TrainConfig, assign, parse_duration
from vitkit.training.optim import Average, Muon, grown_size, orthogonal, rate
from vitkit.training.parts import add_lora, assemble, freeze, plain
from vitkit.training.recipe import choose_optimizer, choose_precision
from vitkit.world import World

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("changes", "native", "chosen"),
    [
        ({"model": "vit-ti/16"}, True, "bf16"),
        ({"model": "vit-ti/16"}, False, "fp32"),
        ({"model": "vit-ti/16", "image_size": 16}, True, "fp32"),  # so little work that it was not compared
        ({"model": "hybrid-32px/8"}, True, "bf16"),
        ({"model": "conv+8px/2"}, True, "fp32"),
        ({"model": "vit-ti/16", "recipe": "vit-imagenet1k"}, True, "fp32"),
        ({"model": "vit-ti/16", "precision": "fp32"}, True, None),
    ],
)
def test_precision_where_it_is_left_open(changes: dict, native: bool, chosen: str | None, monkeypatch) -> None:
    monkeypatch.setattr("vitkit.training.recipe.has_bf16", lambda device: native)
    reasons: list[str] = []
    found = choose_precision(TrainConfig(**changes), None, World(0, 1, torch.device("cpu")), reasons)
    assert found == ({} if chosen is None else {"precision": chosen})
    assert bool(reasons) == (chosen == "bf16")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("1m30s", 90)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "-3m", "five"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="write 90s, 5m or 1h30m"):
        parse_duration(text)


def test_settings_reach_inside() -> None:
    config = assign(
        TrainConfig(), ["weight_decay=0.1", "augment.mixup=0.2", "model.dropout=0.1", "optimizer=sgd", "freeze=2"]
    )
    assert (config.weight_decay, config.optimizer, config.freeze) == (0.1, "sgd", "2")
    assert config.augment is not None
    assert config.augment.mixup == 0.2
    assert config.changes == {"dropout": 0.1}
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("wieght_decay=1", "Did you mean weight_decay"),
        ("lr", "wants key=value"),
        ("augment.mixp=1", "Did you mean mixup"),
        ("optimizer=adam", "Did you mean adamw"),
        ("ema=2", "below 1"),
        ("freeze=head", "'backbone' or a number"),
        ("steps=-1", "must not be negative"),
    ],
)
def test_bad_settings(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assign(TrainConfig(), [setting])


def test_one_length_only() -> None:
    with pytest.raises(ConfigError, match="one of epochs, steps and budget"):
        TrainConfig(steps=3, epochs=1)


def test_learning_rate() -> None:
    assert rate(0.05, 0.1, "cosine") == 0.5
    assert rate(0.1, 0.1, "cosine") == 1.0
    assert rate(0.55, 0.1, "cosine") == pytest.approx(0.5)
    assert rate(0.55, 0.1, "linear") == pytest.approx(0.5)
    assert rate(0.325, 0.1, "cosine") == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(1.0, 0.1, "linear") == rate(1.0, 0.1, "cosine") == 0.0
    assert rate(0.0, 0.1, "cosine") > 0


def test_growing_images_are_whole_patches() -> None:
    sizes = [grown_size(p / 20, 0.5, 32, 4) for p in range(21)]
    assert sizes[0] == 16
    assert sizes[-1] == 32
    assert sizes == sorted(sizes)
    assert all(s % 4 == 0 for s in sizes)


def test_groups_decay_maps_only_and_slow_low_layers_down() -> None:
    model = vitkit.create("mu", layer_scale=0.1, registers=2, positions="relative", pooling="map")
    found = optim.groups(model, TrainConfig(layer_decay=0.5, weight_decay=0.1))
    names = {id(p): n for n, p in model.named_parameters()}
    for group in found:
        for parameter in group["params"]:
            name = names[id(parameter)]
            is_map = parameter.ndim >= 2 and not any(w in name for w in ("token", "registers", "relative", "probe"))
            assert group["weight_decay"] == (0.1 if is_map else 0.0), name
            layer = 0 if name.startswith(("patches", "class", "reg")) else 3
            layer = 1 + int(name.split(".")[2]) if "blocks" in name else layer
            assert group["factor"] == 0.5 ** (3 - layer), name
    assert sum(len(g["params"]) for g in found) == len(list(model.parameters()))


def test_muon_makes_updates_orthogonal() -> None:
    """Newton-Schulz with these coefficients brings singular values near 1, from wherever they were."""
    matrices = torch.randn(3, 24, 16, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.5
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    overlap = (orthogonal(matrices) * (u @ v)).sum((1, 2)) / 16
    assert (overlap > 0.8).all()  # and keeps their directions


@pytest.mark.parametrize("shape", [(2, 16, 160), (2, 160, 16), (1, 16, 63)], ids=["long rows", "tall", "short rows"])
def test_orthogonal_matrices_are_those_of_newton_and_schulz(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape)
    matrices[:, :3] *= 1e-3  # far from orthogonal
    x = matrices.double()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    torch.testing.assert_close(orthogonal(matrices).double(), x, atol=1e-4, rtol=0)


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_matrix_has_one_process_and_the_work_is_spread(processes: int) -> None:
    shapes = [(6, 128, 128), (2, 256, 128), (2, 128, 256), (1, 48, 432), (1, 96, 864), (1, 128, 864)]
    shares = optim.shared_out(shapes, processes)
    for i, (count, _, _) in enumerate(shapes):
        taken = sorted(n for share in shares for n in range(*share[i]))
        assert taken == list(range(count))
    work = [
        sum((b - a) * max(m, n) * min(m, n) ** 2 for (_, m, n), (a, b) in zip(shapes, s, strict=True)) for s in shares
    ]
    assert max(work) - min(work) <= max(max(m, n) * min(m, n) ** 2 for _, m, n in shapes)


class Threads(World):
    """Processes that are threads: `gather` meets the others at a barrier."""

    meeting: ClassVar[Barrier]
    parts: ClassVar[dict[int, torch.Tensor]] = {}

    def gather(self, part: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        assert len(part) == sizes[self.rank]
        self.parts[self.rank] = part
        self.meeting.wait()
        return [self.parts[rank] for rank in range(self.size)]


def test_muon_is_the_same_when_processes_share_it() -> None:
    def weights(world: World | None) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        shapes = [(48, 16), (48, 16), (32, 16), (16, 32), (16, 16), (8, 4, 3, 3)]
        found = [nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]
        for parameter in found:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        muon = Muon([{"params": found[:3]}, {"params": found[3:], "weight_decay": 0.1}], lr=0.1)
        muon.world = world
        muon.step()
        return [parameter.detach() for parameter in found]

    Threads.meeting = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(weights, [Threads(rank, 2, torch.device("cpu")) for rank in range(2)]))
    for alone, one, other in zip(weights(None), *both, strict=True):
        assert torch.equal(one, other)  # replicas must never drift apart
        torch.testing.assert_close(one, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("count", [6, 12], ids=["any", "three times as many as channels, like a qkv"])
def test_muon_treats_filters_as_rows_of_one_matrix_and_keeps_their_length(count: int) -> None:
    """Only the direction of filters matters before a norm: their length stays the root of their number; long steps."""
    weight = nn.Parameter(torch.randn(count, 4, 3, 3))
    before, gradient = weight.detach().clone(), torch.randn(count, 4, 3, 3)
    weight.grad = gradient
    Muon([{"params": [weight]}], lr=0.1).step()
    moved = (before * (count**0.5 / before.norm()) - weight.detach()) / (0.1 * optim.FILTERS)
    torch.testing.assert_close(moved.flatten(1), orthogonal(gradient.flatten(1)[None])[0], atol=1e-3, rtol=1e-3)


def test_muon_takes_the_filters_of_a_whitened_stem() -> None:
    model = vitkit.create("hybrid-32px/8")
    apart = {id(p) for g in optim.groups(model, TrainConfig(optimizer="muon")) if g["apart"] for p in g["params"]}
    filters = [p for name, p in model.named_parameters() if name.startswith("stem.blocks.") and p.ndim == 4]
    assert len(filters) == 6
    assert apart >= {id(p) for p in filters}


def test_muon_treats_qkv_as_three_maps() -> None:
    weight = nn.Parameter(torch.zeros(48, 16))
    weight.grad = torch.cat([torch.randn(16, 16) * scale for scale in (1.0, 100.0, 0.01)])
    Muon([{"params": [weight]}], lr=1.0).step()
    norms = [part.norm().item() for part in weight.detach().chunk(3)]
    assert max(norms) / min(norms) < 1.5  # one orthogonalisation of the stack would follow the scales


def test_losses() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    shares = nn.functional.one_hot(labels, 3).float()
    torch.testing.assert_close(loss_of(logits, labels, "softmax"), loss_of(logits, shares, "softmax"))
    by_hand = -(shares * logits.sigmoid().log() + (1 - shares) * (1 - logits.sigmoid()).log()).mean()
    torch.testing.assert_close(loss_of(logits, labels, "bce"), by_hand)
    weights = torch.tensor([1.0, 0.0, 0.0])
    only_first = nn.functional.cross_entropy(logits[labels == 0], labels[labels == 0])
    torch.testing.assert_close(loss_of(logits, labels, "softmax", weights), only_first)


def test_average_is_the_closed_form() -> None:
    model = nn.Linear(2, 2)
    average = Average(model, 0.9)
    expected, seen = model.weight.detach().clone(), []
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update(model, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
        seen.append(average.model.weight.clone())
    torch.testing.assert_close(average.model.weight, expected)
    assert not torch.equal(seen[0], seen[1])


def test_frozen_parts_do_not_learn() -> None:
    model = vitkit.create("mu")
    freeze(model, "backbone")
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "head.classifier.weight",
        "head.classifier.bias",
    }
    freeze(model, "1")
    learning = {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad and "blocks" in n}
    assert learning == {"1"}
    assert not model.patches.weight.requires_grad
    with pytest.raises(ConfigError, match="only 2 blocks"):
        freeze(model, "3")
    with pytest.raises(ConfigError, match="ResNet has none"):
        freeze(vitkit.create("resnet-8px"), "1")


def test_lora_trains_its_own_weights_and_the_classifier_alone() -> None:
    """As freeze="backbone" does: what pools the tokens was trained with them, and stays as it is."""
    model = vitkit.create("vit-ti/16", image_size=32, depth=1, classes=2, class_token=False, pooling="map")
    add_lora(model, 2)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in learning if name.startswith("head.")} == {"head.classifier.weight", "head.classifier.bias"}
    assert all(".parametrizations." in name for name in learning if not name.startswith("head."))


def test_lora_starts_as_the_model_and_is_merged() -> None:
    model = randomize(vitkit.create("mu")).eval()
    before = model(IMAGES)
    add_lora(model, 2)
    torch.testing.assert_close(model(IMAGES), before)
    learning = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(learning) == 2 + 2 * 2 * 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.normal_()
    merged = plain(model)
    assert set(merged.state_dict()) == set(vitkit.create("mu").state_dict())
    torch.testing.assert_close(merged(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(merged(IMAGES), before)


def test_patch_dropout_keeps_prefix_and_order() -> None:
    x = torch.arange(10.0)[None, :, None].expand(3, 10, 2)
    kept = drop_patches(x, prefix=2, rate=0.5)
    assert kept.shape == (3, 6, 2)
    assert (kept[:, :2, 0] == torch.tensor([0.0, 1.0])).all()
    assert (kept[:, 2:, 0].diff(dim=1) > 0).all()
    with pytest.raises(ConfigError, match="positions are added"):
        Trainee(vitkit.create("mu", positions="rope-2d"), patch_dropout=0.5)


def test_what_was_asked_for_is_said_before_the_run(tmp_path: Path, command) -> None:
    for name, count in (("rare", 3), ("common", 12)):
        for i in range(count):
            path = tmp_path / "photos" / "train" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (20 * i, 90, 20)).save(path)
    vitkit.save(vitkit.create("mu", classes=2), tmp_path / "t.safetensors", class_names=("common", "rare"))
    args = ("train", tmp_path / "photos", "--model", "mu", "--image-size", 32, "--steps", 1, "--set", "baseline=no")
    asked = ("--set", "class_weights=true", "--set", f"teacher={tmp_path / 't.safetensors'}")
    code, _, err = command(*args, *asked, "--out", tmp_path / "run")
    assert code == 0, err
    assert re.search(r"teacher: .*t\.safetensors, 50% of the loss, by its decisions", err)
    assert re.search(r"class weights: from 0\.\d+ for common to [\d.]+ for rare", err)
    assert (
        "--lora adapts a trained model; name one with --init" in command(*args, "--lora", 2, "--out", tmp_path / "l")[2]
    )


def test_distillation_from_a_teacher() -> None:
    student = randomize(vitkit.create("mu", distillation_token=True))
    teacher = randomize(vitkit.create("mu"), seed=5)
    labels = torch.tensor([1, 2, 3, 4])
    task = Classify(Outputs(), student.config.classes)
    task.learn_from(Teacher(teacher, student, 0.5, 0.0))
    hard = task.loss(Trainee(student), IMAGES, labels)
    ours, theirs = student.head.both(student.tokens(IMAGES))
    said = teacher(IMAGES).argmax(-1)
    ce = nn.functional.cross_entropy
    torch.testing.assert_close(hard, 0.5 * ce(ours, labels) + 0.5 * ce(theirs, said))
    plain_student = randomize(vitkit.create("mu"))
    task.learn_from(Teacher(plain_student, plain_student, 1.0, 2.0))
    assert task.loss(Trainee(plain_student), IMAGES, labels).abs() < 1e-5  # its own teacher has nothing to add
    with pytest.raises(ConfigError, match="fine-tune the teacher on this data first"):
        Teacher(vitkit.create("mu", classes=7), student, 0.5, 0.0)
    named = [randomize(vitkit.create("mu", classes=2)) for _ in range(2)]
    for one, names in zip(named, (("ants", "bees"), ("bees", "ants")), strict=True):
        one.outputs = Outputs(names=names)
    answers = Teacher(named[0], named[1], 0.5, 0.0)(IMAGES)
    assert torch.equal(answers, named[0](IMAGES).flip(-1)), "classes are those of that name, not of that place"
    named[1].outputs = Outputs(names=("ants", "wasps"))
    with pytest.raises(ConfigError, match=r"bees; the data has wasps instead.*fine-tune the teacher"):
        Teacher(named[0], named[1], 0.5, 0.0)
    named[1].outputs = Outputs(names=("0", "1"))  # numbers: the place
    assert torch.equal(Teacher(named[0], named[1], 0.5, 0.0)(IMAGES), named[0](IMAGES))
    with pytest.raises(ConfigError, match="cannot learn from a teacher"):
        Toy(Outputs(), 0).learn_from(Teacher(teacher, student, 0.5, 0.0))


@pytest.mark.parametrize(
    ("depth", "changes", "lr", "layer_decay"),
    [(2, {}, 2e-3, None), (12, {}, 5e-4, 0.75), (12, {"freeze": "3"}, 5e-4, None), (2, {"lora": 2}, 8e-3, None)],
)
def test_few_blocks_are_fine_tuned_alike(depth: int, changes: dict, lr: float, layer_decay: float | None) -> None:
    config = TrainConfig(data="digits", init="m.safetensors", **changes)
    found = choose_optimizer(config, 64, vitkit.create("mu", depth=depth).config, [])
    assert (found["optimizer"], found["lr"], found.get("layer_decay")) == ("adamw", lr, layer_decay)


def test_how_fast_a_new_model_learns() -> None:
    """Soon forgotten steps for a whitened stem; what was asked for stays."""
    schedule = ("schedule", "warmup", "muon_momentum")
    stem, plain = (zoo.config(name) for name in ("hybrid-32px/8", "vit-32px/4"))
    found = choose_optimizer(TrainConfig(), 64, stem, [])
    assert [found[name] for name in schedule] == ["linear", 0.2, 0.6]
    found = choose_optimizer(TrainConfig(schedule="cosine", muon_momentum=0.9, lr=0.01), 64, stem, [])
    assert [found.get(name) for name in (*schedule, "lr")] == [None, 0.2, None, 0.01]
    for other, model in ((TrainConfig(), plain), (TrainConfig(optimizer="adamw"), stem)):
        found = choose_optimizer(other, 64, model, [])
        assert [found.get(name) for name in schedule] == ["cosine", 0.05, None]


@pytest.mark.parametrize("init", ["runs/nope", "nope.safetensors"])
def test_a_missing_checkpoint_is_not_taken_for_a_name(init: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither an existing path nor a known model"):
        vitkit.train(TrainConfig(data="digits", init=init, out=str(tmp_path / "run")))


def test_a_new_model_whitens_the_images_it_is_to_learn_from(tmp_path: Path) -> None:
    """The first layer of an assembled run is fitted to the training images, the same way each time."""
    data, world = open_data("digits"), World(0, 1, torch.device("cpu"))
    config = TrainConfig(data="digits", model="hybrid-28px/8", steps=1, batch_size=8, out=str(tmp_path), lr=0.01)
    config = config.replace(augment=Augment(), optimizer="muon", weight_decay=0.0, workers=0)
    one, two = (assemble(config, world, data, SILENT).model for _ in range(2))
    found = one.get_submodule("stem.whitening").get_buffer("weight")
    assert torch.equal(found, two.get_submodule("stem.whitening").get_buffer("weight"))
    source = data.split("train")
    rows = np.unique(np.linspace(0, len(source) - 1, 500).astype(int))
    images = prepare_pixels(torch.as_tensor(source.pixels[rows]), one.config.preprocessing).float() / 127.5 - 1
    expected = Whitening(1, 8)
    expected.fit(images)
    torch.testing.assert_close(found, expected.weight, atol=1e-4, rtol=1e-4)


def test_a_name_without_weights_is_not_fine_tuned(squares: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no trained weights; train it from scratch with --model vit-b/16"):
        vitkit.train(squares, init="vit-b/16", out=tmp_path / "run", steps=1)
    assert not (tmp_path / "run").exists()
