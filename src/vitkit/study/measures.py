"""What some studies measure on a trained model besides its accuracy. Each returns names and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data import normalise
from vitkit.data.keys import permutation
from vitkit.explain.distance import attention_distance
from vitkit.model.attention import Attention
from vitkit.model.build import Model, build
from vitkit.model.vit import ViT
from vitkit.study import fit
from vitkit.study.sets import Sets, resized
from vitkit.study.variants import TorchAttention

FEW = 2_000  # test pictures for what is measured many times over


def _test(sets: Sets, most: int, side: int | None = None) -> tuple[Tensor, Tensor]:
    source = resized(sets.test, side or sets.side)
    return source.pixels[:most], torch.from_numpy(source.labels[:most])


# --- shift -------------------------------------------------------------------------------------------


def shifts(side: int) -> list[int]:
    """Pixels that pictures are moved by: up to a quarter of the side."""
    return sorted({round(side * share) for share in (0, 1 / 28, 1 / 14, 1 / 9, 1 / 7, 3 / 14, 1 / 4)})


def moved(images: Tensor, down: int, right: int) -> Tensor:
    """Pictures moved by whole pixels; what comes in is black, what goes out is lost."""
    height, width = images.shape[-2:]
    d, r = max(abs(down), 0), abs(right)
    padded = F.pad(images, (r, r, d, d))
    return padded[..., d - down : d - down + height, r - right : r - right + width]


def by_shift(model: Model, sets: Sets) -> dict[str, Any]:
    """Accuracy on test pictures moved up, down, left and right by so many pixels."""
    images, labels = _test(sets, FEW)
    found = []
    for n in shifts(sets.side):
        ways = [(n, 0), (-n, 0), (0, n), (0, -n)] if n else [(0, 0)]
        found.append(sum(fit.accuracy(model, moved(images, *way), labels) for way in ways) / len(ways))
    return {"shifts": shifts(sets.side), "by_shift": found}


# --- who looks where ---------------------------------------------------------------------------------


def reach(model: Model, sets: Sets) -> dict[str, Any]:
    """Mean attention distance of every head in pixels, layers x heads, over some test pictures."""
    images, _ = _test(sets, 256, model.config.image_size[0])
    found = attention_distance(model.eval(), normalise(images, model.config.preprocessing))
    return {"distance": found.distance.mean(axis=0).tolist(), "even": found.uniform_distance}


# --- does a picture's answer depend on its neighbours? -------------------------------------------------


@torch.no_grad()
def neighbours(model: Model, sets: Sets) -> dict[str, Any]:
    """Judged alone, and judged twice among different others: an image model must not care."""
    images, labels = _test(sets, 512)
    order = torch.from_numpy(permutation(0, 0, len(images), "others"))
    batch = min(fit.BATCH, max(2, len(images) // 8))  # several batches, or there are no other neighbours
    among = fit.answers(model, images, batch)
    elsewhere = torch.empty_like(among)
    elsewhere[order] = fit.answers(model, images[order], batch)
    alone = fit.answers(model, images, 1)
    return {
        "alone": float((alone == labels).float().mean()),
        "among": float((among == labels).float().mean()),
        "changed": float((among != elsewhere).float().mean()),
        "differs_from_ours": _distance_to_ours(model, images[:64]),
    }


def _distance_to_ours(model: Model, images: Tensor) -> float | None:
    """The largest difference of a logit when PyTorch's attention is replaced by ours with the same weights."""
    assert isinstance(model, ViT)
    if not isinstance(model.encoder.blocks[0].attention, TorchAttention):
        return None
    inputs = normalise(images, model.config.preprocessing)
    theirs = model(inputs)
    ours = build(model.config).eval()
    assert isinstance(ours, ViT)
    ours.load_state_dict({name.replace(".theirs.", "."): t for name, t in model.state_dict().items()}, strict=False)
    for mine, other in zip(ours.encoder.blocks, model.encoder.blocks, strict=True):
        mine.attention = Attention.from_torch(other.attention.theirs)  # type: ignore[union-attr, arg-type]
    return float((ours(inputs) - theirs).abs().max())


# --- other sizes without training ----------------------------------------------------------------------


def by_size(model: Model, sets: Sets) -> dict[str, Any]:
    """Accuracy at other picture sizes, positions resized as the configuration says, nothing trained."""
    low, patch = model.config.image_size[0], model.config.patch_size[0]  # type: ignore[union-attr]
    sizes = [low + k * patch for k in (0, 1, 2, 4)]
    found = [fit.accuracy(model, *_test(sets, FEW, size)) for size in sizes]
    return {"sizes": sizes, "by_size": found}


MEASURES: dict[str, Callable[[Model, Sets], dict[str, Any]]] = {
    "shift": by_shift,
    "reach": reach,
    "neighbours": neighbours,
    "sizes": by_size,
}
