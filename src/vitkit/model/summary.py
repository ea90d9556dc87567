"""The layer table of a model: output shape, parameters and multiply-adds of each part.

The model is built and run on PyTorch's meta device, which knows shapes but holds no numbers: ViT-H/14
at 518 pixels takes a second and no memory. Multiply-adds are what papers call FLOPs: those of the
linear maps, convolutions and the two products of attention, for one image with every token computed.
The published figures of the hybrids come from another counter, which adds 5 for each value that is
normalised and 4 for each weight that is standardised (0.5% in all): hybrids are counted that way too.
"""

from __future__ import annotations

from functools import partial
from typing import TypedDict

import torch
from torch import Tensor, nn

from vitkit.model.attention import Attention
from vitkit.model.blocks import SideBySide
from vitkit.model.build import Model, outline
from vitkit.model.config import AnyConfig
from vitkit.model.encoder import Block
from vitkit.model.head import MapPool
from vitkit.model.patches import PatchEmbedding
from vitkit.model.positions import PositionPart, Positions
from vitkit.model.resnet_d import BatchNorm
from vitkit.model.stem import ResNetStem, StdConv, Whitening
from vitkit.model.vit import ViT

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BatchNorm)


class Layer(TypedDict):
    name: str
    kind: str
    shape: list[int]  # of the output, for a batch of one
    params: int  # of the layer itself, without what is inside other rows
    macs: int


class Summary(TypedDict, total=False):
    name: str
    image_size: list[int]
    patch_size: list[int]
    depth: int
    width: int
    heads: int
    mlp_width: int
    tokens: int
    channels: int
    classes: int
    params: int
    params_without_head: int
    gmacs: float
    layers: list[Layer]


def summarize(config: AnyConfig, name: str = "") -> Summary:
    """Everything about a configuration that can be counted, with one row per layer."""
    model = outline(config).eval()
    layers = layer_table(model)
    params = sum(p.numel() for p in model.parameters())
    head = sum(p.numel() for part in model.classifiers for p in part.parameters())
    return {
        "name": name,
        "image_size": list(config.image_size),
        "patch_size": list(config.patch_size),
        "depth": config.depth,
        "width": config.width,
        "heads": config.heads,
        "mlp_width": config.mlp_width,
        "tokens": config.tokens,
        "channels": config.channels,
        "classes": config.classes,
        "params": params,
        "params_without_head": params - head,
        "gmacs": round(sum(row["macs"] for row in layers) / 1e9, 6),
        "layers": layers,
    }


def layer_table(model: Model, as_run: bool = False) -> list[Layer]:
    """One row per part of an outline that computes something, in the order an image meets them.

    Every token is computed in every block, or `as_run` in the last block only what the head reads.
    """
    rows: dict[str, Layer] = {}
    hybrid = isinstance(model, ViT) and isinstance(model.stem, ResNetStem)

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, object]) -> None:
        out = output[0] if isinstance(output, tuple) else output
        own = list(module.parameters(recurse=False))
        if isinstance(module, Positions):
            own += model.parameters(recurse=False)  # the tokens before the patches
        if isinstance(module, SideBySide):  # it runs in place of the attentions of its branches
            own += [p for b in module.branches for part in (b, b.attention) for p in part.parameters(recurse=False)]
        macs = _macs(module, inputs, out, hybrid)
        params = sum(p.numel() for p in own)
        rows[name] = Layer(name=name, kind=type(module).__name__, shape=list(out.shape), params=params, macs=macs)

    kinds = (nn.Linear, nn.Conv2d, Whitening, *NORMS, PatchEmbedding, PositionPart, Attention, MapPool)
    for name, module in model.named_modules():
        if isinstance(module, kinds) or (isinstance(module, Block) and module.scale1 is not None):
            module.register_forward_hook(partial(note, name))
    images = torch.empty(1, model.config.channels, *model.config.image_size, device="meta")
    with torch.no_grad():
        model.head(model.tokens(images)) if isinstance(model, ViT) and not as_run else model(images)
    return list(rows.values())


def _channels(attention: Attention) -> int:
    """Of all heads together."""
    if isinstance(attention, SideBySide):
        return sum(_channels(branch.attention) for branch in attention.branches)
    return attention.qkv.out_features // 3


def _macs(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor, hybrid: bool) -> int:
    """Multiply-adds of the module itself for a batch of one."""
    if isinstance(module, NORMS):
        return 5 * out.numel() if hybrid else 0
    if isinstance(module, (nn.Linear, nn.Conv2d, Whitening, PatchEmbedding)):
        standardised = 4 * module.weight.numel() if hybrid and isinstance(module, StdConv) else 0
        return out.numel() * module.weight[0].numel() + standardised
    if isinstance(module, Attention):
        return 2 * inputs[0].shape[1] * out.shape[1] * _channels(module)  # q k^T, and weights times v
    return 2 * (inputs[0].shape[1] - module.skipped) * out.shape[-1] if isinstance(module, MapPool) else 0
