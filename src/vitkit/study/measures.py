"""The accuracy of a trained model, and what some studies measure besides: names and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitkit.data import normalise
from vitkit.data.keys import permutation
from vitkit.evaluation.probes import NEIGHBOURS, fewshot, knn_votes
from vitkit.explanation.distance import attention_distance, receptive_reach
from vitkit.explanation.inside import as_vit
from vitkit.model.build import Model, build
from vitkit.model.stem import ResNet
from vitkit.model.torch_attention import from_torch
from vitkit.study.sets import Sets, resized
from vitkit.study.table import BATCH
from vitkit.study.variants import TorchAttention

Measured = dict[str, object]  # numbers, and lists of them
FEW = 2_000  # test images for what is measured many times over
SHOTS = 5  # images of each class
OUTLIER = 10  # times the median deviation from the median: no token of a normal distribution lies so far out
NEAR = 10_000  # training images among which neighbours are looked for


@torch.no_grad()
def outputs(model: Model, images: Tensor, batch: int = 256) -> Tensor:
    """uint8 N C H W -> what the model gives for each image."""
    model, pre = model.eval(), model.config.preprocessing
    return torch.cat([model(normalise(part, pre)) for part in images.split(batch)])


def predictions(model: Model, images: Tensor, batch: int = 256) -> Tensor:
    """uint8 N C H W -> the predicted class of each image."""
    return outputs(model, images, batch).argmax(dim=1)


def accuracy(model: Model, images: Tensor, labels: Tensor) -> float:
    return float((predictions(model, images) == labels).float().mean())


def scored(model: Model, sets: Sets, split: str) -> float:
    """Accuracy on val or test; of a model without classes that of its nearest neighbours in train."""
    side = model.config.image_size[0]
    source, known = (resized(s, side) for s in (sets.val if split == "val" else sets.test, sets.train))
    assert source.pixels is not None
    assert known.pixels is not None
    labels = torch.from_numpy(source.labels)
    if model.config.classes:
        return accuracy(model, source.pixels, labels)
    features = [outputs(model, pixels) for pixels in (known.pixels[:NEAR], source.pixels)]
    near = torch.from_numpy(known.labels[:NEAR])
    votes = knn_votes(features[0], near, features[1], len(sets.train.classes), min(NEIGHBOURS, len(near)))
    return float((votes.argmax(dim=1) == labels).float().mean())


def _test(sets: Sets, most: int, side: int | None = None) -> tuple[Tensor, Tensor]:
    source = resized(sets.test, side or sets.side)
    assert source.pixels is not None
    return source.pixels[:most], torch.from_numpy(source.labels[:most])


def shifts(side: int) -> list[int]:
    """Pixels that images are moved by: up to a quarter of the side."""
    return sorted({round(side * share) for share in (0, 1 / 28, 1 / 14, 1 / 9, 1 / 7, 3 / 14, 1 / 4)})


def moved(images: Tensor, down: int, right: int) -> Tensor:
    """Images moved by whole pixels; their edge is repeated where they left, what goes out is lost."""
    moves = zip(images.shape[-2:], (down, right), strict=True)
    rows, columns = ((torch.arange(size) - by).clamp(0, size - 1) for size, by in moves)
    return images[..., rows[:, None], columns]


def by_shift(model: Model, sets: Sets) -> Measured:
    """Accuracy on test images moved up, down, left and right by so many pixels."""
    images, labels = _test(sets, FEW)
    accuracies = []
    for n in shifts(sets.side):
        moves = [(n, 0), (-n, 0), (0, n), (0, -n)] if n else [(0, 0)]
        accuracies.append(sum(accuracy(model, moved(images, *move), labels) for move in moves) / len(moves))
    return {"shifts": shifts(sets.side), "by_shift": accuracies}


def reach(model: Model, sets: Sets) -> Measured:
    """Mean attention distance of every head in pixels, layers x heads, over some test images.

    A ResNet has no attention: how far the pixels are that a place of each stage depends on, stages x 1.
    """
    images, _ = _test(sets, 256, model.config.image_size[0])
    inputs = normalise(images, model.config.preprocessing)
    if isinstance(model, ResNet):
        return {"distance": [[far] for far in receptive_reach(model.eval(), inputs[:64])]}
    reached = attention_distance(model.eval(), inputs)
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


def few_shots(model: Model, sets: Sets) -> Measured:
    """The paper's linear evaluation: ridge regression on what the classifier sees, from 5 images of each class."""
    test = sets.test.take(np.arange(min(FEW, len(sets.test))))
    return {"fewshot": fewshot(model, sets.train, test, [SHOTS]).accuracy[str(SHOTS)]}


@torch.no_grad()
def norms(model: Model, sets: Sets) -> Measured:
    """Lengths of the patch tokens after the last block: the longest beside the median, and the share of outliers."""
    vit = as_vit(model).eval()
    images, _ = _test(sets, 256, vit.config.image_size[0])
    states = vit.features(normalise(images, vit.config.preprocessing))[0][:, vit.config.prefix_tokens :]  # B N D
    lengths = states.norm(dim=-1).flatten()
    median = lengths.median()
    spread = (lengths - median).abs().median()
    outliers = (lengths - median).abs() > OUTLIER * spread
    return {"longest": float(lengths.max() / median), "outliers": float(outliers.float().mean())}


@torch.no_grad()
def scores(model: Model, sets: Sets) -> Measured:
    """Of the first block: the deviation of what goes into the softmax, and how even the attention is (1: all alike).

    `unit` is the deviation that products of queries and keys would have if their own channels had a deviation of 1.
    """
    vit = as_vit(model).eval()
    images, _ = _test(sets, 256)
    attention, seen = vit.encoder.blocks[0].get_submodule("attention"), list[Tensor]()
    hook = attention.get_submodule("qkv").register_forward_hook(lambda module, given, out: seen.append(out))
    vit(normalise(images, vit.config.preprocessing))
    hook.remove()
    q, k, _ = seen[0].unflatten(-1, (3, vit.config.heads, -1)).permute(2, 0, 3, 1, 4)  # each B H N K
    scaled = q @ k.mT * getattr(attention, "scale", q.shape[-1] ** -0.5)  # B H N N
    even = torch.special.entr(scaled.softmax(dim=-1)).sum(dim=-1).mean() / math.log(k.shape[2])
    unit = (q @ k.mT).std() / (q.std() * k.std())
    return {"deviation": float(scaled.std()), "evenness": float(even), "unit": float(unit)}


MEASURES: dict[str, Callable[[Model, Sets], Measured]]
MEASURES = {"moved": by_shift, "reach": reach, "neighbours": neighbours, "sizes": by_size}
MEASURES |= {"fewshot": few_shots, "norms": norms, "scores": scores}
