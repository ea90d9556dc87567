"""Training only a part of a model: frozen layers, the linear probe, low-rank updates (LoRA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitkit.errors import ConfigError
from vitkit.model.build import Model, outline
from vitkit.model.encoder import Block
from vitkit.model.vit import ViT


class LowRank(nn.Module):
    """weight -> weight + B A / sqrt(r): B starts at zero, so that the model starts as it was."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.randn(rank, inputs, device=weight.device, dtype=weight.dtype) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device, dtype=weight.dtype))
        self.scale = rank**-0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def classifiers(model: Model) -> list[nn.Linear]:
    parts = (model.head.classifier, model.head.distilled) if isinstance(model, ViT) else (model.head,)
    return [part for part in parts if part is not None]


def freeze(model: Model, what: str) -> None:
    """ "backbone" leaves only the classifier to learn; a number freezes the embedding and so many blocks."""
    if not what:
        return
    if what == "backbone":
        model.requires_grad_(False)
        for part in classifiers(model):
            part.requires_grad_(True)
        return
    if not isinstance(model, ViT):
        raise ConfigError(f"freeze={what} counts Transformer blocks, and a ResNet has none; use freeze=backbone")
    blocks, count = model.encoder.blocks, int(what)
    if count > len(blocks):
        raise ConfigError(f"freeze={what}: the model has only {len(blocks)} blocks; use freeze=backbone for all")
    model.requires_grad_(False)
    for module in (*list(blocks)[count:], model.norm, model.head):
        if module is not None:
            module.requires_grad_(True)


def add_lora(model: Model, rank: int) -> None:
    """Freeze all but the classifier, and give the attention's maps low-rank updates that learn."""
    if not rank:
        return
    if not isinstance(model, ViT):
        raise ConfigError("lora updates the maps of attention, and a ResNet has none; use freeze=backbone")
    freeze(model, "backbone")
    for block in model.encoder.blocks:
        assert isinstance(block, Block)
        for linear in (block.attention.qkv, block.attention.out):
            parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


@torch.no_grad()
def plain(model: Model) -> Model:
    """The model without adapters: low-rank updates are added into the weights they belong to."""
    if not any(parametrize.is_parametrized(m) for m in model.modules()):
        return model
    merged = outline(model.config)
    tensors = {}
    for name in merged.state_dict():
        owner, _, leaf = name.rpartition(".")
        tensors[name] = getattr(model.get_submodule(owner), leaf).detach()
    merged.load_state_dict(tensors, assign=True)
    return merged.eval()
