"""The layer table of a model: output shape, parameters and multiply-adds of each part.

The model is built and run on PyTorch's meta device, which knows shapes but holds no numbers: ViT-H/14
at 518 pixels takes a second and no memory. Multiply-adds are what papers call FLOPs: those of the
linear maps, convolutions and the two products of attention, for one image with every token computed.
The published figures of the hybrids come from another counter, which adds 5 for each value that is
normalised and 4 for each weight that is standardised (0.5% in all): hybrids are counted that way too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.model.attention import Attention
from vitkit.model.build import Model, outline
from vitkit.model.config import AnyConfig, ViTConfig
from vitkit.model.head import MapPool
from vitkit.model.patches import PatchEmbedding
from vitkit.model.positions import AddedPositions, RelativeBias
from vitkit.model.stem import ResNetStem, StdConv
from vitkit.model.vit import ViT


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    shape: tuple[int, ...]  # of the output, for a batch of one
    params: int  # of the layer itself, without what is inside other rows
    macs: int


def summarize(config: AnyConfig, name: str = "") -> dict[str, Any]:
    """Everything about a configuration that can be counted, with one row per layer."""
    model = outline(config).eval()
    layers = layer_table(model)
    params = sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for part in _classifiers(model) for p in part.parameters())
    about: dict[str, Any] = {"name": name, "image_size": list(config.image_size)}
    if isinstance(config, ViTConfig):
        about |= {key: getattr(config, key) for key in ("depth", "width", "heads", "mlp_width", "tokens")}
        about["patch_size"] = list(config.patch_size)
    else:
        about |= {"depth": 2 + 3 * sum(config.stem.layers), "width": config.stem.width, "heads": 0, "mlp_width": 0}
        about |= {"tokens": 0, "patch_size": [config.stem.stride] * 2}
    about |= {"channels": config.channels, "classes": config.classes, "params": params}
    about |= {"params_without_head": params - head, "gmacs": round(sum(row.macs for row in layers) / 1e9, 6)}
    about["layers"] = [
        {"name": r.name, "kind": r.kind, "shape": list(r.shape), "params": r.params, "macs": r.macs} for r in layers
    ]
    return about


def layer_table(model: Model) -> list[Layer]:
    """One row per part that computes something, in the order an image meets them."""
    rows: dict[str, Layer] = {}
    counted: set[int] = set()
    hybrid = isinstance(model, ViT) and isinstance(model.stem, ResNetStem)

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if not isinstance(out, Tensor):
            return
        own = [p for p in module.parameters(recurse=False) if id(p) not in counted]
        if isinstance(module, AddedPositions) and isinstance(model, ViT):
            own += [p for p in (model.class_token, model.distillation_token, model.registers) if p is not None]
        counted.update(id(p) for p in own)
        shape = tuple(out.shape)
        macs = _macs(module, inputs, out) + (_norm_macs(module, out) if hybrid else 0)
        rows[name] = Layer(name, type(module).__name__, shape, sum(p.numel() for p in own), macs)

    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, PatchEmbedding, AddedPositions, RelativeBias)
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: note(name, m, i, o))
        for name, module in model.named_modules()
        if isinstance(module, (*kinds, Attention, MapPool)) or _scales(module)
    ]
    config = model.config
    images = torch.empty(1, config.channels, *config.image_size, device=next(model.parameters()).device)
    try:
        with torch.no_grad():
            model.head(model.tokens(images)) if isinstance(model, ViT) else model(images)
    finally:
        for handle in handles:
            handle.remove()
    return list(rows.values())


def _scales(module: nn.Module) -> bool:
    return getattr(module, "scale1", None) is not None


def _classifiers(model: Model) -> list[nn.Module]:
    parts = (model.head.classifier, model.head.distilled) if isinstance(model, ViT) else (model.head,)
    return [part for part in parts if part is not None]


def _norm_macs(module: nn.Module, out: Tensor) -> int:
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return 5 * out.numel()
    return 4 * module.weight.numel() if isinstance(module, StdConv) else 0


def _macs(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> int:
    """Multiply-adds of the module itself for a batch of one."""
    if isinstance(module, (nn.Linear, nn.Conv2d, PatchEmbedding)):
        return out.numel() * module.weight[0].numel()
    if isinstance(module, Attention):
        return 2 * inputs[0].shape[1] ** 2 * out.shape[-1]  # q k^T, and weights times v
    if isinstance(module, MapPool):
        return 2 * inputs[0].shape[1] * out.shape[-1]
    return 0
