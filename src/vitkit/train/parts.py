"""What a run is made of, put together from its configuration: data, model, optimisers, objective."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.checkpoints.load import load
from vitkit.data import BadFiles, Loader, Source, cached, class_weights, evaluation_split, open_data
from vitkit.errors import ConfigError, DataError
from vitkit.evaluate import evaluation_loader
from vitkit.model.build import Model, create
from vitkit.model.config import Preprocessing
from vitkit.model.vit import ViT
from vitkit.train import optim
from vitkit.train.adapters import add_lora, classifiers, freeze
from vitkit.train.config import TrainConfig
from vitkit.train.ema import Average
from vitkit.train.objective import Objective, Teacher, Trainee
from vitkit.train.world import World, wrap


@dataclass
class Parts:
    config: TrainConfig
    world: World
    model: Model  # the weights that learn
    trainee: nn.Module  # the model, wrapped for compiling and for many processes
    average: Average | None
    optimizers: list[torch.optim.Optimizer]
    learning: list[nn.Parameter]
    objective: Objective
    scaler: torch.amp.GradScaler
    loader: Loader
    validation: Loader | None
    test: Loader | None
    class_names: tuple[str, ...]

    @property
    def pre(self) -> Preprocessing:
        return self.model.config.preprocessing

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def judged(self) -> nn.Module:
        """The weights that are evaluated and kept: the average, where there is one."""
        if self.average is not None:
            return self.average.model
        return self.trainee if self.config.shard else self.model  # FSDP gathers the weights where it was put around

    @property
    def test_share(self) -> float:
        """Pictures of the test split per picture of the validation split."""
        if self.test is None or self.validation is None:
            return 0.0
        return len(self.test.source) / max(1, len(self.validation.source))

    def autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.world.device.type, dtype)


def build_model(config: TrainConfig, source: Source) -> Model:
    """The model with fresh weights, or the checkpoint to fine-tune with a head for these classes."""
    classes = source.classes
    changes = dict(config.changes)
    if config.init is None:
        if config.image_size is not None:
            changes["image_size"] = config.image_size
        torch.manual_seed(config.seed)
        return create(config.model, classes=len(classes), **changes)
    model = load(config.init, image_size=config.image_size, classes=len(classes), dtype="float32", **changes)
    if getattr(model, "class_names", None) != classes:  # as many classes, but others: the old head means nothing
        for part in classifiers(model):
            part.requires_grad_(True)
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    return model


def assemble(
    config: TrainConfig,
    world: World,
    source: Source,
    tell: Callable[[str], None],
    teacher: nn.Module | None = None,
) -> Parts:
    if source.multi_label and config.loss != "bce":
        raise ConfigError(f"pictures of {config.data} have several labels; train with --set loss=bce")
    model = build_model(config, source).to(world.device)
    freeze(model, config.freeze)
    add_lora(model, config.lora)
    if isinstance(model, ViT):
        model.gradient_checkpointing = config.gradient_checkpointing
    average = Average(model, config.ema) if config.ema else None
    if config.shard and average is not None:
        wrap(average.model, world, shard=True)
    trainee = wrap(compiled(Trainee(model, config.patch_dropout), config, world, tell), world, config.shard)
    optimizers = optim.build(model, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    weights = class_weights(source.counts).to(world.device) if config.class_weights else None
    guide = find_teacher(config, model, teacher, world)
    loader, validation, test = loaders(config, world, source, model)
    return Parts(
        config=config,
        world=world,
        model=model,
        trainee=trainee,
        average=average,
        optimizers=optimizers,
        learning=[p for p in model.parameters() if p.requires_grad],
        objective=Objective(config, weights, guide),
        scaler=torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16"),
        loader=loader,
        validation=validation,
        test=test,
        class_names=source.classes,
    )


def loaders(
    config: TrainConfig, world: World, source: Source, model: Model
) -> tuple[Loader, Loader | None, Loader | None]:
    """Training batches, and evaluation of the val and test splits where the set has them."""
    pre, channels = model.config.preprocessing, model.config.channels
    place: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "workers": max(0, config.workers)}
    if config.cache:
        source = cached(source, pre, config.augment, channels, workers=max(0, config.workers))
    training = Loader(
        source,
        pre,
        config.batch_size,
        augment=config.augment,
        seed=config.seed,
        balanced=config.balanced,
        bad_files=BadFiles(Path(config.out) / "bad-files.csv", total=len(source), max_bad=config.max_bad),
        channels=channels,
        **place,
    )
    if not len(training):
        raise DataError(f"{config.data} has only {len(source)} pictures to train on; add more")
    judges: list[Loader | None] = []
    for split in ("val", "test"):
        if not source.splits.get(split):
            judges.append(None)
            continue
        part = open_data(config.data, split)
        judges.append(evaluation_loader(part, model.config, **place))
    if judges[0] is None and judges[1] is not None and evaluation_split(source.splits) == "test":
        judges[0] = judges[1]
    return training, judges[0], judges[1]


def compiled(trainee: Trainee, config: TrainConfig, world: World, tell: Callable[[str], None]) -> nn.Module:
    """torch.compile where it pays: on a GPU, or when asked for. Where it fails the run goes on without."""
    if config.compile == "no" or (config.compile == "auto" and world.device.type != "cuda"):
        return trainee
    model = trainee.model.config
    try:
        module: Any = torch.compile(trainee)
        with torch.no_grad():
            module(torch.zeros(2, model.channels, *model.image_size, device=world.device))
    except Exception as e:  # a missing compiler, an unsupported GPU: none of it is worth a run
        tell(f"torch.compile does not work here ({type(e).__name__}); going on without")
        return trainee
    return module


def find_teacher(config: TrainConfig, model: Model, given: nn.Module | None, world: World) -> Teacher | None:
    if given is None and config.teacher is None:
        return None
    teacher: Any = given if given is not None else load(str(config.teacher))
    about = getattr(teacher, "config", model.config)  # a foreign module is taken to want what the student wants
    if getattr(about, "classes", model.config.classes) != model.config.classes:
        raise ConfigError(
            f"the teacher has {about.classes} classes and the data {model.config.classes}; "
            f"fine-tune the teacher on this data first"
        )
    theirs = getattr(about, "preprocessing", model.config.preprocessing)
    return Teacher(teacher.to(world.device), theirs, model.config.preprocessing)
