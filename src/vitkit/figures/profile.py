"""Where the time of a model goes: an icicle, from the model over its layers and their parts to kinds of work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitkit.figures.style import COLOURS, GREY, INK, LINE, Axes, Figure, new_figure, percent, save_png, styled

_CHARACTER = 0.0135  # of the figure's width, at this size of letters
_SHOWN = 0.001  # of the time: a kind that takes less is not in the legend
_MORE = ("#8a6d3b", "#5b6b7a", "#9aa4b1", "#e0a3b4")  # where there are more kinds than colours


class Slice(NamedTuple):
    path: tuple[str, ...]  # of the module
    kind: str
    seconds: float


def save_icicle(slices: Sequence[Slice], out: Path, name: str, batch: int) -> None:
    """Into a .png or .svg, with what takes the most as its title."""
    by_kind = _by_kind(slices)
    total, first = sum(by_kind.values()), max(by_kind, key=by_kind.__getitem__)
    title = f"{name}, batch {batch}: {1e3 * total:.1f} ms, {by_kind[first] / total:.0%} {first}"
    alt = f"The time of a batch by layer, part and kind of work; {first} take the most."
    with styled():
        save_png(draw_icicle(slices, name), out, title, alt)


def _by_kind(slices: Sequence[Slice]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in slices:
        found[one.kind] = found.get(one.kind, 0.0) + one.seconds
    return found


def draw_icicle(slices: Sequence[Slice], name: str) -> Figure:
    """Time across, in the order in which layers ran; below each layer its parts, below these the kinds of work."""
    from matplotlib.patches import Patch, Rectangle

    total, by_kind = sum(one.seconds for one in slices), _by_kind(slices)
    kinds = sorted(by_kind, key=lambda kind: -by_kind[kind])
    colours = dict(zip(kinds, (*COLOURS, *_MORE), strict=False))
    figure = new_figure(3.4)
    axes = figure.subplots()
    for depth, row in enumerate(rows(slices, name)):
        left = 0.0
        for label, seconds in row:
            fill = colours.get(label, GREY) if depth == 3 else LINE
            edge = 0.4 if depth < 3 else 0.0
            place = (1e3 * left, -depth - 0.96)
            axes.add_patch(Rectangle(place, 1e3 * seconds, 0.92, facecolor=fill, edgecolor="white", linewidth=edge))
            if depth < 3:
                _write(axes, label, 1e3 * (left + seconds / 2), -depth - 0.5, seconds / total)
            left += seconds
    axes.set(xlim=(0, 1e3 * total), ylim=(-4, 0), yticks=[-0.5, -1.5, -2.5, -3.5], xlabel="ms of one batch")
    axes.set_yticklabels(["model", "layer", "part", "kind"])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    shown = [kind for kind in kinds if by_kind[kind] / total >= _SHOWN]
    handles = [Patch(color=colours.get(kind, GREY), label=f"{kind} {percent(by_kind[kind] / total)}") for kind in shown]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def _write(axes: Axes, label: str, x: float, y: float, share: float) -> None:
    """Across where there is room, else upwards, else not at all."""
    across = len(label) * _CHARACTER <= share
    if across or (share >= 1.6 * _CHARACTER and len(label) < 14):
        style = {"fontsize": 8} if across else {"fontsize": 6.5, "rotation": 90}
        axes.text(x, y, label, ha="center", va="center", color=INK, **style)


def rows(slices: Sequence[Slice], name: str) -> list[list[tuple[str, float]]]:
    """Labels and seconds of the model, of layers, of parts and of kinds: each row as long as the first."""
    tree: dict[str, dict[str, dict[str, float]]] = {}
    for one in slices:
        layer, part = (*one.path, "", "")[:2]
        inside = tree.setdefault(layer, {}).setdefault(part, {})
        inside[one.kind] = inside.get(one.kind, 0.0) + one.seconds
    layers, parts, kinds = [], [], []
    for layer, in_layer in tree.items():
        layers.append((layer, sum(sum(part.values()) for part in in_layer.values())))
        for part, in_part in in_layer.items():
            parts.append((part, sum(in_part.values())))
            kinds += sorted(in_part.items(), key=lambda item: -item[1])
    return [[(name, sum(seconds for _, seconds in layers))], layers, parts, kinds]
