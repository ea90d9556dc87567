"""Hide patches and ask the model again: occlusion, and how faithful every other map is.

Occlusion: how the probability of a class (or a value) changes as each patch is hidden, that is filled with the image's
mean colour. Nothing is assumed about the model: it is only asked.

Faithfulness: delete or insert patches in the order that a map gives, and watch the class probability. With a faithful
map it falls fast as patches are hidden (a small area under the deletion curve) and rises fast as they are shown (a
large area under that of insertion). Random orders say what either area means on this image.

Shapes: B images, C channels, M methods, S + 1 points of a curve, h x w grid of N patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.explanation.attention import attention_of
from vitkit.explanation.inside import as_vit, grid_of, predictions
from vitkit.explanation.relevance import check_classes, relevance_of
from vitkit.explanation.subject import Column, LeftOut, Section, Subject
from vitkit.figures.panels import below, heatmap, legend_above, new_tiles, scale_bar, show
from vitkit.figures.style import COLOURS, GREY, Figure, new_figure, percent, short
from vitkit.model.config import Size
from vitkit.model.vit import ViT

LEAST_DROP = 0.01  # of a probability: where all changes are smaller, the map stays pale
RANDOM = "random order"
RANDOM_ORDERS = 3  # their mean is the curve


@dataclass(frozen=True)
class Occlusion:
    drop: np.ndarray  # B h w: prediction of the output with all patches shown, minus with this one hidden
    probability: np.ndarray  # B: with all patches shown; a value where the model predicts values


def hide(image: Tensor, hidden: Tensor, patch: Size) -> Tensor:
    """One image C H W and masks M h w (True = hidden) -> M C H W, hidden patches filled with the mean colour."""
    mask = hidden.repeat_interleave(patch[0], dim=-2).repeat_interleave(patch[1], dim=-1)  # M H W
    return torch.where(mask[:, None], image.mean(dim=(-2, -1), keepdim=True), image)


def predictions_hidden(model: ViT, image: Tensor, hidden: Tensor, output: int, most: int = 32) -> Tensor:
    """M: the prediction of one output for each mask of `hide`; the versions of the image are made some at a time."""
    some = hidden.split(4 * most)
    return torch.cat([predictions(model, hide(image, m, model.config.patch_size), most)[:, output] for m in some])


def occlusion_map(model: nn.Module, images: Tensor, classes: Tensor, most: int = 32) -> Occlusion:
    """The drop in the probability of each image's class (B) for every patch, many patches per batch."""
    vit = as_vit(model)
    check_classes(vit, classes)
    grid = grid_of(vit.config, images)
    masks = torch.eye(grid[0] * grid[1], dtype=torch.bool).unflatten(-1, grid)  # N h w
    shown = predictions(vit, images, most).gather(1, classes[:, None])[:, 0]  # B
    each = zip(images, classes.tolist(), strict=True)
    hidden = torch.stack([predictions_hidden(vit, image, masks, wanted, most) for image, wanted in each])  # B N
    return Occlusion((shown[:, None] - hidden).unflatten(1, grid).numpy(), shown.numpy())


def occlusion_of(subject: Subject) -> Occlusion:
    subject.need_classifier()
    return occlusion_map(subject.vit, subject.images.images, subject.explained[:, 0])


def make_occlusion(subject: Subject) -> Section:
    found, shown = subject.once(occlusion_of), subject.images.shown()
    flat = found.drop.reshape(len(found.drop), -1)
    number = "{:.3g}".format if subject.predicts_values else percent
    what = "value" if subject.predicts_values else "probability of the class"
    outputs, most = subject.explained[:, 0], np.abs(flat).max(axis=1)  # B
    least = LEAST_DROP * (subject.vit.outputs.std or (1.0,))[0]

    def draw() -> Figure:
        """Pairs of an image and the drop per hidden patch, each on the scale of its own largest change."""
        pairs = min(2, len(shown))
        figure, grid = new_tiles(2 * len(shown), 2 * pairs, shown[0].shape, foot=0.75)
        for i, (left, right) in enumerate(grid.reshape(-1, 2)[: len(shown)]):
            show(left, shown[i], short(subject.prediction(i, int(outputs[i])), 38 // pairs))
            painted = heatmap(right, found.drop[i] / max(float(most[i]), least), -1, 1, "coolwarm")
            right.set_aspect("auto")
            below(right, f"up to {number(float(most[i]))}")
        words = "prediction falls (red) or rises (blue), to the largest change of a map"
        scale_bar(figure, painted, words, ticks=[-1, 0, 1])
        return figure

    return Section(
        heading="Occlusion",
        finding=f"Hiding one patch lowers the {what} by up to {number(float(flat.max()))}, "
        f"{number(float(flat.max(axis=1).mean()))} on average",
        alt=f"{len(shown)} images, each beside a map of how far the {what} falls when a patch is hidden.",
        how="Each patch in turn is filled with the image's mean colour and the model is asked again. Red: the patch "
        "spoke for the class (or raised the value); blue: against it. Each map goes up to its largest change, which "
        "is named below it. Nothing is assumed about the model: this is the check of the others.",
        arrays={**vars(found), "classes": outputs.numpy(), "names": np.array(subject.images.names)},
        draw=draw,
    )


@dataclass(frozen=True)
class Faithfulness:
    methods: list[str]  # the last one is the random order
    fractions: np.ndarray  # S + 1: share of the patches that were deleted or inserted
    deletion: np.ndarray  # B M S+1: probability of the class
    insertion: np.ndarray  # B M S+1

    def table(self) -> list[dict[str, float | str]]:
        """One row per method: mean areas, and how they compare with a random order."""
        rows: list[dict[str, float | str]] = [{"method": name} for name in self.methods]
        for kind in ("deletion", "insertion"):
            areas = area(getattr(self, kind), self.fractions).mean(axis=0)  # M
            for row, value in zip(rows, areas.tolist(), strict=True):
                row |= {kind: value, f"{kind}_ratio": value / max(float(areas[-1]), 1e-12)}
        return rows


def area(curves: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Trapezoids over the last axis; a curve that stays at p has area p."""
    return ((curves[..., 1:] + curves[..., :-1]) / 2 * np.diff(fractions)).sum(axis=-1)


def faithfulness_curves(
    model: nn.Module, images: Tensor, classes: Tensor, maps: Mapping[str, np.ndarray], steps: int = 14
) -> Faithfulness:
    """Deletion and insertion curves of each map (B h w, high = important) and of random orders, on each image."""
    vit = as_vit(model)
    check_classes(vit, classes)
    grid = grid_of(vit.config, images)
    count = grid[0] * grid[1]
    counts = np.unique(np.linspace(0, count, min(steps, count) + 1).round().astype(int))
    generator, found = np.random.default_rng(0), []
    for i, (image, wanted) in enumerate(zip(images, classes.tolist(), strict=True)):
        orders = [np.argsort(-m[i].reshape(-1), kind="stable") for m in maps.values()]
        orders += [generator.permutation(count) for _ in range(RANDOM_ORDERS)]
        masks = np.stack([masks_of(order, counts) for order in orders])  # orders S+1 N: True = deleted
        both = np.stack([masks, ~masks]).reshape(-1, count)  # 2 orders S+1 rows of N
        different, back = np.unique(both, axis=0, return_inverse=True)  # all shown and all hidden come up often
        hidden = torch.from_numpy(different).unflatten(-1, grid)
        curves = predictions_hidden(vit, image, hidden, wanted).numpy()[back.reshape(-1)].reshape(2, len(orders), -1)
        known, random = np.split(curves, [len(maps)], axis=1)
        found.append(np.concatenate([known, random.mean(axis=1, keepdims=True)], axis=1))
    return Faithfulness([*maps, RANDOM], counts / count, *np.stack(found, axis=1))


def masks_of(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Patches from the most to the least important -> S+1 N masks of the first 0, ..., N of them."""
    return np.argsort(order) < counts[:, None]


def make(subject: Subject) -> Section:
    subject.need_classifier()
    if subject.predicts_values:
        raise LeftOut("it compares probabilities, and the model predicts values; see occlusion")
    attention, relevance = subject.once(attention_of), subject.once(relevance_of)
    maps = {
        "relevance": relevance.relevance[:, 0],
        "Grad-CAM": relevance.gradcam[:, 0],
        "rollout": attention.rollout,
        "last layer": attention.last,
        "occlusion": subject.once(occlusion_of).drop,
    }
    found = faithfulness_curves(subject.vit, subject.images.images, subject.explained[:, 0], maps)
    rows = found.table()
    best = min(rows[:-1], key=lambda row: row["deletion_ratio"])
    ratio = float(best["deletion_ratio"])
    finding = f"Most faithful: {best['method']}, its deletion area is {ratio:.2f} times that of a random order"
    if ratio > 0.95:
        finding = f"No map is faithful here: the best beats a random order by {1 - ratio:.0%} only"
    return Section(
        heading="Faithfulness of the maps",
        finding=finding,
        alt="Two charts of the class probability as patches are hidden, or shown, in the order of each map; a dashed "
        "line for random orders.",
        how="Deletion hides the patches that a map calls most important first; insertion shows them first. The table "
        f"gives areas under the curves, and their ratio to random orders (mean of {RANDOM_ORDERS}). A map that does "
        "not beat the random order says little about this model.",
        arrays={name: np.asarray(values) for name, values in vars(found).items()},
        draw=lambda: draw(found),
        table=rows,
        columns={
            "deletion": Column("deletion", lower_is_better=True, digits=3),
            "deletion_ratio": Column("/ random", lower_is_better=True, digits=2),
            "insertion": Column("insertion", lower_is_better=False, digits=3),
            "insertion_ratio": Column("/ random", lower_is_better=False, digits=2),
        },
    )


def draw(found: Faithfulness) -> Figure:
    """Mean deletion and insertion curves of every method; random order dashed."""
    figure = new_figure(4.1)
    both = figure.subplots(1, 2, sharey=True)
    curves = found.deletion.mean(axis=0), found.insertion.mean(axis=0)
    words = ("deletion: lower is better", "hidden"), ("insertion: higher is better", "shown")
    for axes, values, (title, done) in zip(both, curves, words, strict=True):
        axes.grid()
        axes.set_title(title, loc="left")
        axes.set(xlabel=f"patches {done}, %", xlim=(0, 100), ylim=(0, min(1.0, 1.15 * float(np.max(curves)) + 1e-6)))
        for i, name in enumerate(found.methods):
            colour, line = (GREY, "--") if name == RANDOM else (COLOURS[i % len(COLOURS)], "-")
            axes.plot(100 * found.fractions, values[i], color=colour, linestyle=line, linewidth=1.6, label=name)
    both[0].set_ylabel("probability of the class")
    legend_above(figure, both[0], 3, "lower")
    return figure
