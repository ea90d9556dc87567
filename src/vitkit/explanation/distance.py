"""Mean attention distance (figure 7, right, of the paper) and attention entropy, streamed over images.

Shapes: B images, L layers, H heads, N patches on a grid (h, w), T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explanation.inside import as_vit, batches, by_layer, grid_of, without_prefix
from vitkit.explanation.subject import Section, Subject
from vitkit.figures.panels import baseline, legend_above
from vitkit.figures.style import COLOURS, GREY, INK, Figure, new_figure
from vitkit.model.config import Size
from vitkit.model.stem import ResNet


@dataclass(frozen=True)
class AttentionReach:
    distance: np.ndarray  # B L H, pixels
    entropy: np.ndarray  # B L H, nats
    uniform_distance: float  # what attention spread evenly over all patches would give
    uniform_entropy: float  # log N


def patch_distances(grid: Size, patch: Size) -> Tensor:
    """N N: pixels between the centres of patches."""
    rows, columns = (torch.arange(n, dtype=torch.float64) * p for n, p in zip(grid, patch, strict=True))
    places = torch.cartesian_prod(rows, columns)  # N 2
    return (places[:, None] - places).norm(dim=-1)


def mean_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """Attention among patches (B H N N, rows sum to 1) -> pixels, B H."""
    return torch.einsum("bhqk,qk->bh", weights, distances.to(weights)) / weights.shape[-2]


def entropy(weights: Tensor) -> Tensor:
    """B H N N -> B H: mean entropy of the rows, in nats. 0 is one patch, log N all alike."""
    return torch.special.entr(weights).sum(dim=-1).mean(dim=-1)


def attention_distance(model: nn.Module, images: Tensor) -> AttentionReach:
    """Distance and entropy of every head of every layer for each image; one layer of one batch is held at a time."""
    vit = as_vit(model)
    grid = grid_of(vit.config, images)
    apart = patch_distances(grid, vit.config.patch_size)
    near = apart.float().to(next(vit.parameters()).device)

    def reach(weights: Tensor) -> Tensor:
        patches = without_prefix(weights.float(), vit.config.prefix_tokens)
        return torch.stack([mean_distance(patches, near), entropy(patches)])  # 2 B H

    found = [torch.stack(by_layer(vit, batch, reach), dim=2) for batch in batches(vit, images)]  # each 2 B L H
    distances, entropies = torch.cat(found, dim=1).cpu().numpy()
    return AttentionReach(distances, entropies, float(apart.mean()), float(np.log(grid[0] * grid[1])))


def receptive_reach(model: ResNet, images: Tensor) -> list[float]:
    """For each stage of a CNN: how far the pixels are, on average, that the place in the middle of its map depends on.

    Every pixel counts as much as its gradient is large: the receptive field as it is used, not its outer border.
    """
    found, inputs = [], images.clone().requires_grad_()
    for features in model.features(inputs, range(len(model.stem.stages)), grid=True):  # each B D h w
        y, x = (n // 2 for n in features.shape[-2:])
        (gradient,) = torch.autograd.grad(features[:, :, y, x].square().sum(), inputs, retain_graph=True)
        weights = gradient.abs().sum(dim=(0, 1))  # H W
        sizes = zip((y, x), features.shape[-2:], weights.shape, strict=True)
        centre = [(place + 0.5) * pixels / places - 0.5 for place, places, pixels in sizes]
        rows, columns = (torch.arange(n, device=weights.device) - c for n, c in zip(weights.shape, centre, strict=True))
        far = (rows[:, None].square() + columns.square()).sqrt()
        found.append(float((weights * far).sum() / weights.sum()))
    return found


def make(subject: Subject) -> Section:
    images = subject.sample if len(subject.sample) else subject.images
    if not len(images):
        subject.need_images()
    if isinstance(subject.model, ResNet):
        return _of_stages(receptive_reach(subject.model, images.images[:64]), min(64, len(images)))
    reach = attention_distance(subject.model, images.images)
    by_head = reach.distance.mean(axis=0)  # L H, pixels
    digits = 1 if by_head.max() < 20 else 0
    numbers = by_head[0].min(), by_head[0].max(), by_head[-1].mean(), by_head.mean()
    low, high, last, mean = (f"{number:.{digits}f}" for number in numbers)
    span = low if low == high else f"{low} to {high}"
    notes = f"{len(images)} images; class and register tokens left out, each row renormalised to sum to 1"
    return Section(
        heading="Attention distance and entropy",
        finding=f"Heads of layer 0 look {span} pixels away, those of the last {last}; the mean is {mean}",
        alt=f"Two charts over {reach.distance.shape[1]} layers with one dot per head: mean attention distance "
        f"in pixels and attention entropy in nats, with the mean of each layer and of the network.",
        how="How far, in pixels between patch centres, each head looks, and how widely it spreads its attention. "
        "Class, distillation and register tokens have no place in the image; they are left out, as queries and as "
        "keys, and the rest of each row is renormalised. The dashed line is attention spread evenly over all patches.",
        arrays={k: np.asarray(v) for k, v in vars(reach).items()},
        draw=lambda: draw(reach, notes),
    )


def _of_stages(distances: list[float], images: int) -> Section:
    """Of a CNN, which has no attention."""

    def drawn() -> Figure:
        figure = new_figure(3.0)
        axes = figure.subplots()
        axes.plot(range(len(distances)), distances, color=COLOURS[0], marker="o", linewidth=1.8)
        axes.set(xlabel="stage", ylabel="distance, pixels", ylim=(0, None), xticks=range(len(distances)))
        axes.grid(axis="y")
        return figure

    ends = f"{distances[0]:.1f} pixels away in the first stage and {distances[-1]:.1f} in the last"
    return Section(
        heading="Receptive field",
        finding=f"What a place depends on lies {ends}",
        alt=f"A line over {len(distances)} stages: the mean distance of the pixels that a place depends on.",
        how="A CNN has no attention. For the place in the middle of each stage's map: the mean distance of the input "
        f"pixels, each counted by the size of its gradient, over {images} images.",
        arrays={"distance": np.array(distances)},
        draw=drawn,
    )


def draw(reach: AttentionReach, notes: str) -> Figure:
    """Distance and entropy of every head by depth: dots are heads, the line their mean."""
    figure = new_figure(5.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, by_image, uniform, label in (
        (upper, reach.distance, reach.uniform_distance, "distance, pixels"),
        (lower, reach.entropy, reach.uniform_entropy, "entropy, nats"),
    ):
        by_head = by_image.mean(axis=0)  # L H
        layers, heads = by_head.shape
        depth = np.arange(layers)
        places = (depth[:, None] + (np.linspace(-0.18, 0.18, heads) if heads > 1 else 0)).ravel()
        dots = {"s": 16, "color": COLOURS[0], "alpha": 0.75, "linewidths": 0, "zorder": 3}
        axes.grid(axis="y")
        baseline(axes, uniform, "even attention")
        axes.scatter(places, by_head.ravel(), label="one head", **dots)
        axes.plot(depth, by_head.mean(axis=1), color=COLOURS[1], linewidth=1.8, label="mean of the layer", zorder=4)
        axes.axhline(by_head.mean(), color=INK, linewidth=0.9, linestyle=":", label="mean of the network")
        highest = max(uniform, float(by_head.max())) * 1.12 + 1e-9
        axes.set(ylabel=label, xlim=(-0.5, layers - 0.5), ylim=(0, highest))
        axes.set_xticks(depth if layers <= 16 else depth[::2])
    lower.set_xlabel("layer (depth)")
    figure.supxlabel(notes, fontsize=8, color=GREY)
    legend_above(figure, upper, 3)
    return figure
