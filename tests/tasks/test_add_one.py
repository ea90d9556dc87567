"""One more task, or optimiser, is one file and one row: these are used by the unchanged loop, evaluator and plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitkit
from vitkit.data import Source, open_data
from vitkit.data.keys import Keys
from vitkit.evaluation.run import evaluation_loader, quick
from vitkit.model.base import Outputs
from vitkit.model.build import Model
from vitkit.plan.memory import training_memory
from vitkit.tasks import TASKS, Metric, Settings, Task
from vitkit.tasks.result import Recorded, Records
from vitkit.tasks.trainee import Trainee
from vitkit.training.config import TrainConfig
from vitkit.training.optim import OPTIMIZERS, Group, Kind
from vitkit.training.result import Watcher


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Bright and dark images."""
    images = np.random.default_rng(0).integers(0, 120, (64, 8, 8, 1), dtype=np.uint8)
    images[::2] += 120
    np.savez(
        tmp_path / "set.npz", x_train=images[:48], y_train=np.arange(48) % 2, x_val=images[48:], y_val=np.arange(16) % 2
    )
    return str(tmp_path / "set.npz")


class Follow(Trainee):
    """Two noisy views of an image, one seen by the model and one by a teacher that follows it."""

    def __init__(self, model: Model, keep: float) -> None:
        super().__init__(model)
        self.keep = keep
        self.head = nn.Linear(model.config.width, 4)
        self.teacher = nn.Linear(model.config.width, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, views: Tensor) -> Tensor:
        ours, theirs = (self.model(v) for v in views.unbind(1))
        return (self.head(ours) - self.teacher(theirs).detach()).square().mean(dim=1)  # B

    def after_step(self, progress: float) -> None:
        self.steps += 1
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                mine.lerp_(other, 1 - self.keep)


class Toy(Task):
    """Self-supervised: no labels, two views, a teacher in the checkpoints, and a score of which less is better."""

    name, kind, losses = "toy", None, ("square",)
    score = Metric("spread", "spread of the features", percent=False, higher=False)

    @classmethod
    def of_data(cls, source: Source, settings: Settings) -> Task:
        return cls(Outputs(), 0, settings)  # no head

    def targets(self, images: Tensor, labels: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        return torch.stack([images, images + 0.1 * torch.randn_like(images)], dim=1), images.new_zeros(len(images))

    def trainee(self, model: Model, patch_dropout: float = 0.0) -> Trainee:
        return Follow(model, float(self.settings.options.get("keep", 0.9)))

    def loss(self, trainee: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        return trainee(images).mean()

    def record(self, outputs: Tensor, labels: Tensor) -> Recorded:
        return {"loss": outputs.square().mean(dim=1), "features": outputs}

    def measure(self, records: Records) -> dict[str, float]:
        return {"spread": float(records["features"].std()), "loss": records.mean_loss}


class Seen(Watcher):
    def __init__(self) -> None:
        self.scores: list[str] = []

    def evaluated(self, line: Any, score: str, best: str) -> None:
        self.scores.append(score)


def test_a_task(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", Toy)
    settings = {"data": data, "task": "toy", "model": "vit-8px/2", "changes": {"depth": 1, "width": 16, "heads": 2}}
    settings |= {"steps": 6, "batch_size": 16, "evaluations": 2, "accumulate": 2, "options": {"keep": 0.5}}
    whole, watcher = tmp_path / "whole", Seen()
    result = vitkit.train(TrainConfig(**settings, out=str(whole)), watcher=watcher)
    assert result.score is Toy.score
    assert len(watcher.scores) == 2
    assert watcher.scores[-1] == f"{result.validation['spread']:.4f}"
    assert result.best["score"] == pytest.approx(min(result.best["score"], result.validation["spread"]))
    model = vitkit.load(whole)
    assert model.config.classes == 0
    (folder,) = (whole / "checkpoints").iterdir()
    state = torch.load(folder / "state.pt", weights_only=True)
    assert set(state["task"]) == {"head.weight", "head.bias", "teacher.weight", "teacher.bias", "steps"}
    assert state["task"]["steps"] == 6
    with evaluation_loader(open_data(data).split("val"), model.config) as loader:
        found = quick(model, loader, task=Toy(Outputs(), 0))
    assert found["samples"] == 16


def test_its_state_is_resumed_bit_for_bit(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.training import loop

    monkeypatch.setitem(TASKS, "toy", Toy)
    settings = {"data": data, "task": "toy", "model": "vit-8px/2", "changes": {"depth": 1, "width": 16, "heads": 2}}
    settings |= {"steps": 6, "batch_size": 16, "evaluations": 1, "save_every": 0.0}
    vitkit.train(TrainConfig(**settings, out=str(tmp_path / "whole")))
    update, done = loop.Loop.update, []

    def fail(self: loop.Loop) -> None:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(1)
        update(self)

    monkeypatch.setattr(loop.Loop, "update", fail)
    with pytest.raises(KeyboardInterrupt):
        vitkit.train(TrainConfig(**settings, out=str(tmp_path / "cut")))
    monkeypatch.setattr(loop.Loop, "update", update)
    vitkit.train(TrainConfig(out=str(tmp_path / "cut")), resume=True)
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert ends[0] == ends[1]


def test_an_optimiser(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(groups: list[Group], config: TrainConfig) -> list[torch.optim.Optimizer]:
        return [torch.optim.RMSprop(map(dict, groups), lr=config.lr)]

    monkeypatch.setitem(OPTIMIZERS, "toy", Kind(toy, lr=1e-3, batch=16, power=1.0, decay=0.01))
    config = TrainConfig(data=data, optimizer="toy", steps=3, batch_size=32, out=str(tmp_path / "run"))
    vitkit.train(config)
    saved = TrainConfig.from_dict(json.loads((tmp_path / "run" / "config.json").read_text())["train"])
    assert (saved.lr, saved.weight_decay) == (2e-3, 0.01)
    model = vitkit.load(tmp_path / "run").config
    assert training_memory(model, saved, 1).optimizer > 0
