"""The accuracy of a trained model, and what some studies measure besides: names and numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.data import normalise
from vitkit.data.keys import permutation
from vitkit.explanation.distance import attention_distance
from vitkit.explanation.inside import as_vit
from vitkit.model.build import Model, build
from vitkit.model.torch_attention import from_torch
from vitkit.study.sets import Sets, resized
from vitkit.study.table import BATCH
from vitkit.study.variants import TorchAttention

Measured = dict[str, object]  # numbers, and lists of them
FEW = 2_000  # test images for what is measured many times over


@torch.no_grad()
def predictions(model: Model, images: Tensor, batch: int = 256) -> Tensor:
    """uint8 N C H W -> the predicted class of each image."""
    model, pre = model.eval(), model.config.preprocessing
    return torch.cat([model(normalise(part, pre)).argmax(dim=1) for part in images.split(batch)])


def accuracy(model: Model, images: Tensor, labels: Tensor) -> float:
    return float((predictions(model, images) == labels).float().mean())


def _test(sets: Sets, most: int, side: int | None = None) -> tuple[Tensor, Tensor]:
    source = resized(sets.test, side or sets.side)
    assert source.pixels is not None
    return source.pixels[:most], torch.from_numpy(source.labels[:most])


def shifts(side: int) -> list[int]:
    """Pixels that images are moved by: up to a quarter of the side."""
    return sorted({round(side * share) for share in (0, 1 / 28, 1 / 14, 1 / 9, 1 / 7, 3 / 14, 1 / 4)})


def moved(images: Tensor, down: int, right: int) -> Tensor:
    """Images moved by whole pixels; what comes in is black, what goes out is lost."""
    return F.pad(images, (right, -right, down, -down))


def by_shift(model: Model, sets: Sets) -> Measured:
    """Accuracy on test images moved up, down, left and right by so many pixels."""
    images, labels = _test(sets, FEW)
    accuracies = []
    for n in shifts(sets.side):
        moves = [(n, 0), (-n, 0), (0, n), (0, -n)] if n else [(0, 0)]
        accuracies.append(sum(accuracy(model, moved(images, *move), labels) for move in moves) / len(moves))
    return {"shifts": shifts(sets.side), "by_shift": accuracies}


def reach(model: Model, sets: Sets) -> Measured:
    """Mean attention distance of every head in pixels, layers x heads, over some test images."""
    images, _ = _test(sets, 256, model.config.image_size[0])
    reached = attention_distance(model.eval(), normalise(images, model.config.preprocessing))
    return {"distance": reached.distance.mean(axis=0).tolist(), "even": reached.uniform_distance}


@torch.no_grad()
def neighbours(model: Model, sets: Sets) -> Measured:
    """Accuracy image by image and in batches, and predictions that change with the rest of the batch."""
    images, labels = _test(sets, 512)
    order = torch.from_numpy(permutation(0, 0, len(images), "others"))
    batch = min(BATCH, max(2, len(images) // 8))  # several batches, or there are no other neighbours
    among = predictions(model, images, batch)
    elsewhere = torch.empty_like(among)
    elsewhere[order] = predictions(model, images[order], batch)
    alone = predictions(model, images, 1)
    shares = {"alone": alone == labels, "among": among == labels, "changed": among != elsewhere}
    found: Measured = {name: float(which.float().mean()) for name, which in shares.items()}
    return {**found, "differs_from_ours": _distance_to_ours(model, images[:64])}


def _distance_to_ours(model: Model, images: Tensor) -> float | None:
    """The largest difference of a logit when PyTorch's attention is replaced by ours with the same weights."""
    model = as_vit(model)
    if not isinstance(model.encoder.blocks[0].attention, TorchAttention):
        return None
    inputs = normalise(images, model.config.preprocessing)
    theirs = model(inputs)
    ours = as_vit(build(model.config).eval())
    ours.load_state_dict({name.replace(".theirs.", "."): t for name, t in model.state_dict().items()}, strict=False)
    for mine, other in zip(ours.encoder.blocks, model.encoder.blocks, strict=True):
        mine.attention = from_torch(other.attention.theirs)  # type: ignore[union-attr, arg-type]
    return float((ours(inputs) - theirs).abs().max())


def by_size(model: Model, sets: Sets) -> Measured:
    """Accuracy at other image sizes, positions resized as the configuration says, nothing trained."""
    config = model.config
    sizes = [config.image_size[0] + k * config.patch_size[0] for k in (0, 1, 2, 4)]
    return {"sizes": sizes, "by_size": [accuracy(model, *_test(sets, FEW, size)) for size in sizes]}


MEASURES: dict[str, Callable[[Model, Sets], Measured]]
MEASURES = {"shift": by_shift, "reach": reach, "neighbours": neighbours, "sizes": by_size}
