"""Why this class? Gradient-weighted attention relevance, and Grad-CAM on tokens.

Relevance follows Chefer, Gur & Wolf (2021): in each layer the attention is weighted by the gradient of the
class score, negative values are dropped, heads are averaged, and the layers are combined as R = R + A R.
Only the row of the output token is wanted, and v (I + A_L) ... (I + A_1) can be computed from the last
layer to the first: the order of the backward pass. So each block is run again with its attention formed,
differentiated, used and let go: the attention of one layer is in memory at a time, however deep the model.

Grad-CAM weights the channels of the last patch states that still reach the class score by their mean
gradient: the final states when the head reads patches, otherwise what the last block's attention reads.

Shapes: B images, K classes each, H heads, T tokens, D width, h x w grid of patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.errors import InputError
from vitkit.explain.inside import as_vit, batch_size, block_states, grid_of, readout, to_grid
from vitkit.model.config import Size
from vitkit.model.encoder import Block
from vitkit.model.vit import ViT


@dataclass(frozen=True)
class ClassRelevance:
    relevance: np.ndarray  # B K h w, not negative
    gradcam: np.ndarray  # B K h w, not negative


def class_relevance(model: nn.Module, images: Tensor, classes: Tensor) -> ClassRelevance:
    """Maps of what speaks for each of `classes` (B, or B K class numbers) in each image."""
    vit = as_vit(model)
    check_classes(vit, classes)
    classes = classes if classes.ndim == 2 else classes[:, None]
    device = next(vit.parameters()).device
    size = batch_size(vit.config, images, most=8)
    found = [
        _sweep(vit, some.to(device), which.to(device))
        for some, which in zip(images.split(size), classes.split(size), strict=True)
    ]
    grid, prefix = grid_of(vit.config, images), vit.config.prefix_tokens
    relevance, gradcam = (torch.cat(parts, dim=1).transpose(0, 1).cpu() for parts in zip(*found, strict=True))
    return ClassRelevance(to_grid(relevance, prefix, grid).numpy(), to_grid(gradcam, prefix, grid).numpy())


def check_classes(model: ViT, classes: Tensor) -> None:
    count = model.config.classes
    if not count:
        raise InputError("the model has no classifier (classes=0), so no class can be explained; fine-tune it first")
    low, high = int(classes.min()), int(classes.max())
    if low < 0 or high >= count:
        raise InputError(f"class {low if low < 0 else high} does not exist; the model has classes 0 to {count - 1}")


def _sweep(model: ViT, images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance and Grad-CAM of all tokens, each K B T, from the last layer to the first."""
    with torch.no_grad():
        states = list(block_states(model, images))
        start = readout(model, images)  # B T
        grid = grid_of(model.config, images)
        rotate = None if model.encoder.rotary is None else model.encoder.rotary(grid, states[0])
    flowing, rows, cam = _from_head(model, states.pop(), classes, start)  # K B T D, K B T, K B T
    for index in reversed(range(len(model.encoder.blocks))):
        block = model.encoder.blocks[index]
        assert isinstance(block, Block)
        flowing, rows, of_block = _through_block(block, states.pop(), grid, rotate, flowing, rows)
        if model.config.pooling == "cls" and index + 1 == len(model.encoder.blocks):
            cam = of_block
    return rows, cam


def _from_head(model: ViT, x: Tensor, classes: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the class scores at the last states (K B T D), where relevance starts and Grad-CAM (K B T)."""
    probe: list[Tensor] = []  # attention of a MAP head, B H 1 T
    with torch.enable_grad():
        x = x.requires_grad_()
        tokens = x if model.norm is None else model.norm(x)
        scores = model.head(tokens, on_weights=probe.append)  # B classes
        wanted = scores.gather(1, classes).sum(dim=0)  # K
    flowing, rows, cams = [], [], []
    for k, score in enumerate(wanted):
        got = torch.autograd.grad(score, (x, tokens, *probe), retain_graph=k + 1 < len(wanted))
        flowing.append(got[0])
        cams.append(_gradcam(tokens.detach(), got[1], model.config.prefix_tokens))
        if probe:  # its attention is weighted by its gradient, like that of every layer
            rows.append((probe[0].detach() * got[2]).clamp_min(0).mean(dim=1)[:, 0])
        else:
            rows.append(start)
    return torch.stack(flowing), torch.stack(rows), torch.stack(cams)


def _through_block(
    block: Block,
    x: Tensor,
    grid: Size,
    rotate: Callable[[Tensor], Tensor] | None,
    flowing: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block backwards: gradients at its input (K B T D), relevance before it, and Grad-CAM of what it reads."""
    kept: list[Tensor] = []
    read: list[Tensor] = []
    hook = block.norm1.register_forward_hook(lambda module, args, output: read.append(output))
    try:
        with torch.enable_grad():
            x = x.requires_grad_()
            y = block(x, grid, rotate, kept.append)
    finally:
        hook.remove()
    before, carried, cams = [], [], []
    for k in range(len(flowing)):
        wanted = (x, kept[0], read[0])
        to_x, to_weights, to_read = torch.autograd.grad(y, wanted, flowing[k], retain_graph=k + 1 < len(flowing))
        step = (kept[0].detach() * to_weights).clamp_min_(0).mean(dim=1)  # B T T
        before.append(to_x)
        carried.append(rows[k] + (rows[k][:, None] @ step)[:, 0])
        cams.append(_gradcam(read[0].detach(), to_read, rows.shape[-1] - grid[0] * grid[1]))
    return torch.stack(before), torch.stack(carried), torch.stack(cams)


def _gradcam(states: Tensor, gradients: Tensor, prefix: int) -> Tensor:
    """B T D twice -> B T: channels weighted by their mean gradient over the patches, what is negative dropped."""
    channels = gradients[:, prefix:].mean(dim=1, keepdim=True)  # B 1 D
    return (states * channels).sum(dim=-1).clamp_min(0)


if __name__ == "__main__":
    from vitkit.explain.command import main

    main("relevance")
