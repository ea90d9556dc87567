"""The systems that are compared, each with its default settings, and the comparison itself.

All are built from one vitkit configuration. Weights are fresh: they do not change the time. Every builder
returns a function of images -> logits and the module behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness import arguments, compare, machine, megabytes_in_use, memory_of, peak_megabytes_of, save, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import peers
from vitkit.model import zoo
from vitkit.model.config import ViTConfig
from vitkit.model.summary import summarize
from vitkit.model.vit import ViT

System = tuple[Callable[[Tensor], Tensor], nn.Module]


def shape(name: str) -> ViTConfig:
    config = zoo.config(name)
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise SystemExit(f"{name} cannot be built by every peer; choose a plain ViT of `vitkit zoo`")
    return config


def vitkit(config: ViTConfig) -> System:
    model = ViT(config)
    return model, model


def timm(config: ViTConfig) -> System:
    model = peers.import_timm().models.vision_transformer.VisionTransformer(
        img_size=config.image_size, patch_size=config.patch_size, in_chans=config.channels, embed_dim=config.width,
        depth=config.depth, num_heads=config.heads, mlp_ratio=config.mlp_width / config.width,
        num_classes=config.classes,
    )  # fmt: skip
    return model, model


def huggingface(config: ViTConfig) -> System:
    hf = peers.import_transformers()
    model: Any = hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=config.image_size[0], patch_size=config.patch_size[0], num_channels=config.channels,
            hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.heads,
            intermediate_size=config.mlp_width, num_labels=config.classes,
        )
    )  # fmt: skip
    return lambda images: model(images).logits, model


def torchvision(config: ViTConfig) -> System:
    model = peers.import_torchvision().models.vision_transformer.VisionTransformer(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_layers=config.depth,
        num_heads=config.heads, hidden_dim=config.width, mlp_dim=config.mlp_width, num_classes=config.classes,
    )  # fmt: skip
    return model, model


def vit_pytorch(config: ViTConfig) -> System:
    model = peers.import_vit_pytorch().ViT(
        image_size=config.image_size[0], patch_size=config.patch_size[0], num_classes=config.classes,
        dim=config.width, depth=config.depth, heads=config.heads, dim_head=config.width // config.heads,
        mlp_dim=config.mlp_width, channels=config.channels,
    )  # fmt: skip
    return model, model


SYSTEMS: dict[str, Callable[[ViTConfig], System]] = {
    "vitkit": vitkit,
    "timm": timm,
    "huggingface": huggingface,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}


MakeCall = Callable[[str, str, int], Callable[[], Any]]  # system, model, batch -> what is timed


def side_by_side(script: str, about: str, cases: Sequence[tuple[str, int]], make: MakeCall, passes: int) -> None:
    """Time `make`'s call for every system and case; `passes` counts the forward passes its multiply-adds are worth."""
    args = arguments(about, list(dict(cases)), list(SYSTEMS)).parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    chosen = list(cases[:1]) if args.quick else list(cases)
    if args.only:
        known = {model: [b for name, b in cases if name == model] or [8] for model in args.only}
        chosen = [(model, batch) for model in args.only for batch in args.batch or known[model]]
    if args.memory_of:
        return print(f"{_megabytes(make, args.memory_of, *chosen[0]):.1f}")
    machine_, rows = machine(), []
    for model, batch in chosen:
        macs = passes * summarize(shape(model))["gmacs"] * 1e9
        calls = {system: make(system, model, batch) for system in args.systems}
        seconds, least = (2.0, 2) if args.quick else (args.seconds, args.rounds)
        found = compare(calls, batch, batch * macs, seconds, least)
        del calls
        for row in found:
            wanted = not args.quick if args.memory is None else args.memory
            row["peak_mb"] = memory_of(script, row["system"], model, batch) if wanted else None
            rows.append({"model": model, "batch": batch} | row)
        print(table(rows[-len(found) :]), flush=True)
    return save(Path(script).stem, args.save, machine_, rows, args.quick)


def _megabytes(make: MakeCall, system: str, model: str, batch: int) -> float:
    make(system, "mu", 1)()  # imports
    before = megabytes_in_use()
    call = make(system, model, batch)
    call()  # an optimiser makes its state in the first step
    return peak_megabytes_of(call) - before
