"""docs/images/bench.png: what the tables of the README say, to be seen at a glance. Made by `make tables`.

Left: throughput of every system relative to timm in the same rounds (a dot is the median, a line the quartiles).
Right: test accuracy that each system reached in the same time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIGURE = Path(__file__).parent.parent / "docs" / "images" / "bench.png"
COLOURS = {"vitkit": "#2b5fd9", "timm": "#d9862b", "huggingface": "#8a8a8a", "torchvision": "#b5b5b5"}
COLOURS |= {"vit-pytorch": "#5aa469"}


def rows_of(name: str, results: Path) -> list[dict[str, Any]]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def speeds(axes: Any, results: Path) -> None:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for name, what in (("forward", "forward"), ("train_step", "training")):
        for row in rows_of(name, results):
            cases.setdefault(f"{what}, {row['model']}, batch {row['batch']}", {})[row["system"]] = row
    for place, case in enumerate(cases.values()):
        base = case["timm"]["images_per_second"]
        for offset, (system, row) in enumerate(case.items()):
            y = place + 0.13 * (offset - 2)
            axes.plot([q / base for q in row["quartiles"]], [y, y], color=COLOURS[system], linewidth=1.5)
            axes.plot(row["images_per_second"] / base, y, "o", color=COLOURS[system], markersize=5)
    axes.axvline(1, color="#cccccc", linewidth=1, zorder=0)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xlabel("img/s, relative to timm")
    axes.set_title("Throughput")


def accuracies(axes: Any, results: Path) -> None:
    rows = rows_of("time_to_accuracy", results)
    pairs = list(dict.fromkeys((row["data"], row["system"]) for row in rows))
    for place, (data, system) in enumerate(pairs):
        found = [100 * row["looks"][-1]["test"] for row in rows if (row["data"], row["system"]) == (data, system)]
        mean = sum(found) / len(found)
        axes.barh(place, mean, color=COLOURS[system], height=0.7)
        axes.text(mean + 1, place, f"{mean:.1f}%", va="center")
    axes.set_yticks(range(len(pairs)), [data for data, _ in pairs])
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("test accuracy after the same minutes")
    axes.set_title("Learning")


def draw(results: Path = RESULTS, path: Path = FIGURE) -> None:
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), width_ratios=(3, 2), layout="constrained")
    speeds(left, results)
    accuracies(right, results)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    dots = [Line2D([], [], marker="o", linestyle="", color=c, label=system) for system, c in COLOURS.items()]
    figure.legend(handles=dots, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw()
