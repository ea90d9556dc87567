"""Everything the user left open, chosen from the data, the checkpoint and the machine, with the reasons.

What a choice was measured to be worth stands beside it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from vitkit.checkpoints.load import open_checkpoint
from vitkit.data import Source, preset, suited
from vitkit.data.decode import BadPicture
from vitkit.errors import ConfigError
from vitkit.model.config import ViTConfig
from vitkit.train.config import TrainConfig
from vitkit.train.world import World

FEW = 5_000  # pictures; fewer are learned by heart without dropout
SHALLOW = 8  # blocks; fewer are fine-tuned at one learning rate


def complete(config: TrainConfig, source: Source, world: World) -> tuple[TrainConfig, list[str]]:
    """The configuration with nothing left open, and a line for every choice made."""
    choices: dict[str, Any] = {}
    reasons: list[str] = []
    size = picture_size(source)
    count = len(source)
    if len(source.classes) < 2 and not source.multi_label:
        raise ConfigError(f"{config.data} has only one class, and there is nothing to tell apart; give it a second one")
    if config.freeze == "backbone" and config.init is None:
        raise ConfigError("--freeze backbone learns on top of a trained model; name one with --init")
    reasons.append(
        f"data: {count:,} pictures of about {size[1]}x{size[0]} (width x height), {len(source.classes)} classes"
    )
    if not config.model and config.init is None:
        choices["model"], changes, why = choose_model(size, source.channels, world)
        if config.image_size is not None:
            changes.pop("image_size", None)
        elif "image_size" in changes:
            why += f", at {changes['image_size']} pixels"
        if count < FEW:
            changes["dropout"] = 0.1
            why += "; with dropout, since the pictures are few"
        choices["changes"] = {**changes, **config.changes}
        if config.image_size is None and "image_size" in choices["changes"]:
            choices["image_size"] = choices["changes"].pop("image_size")
        reasons.append(f"model: {choices['model']}, {why}")
    elif config.init is None and "channels" not in config.changes:
        choices["changes"] = {"channels": source.channels, **config.changes}
    fine = config.init is not None
    batch = config.batch_size or choose_batch(count, world)
    choices["batch_size"] = batch
    if not (config.epochs or config.steps or config.budget):
        choices["epochs"] = float(choose_epochs(count, fine))
        reasons.append(f"length: {choices['epochs']:g} epochs, for {count:,} pictures")
    if config.epochs or "epochs" in choices:
        epochs = config.epochs or choices["epochs"]
        choices["steps"] = max(1, round(epochs * max(1, count // batch)))
        choices["epochs"] = 0.0  # steps say the same, exactly
    choices |= choose_optimizer(config, batch, fine, reasons)
    if config.augment is None:
        name = choose_augmentation(count, size, fine, config)
        choices["augment"] = suited(preset(name), source.mirrors)
        reasons.append(f"augmentation: {name}" + ("" if source.mirrors else ", without mirror images"))
    if config.workers < 0:
        in_memory = source.pixels is not None
        choices["workers"] = 0 if in_memory else max(1, (os.cpu_count() or 1) // max(1, world.size))
    if source.multi_label:
        choices["loss"] = "bce"
        reasons.append("loss: bce, since a picture may have several labels")
    if batch % world.size:
        raise ConfigError(f"--batch-size {batch} must be divided by the {world.size} processes")
    return config.replace(**choices), reasons


def picture_size(source: Source) -> tuple[int, int]:
    """(height, width) of the pictures, from the middle one of a few."""
    if source.pixels is not None:
        return int(source.pixels.shape[-2]), int(source.pixels.shape[-1])
    sizes = []
    for index in np.linspace(0, len(source) - 1, num=min(16, len(source))).astype(int):
        try:
            width, height = source.picture(int(index), source.channels).size
            sizes.append((height, width))
        except BadPicture:
            continue
    if not sizes:
        return 224, 224
    height, width = np.median(np.array(sizes), axis=0)
    return int(height), int(width)


def choose_model(size: tuple[int, int], channels: int, world: World) -> tuple[str, dict[str, Any], str]:
    """A name of the zoo, changes to it, and why.

    Small pictures: convolutions before few tokens. One pass over MNIST, Muon: 98.5% at 940 pictures a second with
    convolutions of stride 2 and 1 before 16 tokens, 98.6% at 720 with stride 1 and 2, 98.1% at 570 with 49 tokens,
    97.4% at 700 with plain patches of 7 (one thread of a busy machine). CIFAR-10, 25,600 pictures: 42.3% at 385
    pictures a second; plain patches of 4 with AdamW 35.1% at 160.
    """
    pixels = max(size)
    same: dict[str, Any] = {"channels": channels}
    if pixels <= 12:
        return "conv+8px/2", same, "made for pictures of 8 pixels"
    if pixels <= 30:
        return "conv+28px/8", same, "made for pictures of 28 pixels, enlarged to 32: few tokens, quick to learn"
    if pixels <= 48:
        return "conv+32px/8", same, "made for pictures of 32 pixels: few tokens, quick to learn"
    if world.device.type == "cpu":
        return "vit-ti/16", {**same, "image_size": 128}, "a small one of the paper's shape, for a CPU"
    return "vit-s/16", same, "a good start on a GPU; larger ones want more data"


def choose_batch(count: int, world: World) -> int:
    """Large enough to keep the machine busy, small enough for a few hundred steps an epoch."""
    batch = 64 if world.device.type == "cpu" else 256
    while batch > 16 and count // batch < 20:
        batch //= 2
    return max(world.size, batch // world.size * world.size)


def choose_epochs(count: int, fine: bool) -> int:
    if fine:
        return 20 if count < 20_000 else 8
    return 60 if count < 5_000 else 30 if count < 20_000 else 12


def choose_optimizer(config: TrainConfig, batch: int, fine: bool, reasons: list[str]) -> dict[str, Any]:
    """Which, its peak learning rate and weight decay; for fine-tuning also whether early layers learn more slowly.

    A model of four blocks, from digits of 8 pixels to 16, 200 steps: 97.6% at 2e-3 without layer-wise decay, 90.0%
    at 5e-4 with it; LoRA 91.8% at 5e-3, 92.9% at 2e-2, 50.6% at 5e-4.
    """
    kind = config.optimizer or ("adamw" if fine else "muon")
    # peak learning rate at the batch size it was found with, weight decay
    lr, at, decay = {"adamw": (1e-3, 64, 0.05), "muon": (0.015, 64, 0.05), "sgd": (0.03, 512, 0.0)}[kind]
    shallow = is_shallow(config.init)
    if fine and kind == "adamw":
        lr = (2e-3 if shallow else 5e-4) * (4 if config.lora else 1)
    lr *= (batch / at) ** (1.0 if kind == "sgd" else 0.5)
    if config.freeze == "backbone":
        lr, decay = (1e-2, 0.0) if kind != "sgd" else (lr, decay)
    chosen: dict[str, Any] = {"optimizer": kind, "lr": config.lr or round(lr, 6)}
    chosen["weight_decay"] = config.weight_decay if config.weight_decay >= 0 else decay
    untouched = config.layer_decay == 1.0 and not config.freeze and not config.lora
    if fine and kind == "adamw" and not shallow and untouched:
        chosen["layer_decay"] = 0.75
    reasons.append(f"optimiser: {kind}, learning rate {chosen['lr']:g}, batches of {batch}")
    return chosen


def is_shallow(init: str | None) -> bool:
    """Whether a checkpoint has so few blocks that all of them should learn alike."""
    found = open_checkpoint(init).config if init else None
    return isinstance(found, ViTConfig) and found.depth < SHALLOW


def choose_augmentation(count: int, size: tuple[int, int], fine: bool, config: TrainConfig) -> str:
    if config.freeze == "backbone":
        return "none"
    return "light"
