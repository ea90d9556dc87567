"""Everything the user left open, chosen from the data, the checkpoint and the machine, with the reasons.

What a choice was measured to be worth stands beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from vitkit.data import Source, class_weights, drop_unsafe_flip, preset
from vitkit.data.dataset import Dataset
from vitkit.data.decode import BadImage
from vitkit.data.preprocess import can_match
from vitkit.errors import ConfigError
from vitkit.model import zoo
from vitkit.model.config import AnyConfig, Size, ViTConfig, WhitenedStemConfig
from vitkit.model.summary import summarize
from vitkit.tasks import Task
from vitkit.training import published
from vitkit.training.advice import few_images
from vitkit.training.config import TrainConfig
from vitkit.training.optim import OPTIMIZERS
from vitkit.training.parts import task_for
from vitkit.world import World, has_bf16

Choices = dict[str, object]  # for fields of the configuration that were left open
FEW = 5_000  # images; fewer are learned by heart without dropout
VIEWS = 8  # of every image, where a frozen backbone is to see augmented ones
SHALLOW = 8  # blocks; fewer are fine-tuned at one learning rate
WORTH_BF16 = 20e6  # multiply-adds of an image, from which bf16 is taken where the processor has it
ONCE, MANY = 1.5, 100.0  # passes over the images: up to the first none varies, from the second on all vary more
# Of Muon on a whitened stem: steps that are soon forgotten, as in the speed records on CIFAR-10
STEM_SCHEDULE = {"schedule": "linear", "warmup": 0.2, "muon_momentum": 0.6}
SMOOTHED = 0.1  # share of the target that a new classifier spreads over all classes
_SMALL = (  # images up to so many pixels, models from small to large, what they are made for
    (12, ("hybrid-8px/2",), "8 pixels, enlarged to 16: convolutions, then few tokens"),
    (30, ("hybrid-28px/8",), "28 pixels, enlarged to 32: convolutions, then few tokens"),
    (48, ("hybrid-32px/8", "hybrid-32px/8-m", "hybrid-32px/8-l"), "32 pixels: convolutions, then few tokens"),
)


def complete(
    config: TrainConfig, data: Dataset, world: World, init: AnyConfig | None, larger: str = ""
) -> tuple[TrainConfig, list[str]]:
    """The configuration with nothing left open, and a line for every choice made.

    `larger`: one of `larger_models`, for which a budget has the time.
    """
    source = data.split("train")
    task = task_for(config, source)
    size, count, fine = image_size(source), len(source), config.init is not None
    if config.freeze == "backbone" and not fine:
        raise ConfigError("--freeze backbone learns on top of a trained model; name one with --init")
    if config.lora and not fine:
        raise ConfigError("--lora adapts a trained model; name one with --init")
    splits = ", ".join(f"{split} {images:,}" for split, images in data.splits.items())
    pixels = f"about {size[1]}x{size[0]} pixels (width x height)"
    pixels += "" if source.channels in (1, 3) else f" in {source.channels} channels"
    few = "" if fine else few_images(count, max(size))
    reasons = [f"data: {sum(data.splits.values()):,} images ({splits}) of {pixels}, {task.describe()}"]
    reasons += [few] if few else []
    reasons += [f"method: {task.name}, {task.why}"] if task.pretrains else []
    if config.recipe:
        config, stated = published.apply(config, choose_batch(count, world), count)
        reasons += stated
        if config.augment is not None:
            config = config.replace(augment=drop_unsafe_flip(config.augment, source.flip_safe))
    batch = config.batch_size or choose_batch(count, world, tiny=not fine and max(size) <= _SMALL[-1][0])
    if batch % world.size:
        raise ConfigError(f"--batch-size {batch} must be divided by the {world.size} processes")
    share = config.teacher_share if config.teacher_share >= 0 else 0.0 if config.teacher_features else 0.5
    choices: Choices = {"batch_size": batch, "loss": task.loss_name, "teacher_share": share}
    choices |= fill_model(config, source, size, world, reasons, task, init, larger)
    choices |= choose_length(config, count, batch, reasons, task)
    name = str(choices.get("model", config.model))
    choices |= choose_optimizer(config, batch, init or zoo.config(name), reasons, task.pretrains)
    if task.pretrains:
        check_pretraining(config.replace(**choices), task, size, min(batch, count) // world.size, init)
    choices |= choose_precision(config.replace(**choices), init, world, reasons)
    steps = float(str(choices.get("steps", config.steps)))
    choices |= choose_augmentation(config, task, source, reasons, passes=steps * batch / count)
    choices |= choose_head(config.replace(**choices), config, world, reasons)
    if config.workers < 0:  # images in memory need none
        choices["workers"] = 0 if source.pixels is not None else max(1, (os.cpu_count() or 1) // world.size)
    if (len(task.losses) == 1 and not task.pretrains) or config.loss:
        reasons.append(f"loss: {task.loss_name}, for {task.describe()}")
    return config.replace(**choices), [*reasons, *said_of_loss(config.replace(**choices), source)]


def said_of_loss(config: TrainConfig, source: Source) -> Iterator[str]:
    """What was asked for and shows nowhere else."""
    if config.class_weights:
        weights = {name: w for name, w in zip(source.classes, class_weights(source.counts).tolist(), strict=True) if w}
        low, high = min(weights, key=weights.__getitem__), max(weights, key=weights.__getitem__)
        yield f"class weights: from {weights[low]:.2f} for {low} to {weights[high]:.2f} for {high}"
    if config.teacher:
        how = f"probabilities at temperature {config.temperature:g}" if config.temperature else "decisions"
        outputs = f"{config.teacher_share:.0%} of the loss, by its {how}" if config.teacher_share else ""
        features = f"its features, with a weight of {config.teacher_features:g}" if config.teacher_features else ""
        patches = f"its patch tokens, with a weight of {config.teacher_patches:g}" if config.teacher_patches else ""
        yield f"teacher: {config.teacher}, {', and '.join(filter(None, (outputs, features, patches)))}"


def check_pretraining(config: TrainConfig, task: Task, size: Size, batch: int, init: AnyConfig | None) -> None:
    """What makes no sense without labels, or cannot work, is refused before it starts."""
    plain = TrainConfig()
    for name in ("ema", "freeze", "lora", "class_weights", "balanced", "teacher", "recipe", "shard"):
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(f"{name} is for training with labels, or not for pre-training; leave it out")
    if batch < task.least_batch:
        need = f"{task.name} compares the images of a batch and needs {task.least_batch} of them in each process"
        raise ConfigError(f"{need}, not {batch}; choose a larger --batch-size, add images, or use --method mae")
    model = init or zoo.config(config.model, **{k: v for k, v in config.changes.items() if k == "patch_size"})
    if max(size) < min(model.patch_size):
        pixels = f"the images have about {size[1]}x{size[0]} pixels, less than one patch of {model.patch_size[0]}"
        raise ConfigError(f"{pixels}: nothing could be learned inside them. Choose a --model with smaller patches")


def fill_model(
    config: TrainConfig,
    source: Source,
    size: Size,
    world: World,
    reasons: list[str],
    task: Task,
    init: AnyConfig | None = None,
    larger: str = "",
) -> Choices:
    """The model where none was named, and the channels of the images."""
    if config.init is not None:
        wanted = init.channels if init is not None else 0
        if not wanted or "channels" in config.changes or can_match(source.channels, wanted):
            return {}
        reasons.append(f"model: the first filters are adapted from {wanted} to {source.channels} channels")
        return {"changes": {"channels": source.channels, **config.changes}}
    if config.model:
        return {} if "channels" in config.changes else {"changes": {"channels": source.channels, **config.changes}}
    name, changes, why = choose_model(size, source.channels, world, larger)
    pixels = config.image_size or config.changes.get("image_size") or changes.pop("image_size", None)
    changes.pop("image_size", None)
    if pixels is not None and config.image_size is None:
        why += f", at {pixels} pixels"
    if len(source) < FEW and not task.pretrains:
        changes["dropout"] = 0.1
        why += "; with dropout, since the images are few"
    reasons.append(f"model: {name}, {why}")
    changes |= {k: v for k, v in config.changes.items() if k != "image_size"}
    return {"model": name, "changes": changes, "image_size": pixels}


def choose_length(config: TrainConfig, count: int, batch: int, reasons: list[str], task: Task) -> Choices:
    """Epochs become steps, which say the same exactly."""
    if config.steps or config.budget:
        return {}
    small = count < 20_000
    chosen = (20 if small else 8) if config.init is not None else 60 if count < FEW else 30 if small else 12
    if task.pretrains:  # a guess, and printed as one: no run has compared lengths
        chosen = (60 if small else 20) if config.init is not None else 200 if count < FEW else 100 if small else 40
    epochs = config.epochs or chosen
    if not config.epochs:
        guess = "; a guess that no measurement supports yet" if task.pretrains else ""
        reasons.append(f"length: {epochs:g} epochs, for {count:,} images{guess}")
    return {"steps": max(1, round(epochs * max(1, count // batch))), "epochs": 0.0}


def choose_head(config: TrainConfig, asked: TrainConfig, world: World, reasons: list[str]) -> Choices:
    """A head on a frozen backbone learns to convergence, unless something was asked for that only steps can do."""
    if config.freeze != "backbone" or asked.head == "steps":
        return {}
    mixed = config.augment is not None and bool(config.augment.mixup or config.augment.cutmix)
    wants = {
        "a teacher": bool(config.teacher),
        "mixup or cutmix": mixed,
        f"--recipe {asked.recipe}": bool(asked.recipe),
        f"optimizer={asked.optimizer}": bool(asked.optimizer),
        "balanced sampling": config.balanced,
        "several processes": world.size > 1 or config.shard,
        "dropped patches": bool(config.patch_dropout),
        "growing images": config.progressive < 1,
    }
    if reason := next((word for word, asked_for in wants.items() if asked_for), ""):
        if asked.head == "converge":
            raise ConfigError(f"head=converge learns from features that are computed once, which excludes {reason}")
        reasons.append(f"head: by steps, because of {reason}")
        return {"head": "steps"}
    varied = config.augment not in (None, preset("none"))
    views = config.views or (max(1, round(asked.epochs)) if asked.epochs else VIEWS) if varied else 1
    seen = f"{views} augmented views of every image" if varied else "features of every image"
    reasons[:] = [line for line in reasons if not line.startswith(("length", "optimiser"))]  # there is neither
    reasons.append(f"head: {seen}, computed once, then trained to convergence (else: --set head=steps)")
    if asked.steps or (asked.epochs and not varied):
        reasons.append("length: neither steps nor epochs are needed for that, and none are counted")
    return {"head": "converge", "views": views}


def image_size(source: Source) -> Size:
    """(height, width) of the images, from the middle one of a few."""
    if source.pixels is not None:
        return int(source.pixels.shape[-2]), int(source.pixels.shape[-1])
    sizes = []
    for index in np.linspace(0, len(source) - 1, num=min(16, len(source))).astype(int):
        with suppress(BadImage):
            sizes.append(source.image(int(index), source.channels).size)
    width, height = np.median(sizes or [(224, 224)], axis=0)
    return int(height), int(width)


def choose_model(size: Size, channels: int, world: World, larger: str = "") -> tuple[str, Choices, str]:
    """A name of the zoo, changes to it, and why.

    Small images: convolutions before few tokens; benchmarks/recipes.py compares the choice with others.
    """
    same: Choices = {"channels": channels}
    for pixels, names, why in _SMALL:
        if max(size) <= pixels:
            time = "; a larger one, for there is time" if larger else ""
            return larger or names[0], same, f"made for images of {why}{time}"
    if world.device.type == "cpu":
        return "vit-ti/16", {**same, "image_size": 128}, "a small one of the paper's shape, for a CPU"
    return "vit-s/16", same, "a good start on a GPU; larger ones want more data"


def larger_models(config: TrainConfig, source: Source, task: Task) -> Sequence[str]:
    """What may be taken in place of the model that is chosen for these images, from small to large."""
    if config.model or config.init is not None or task.pretrains:
        return ()
    size = max(image_size(source))
    return next((names[1:] for pixels, names, _ in _SMALL if size <= pixels), ())


def choose_batch(count: int, world: World, tiny: bool = False) -> int:
    """Large enough to keep the machine busy, small enough for a few hundred steps an epoch."""
    batch = (256 if tiny else 64) if world.device.type == "cpu" else 256
    while batch > 16 and count // batch < 20:
        batch //= 2
    return max(world.size, batch // world.size * world.size)


def choose_optimizer(
    config: TrainConfig, batch: int, model: AnyConfig, reasons: list[str], pretrains: bool = False
) -> Choices:
    """Which, its learning rate over time and weight decay; for fine-tuning also whether early layers learn more slowly.

    A model of four blocks, from digits of 8 pixels to 16, 200 steps: 97.6% at 2e-3 without layer-wise decay, 90.0%
    at 5e-4 with it; LoRA 91.8% at 5e-3, 92.9% at 2e-2, 50.6% at 5e-4.
    """
    fine = config.init is not None
    shallow = isinstance(model, ViTConfig) and model.depth < SHALLOW  # so few blocks that all should learn alike
    name = config.optimizer or ("adamw" if fine or pretrains else "muon")
    kind = OPTIMIZERS[name]
    lr, decay = kind.lr, kind.decay
    if fine and name == "adamw" and not pretrains:
        lr = (2e-3 if shallow else 5e-4) * (4 if config.lora else 1)
    schedule: Choices = {"schedule": "cosine", "warmup": 0.05}
    if name == "muon" and isinstance(model, ViTConfig) and isinstance(model.stem, WhitenedStemConfig):
        schedule = STEM_SCHEDULE
    lr *= (batch / kind.batch) ** kind.power
    if config.freeze == "backbone" and name != "sgd":
        lr, decay = 1e-2, 0.0
    plain = TrainConfig()
    chosen: Choices = {k: v for k, v in schedule.items() if getattr(config, k) == getattr(plain, k)}
    chosen |= {"optimizer": name, "lr": config.lr or round(lr, 6)}
    chosen["weight_decay"] = config.weight_decay if config.weight_decay >= 0 else decay
    untouched = config.layer_decay == 1.0 and not config.freeze and not config.lora
    if fine and name == "adamw" and not shallow and untouched and not pretrains:
        chosen["layer_decay"] = 0.75
    reasons.append(f"optimiser: {name}, learning rate {chosen['lr']:g}, batches of {batch}")
    return chosen


def choose_precision(config: TrainConfig, init: AnyConfig | None, world: World, reasons: list[str]) -> Choices:
    """What was published was trained in fp32."""
    if config.precision:
        return {}
    if config.recipe:
        return {"precision": "fp32"}
    sizes = {"image_size": config.image_size or config.changes.get("image_size")}
    model = (init or zoo.config(config.model)).replace(**{name: size for name, size in sizes.items() if size})
    chosen = precision_for(model, world.device)
    if chosen == "bf16":
        reasons.append("precision: bf16 in matrix products, which are faster here than in fp32")
    return {"precision": chosen}


def precision_for(model: AnyConfig, device: torch.device) -> str:
    """bf16 where it is fast and was compared with fp32.

    hybrid-32px/8 on CIFAR-10, 120 steps, two seeds: losses within 0.014, test accuracy 76.8% and 77.0% in fp32,
    76.8% and 77.3% in bf16. Smaller models were not compared, nor longer runs.
    """
    return "bf16" if has_bf16(device) and summarize(model)["gmacs"] * 1e9 > WORTH_BF16 else "fp32"


def choose_augmentation(
    config: TrainConfig, task: Task, source: Source, reasons: list[str], passes: float = 0.0
) -> Choices:
    """`passes`: how often the run sees every image; 0: not known yet, as before a budget was measured."""
    if config.augment is not None:
        return {}
    name = "none" if config.freeze == "backbone" else task.augmentation
    why = task.why_augmentation if name == task.augmentation else ""
    if by_length := name == "light" and not task.pretrains and passes > 0:
        name, why = strength(passes, source, config.init is not None)
    if not source.flip_safe and name != "none":
        why += ", without mirror images"
    chosen = drop_unsafe_flip(preset(name), source.flip_safe)
    new = config.init is None and task.outputs.kind == "classes" and not task.pretrains
    if new and (name == "light" or by_length):
        chosen, why = replace(chosen, smoothing=SMOOTHED), f"{why}, targets smoothed by {SMOOTHED:g}"
    reasons.append(f"augmentation: {name}{why}")
    return {"augment": chosen}


def strength(passes: float, source: Source, fine: bool) -> tuple[str, str]:
    """How strongly images vary: a rule of the literature, which `benchmarks/recipes.py` can test (its arms by name).

    Augmentation stands in for images that are not there: it pays the more the longer a set is seen, costs accuracy on
    short schedules, and fine-tuning wants crops and mirror images alone (Steiner et al. 2021, 2106.10270: light is
    better for 30 epochs of ImageNet, medium for 300). Small images stay at what was measured.
    """
    classes = f" of {len(source.classes)} classes" if source.classes else ""
    seen = f"{passes:.3g} passes over {len(source):,} images{classes}"
    if passes <= ONCE:
        return "none", f", for {seen}: hardly one is seen twice (a rule, not measured; else: --augment light)"
    if passes >= MANY and not fine and max(image_size(source)) > _SMALL[-1][0]:
        return "medium", f", for {seen}: it stands in for more images (Steiner et al. 2021; else: --augment light)"
    return "light", f", for {seen}"
