"""Speed and accuracy of real models from results/curves.json: docs/images/curves.png, and a table in both READMEs.

The table has timm, what others make of the same weights, and our Pareto front: rows than which nothing measured is both
faster and more accurate. It stands in the READMEs after the tables of `make bench`.

    python benchmarks/pareto.py        # after benchmarks/curves.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import END as AFTER
from tables import LANGUAGES, RESULTS, ROOT, put

BEGIN, END = "<!-- curves: made by benchmarks/pareto.py -->", "<!-- curves: end -->"
TITLES = ("Speed with its accuracy, beside timm with the same weights", "速度与准确率，与同一权重的 timm 对比")
FIGURES = ("Accuracy over speedup of every configuration", "各方案的加速比与准确率")
HEADS = (
    ["model", "batch", "configuration", "speedup over timm", "accuracy", "points lost", "agreement", "chosen at"],
    ["模型", "批大小", "方案", "相对 timm 的加速比", "准确率", "损失的百分点", "与原模型一致", "在此限度下被选中"],
)
Row = dict[str, Any]


def front(rows: list[Row]) -> list[Row]:
    """Those than which no other is at least as fast and more accurate, or faster and as accurate; slowest first."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row["ratio_to_timm"], -row["accuracy"])):
        if not kept or row["accuracy"] > kept[-1]["accuracy"]:
            kept.append(row)
    return kept[::-1]


def shown(rows: list[Row]) -> list[Row]:
    """Of one model and batch size: the peers, then our front and what was chosen for a limit."""
    peers = [row for row in rows if not row["system"].startswith("vitkit")]
    ours = [row for row in rows if row["system"].startswith("vitkit")]
    best = front(ours)
    return peers + [
        row for row in sorted(ours, key=lambda r: r["ratio_to_timm"]) if row in best or row.get("fastest_at")
    ]


def cells(row: Row) -> list[str]:
    low, high = row["drop_interval"]
    kept = {float(limit): parts for limit, parts in row.get("kept_on_parts", {}).items()}
    limits = ", ".join(f"{100 * limit:g} ({kept[limit][0]}/{kept[limit][1]})" for limit in row.get("fastest_at", []))
    quartiles = "-".join(f"{q:.2f}" for q in row["ratio_quartiles"])
    return [
        row["model"],
        str(row["batch"]),
        row["system"],
        f"{row['ratio_to_timm']:.2f}x ({quartiles})",
        f"{row['accuracy']:.1%}",
        f"{row['drop_in_points']:.1f} ({low:.1f} to {high:.1f})",
        f"{row['agreement']:.1%}",
        limits,
    ]


def groups(rows: list[Row]) -> dict[tuple[str, int], list[Row]]:
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["batch"]), []).append(row)
    return found


def table(rows: list[Row], language: int) -> str:
    lines = [HEADS[language], ["---"] * len(HEADS[language])]
    lines += [cells(row) for group in groups(rows).values() for row in shown(group)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def about(machine: Row, rows: list[Row], language: int) -> str:
    told = " / ".join(f"{count:,}" for count in sorted({row["images"] for row in rows}))
    cpu, threads, commit, date = (machine[key] for key in ("cpu", "threads", "commit", "date"))
    rounds = rows[0]["rounds"]
    if language:
        return (
            f"{cpu}，{threads} 线程，提交 {commit}，{date}；各方案交替测速 {rounds} 轮，取中位数（括号内为四分位数）；"
            f"准确率在 {told} 张预留的图片上测得，括号内为 95% 区间；"
            "最后一列为按 `tune` 的规则选中该方案的限度（百分点），括号内为每 200 张图片一组时守住限度的组数。"
            "ViT-B/16 由 ViT-Ti/16 加宽后微调而来（`benchmarks/grow.py`）；CIFAR-10 的图片只有 32 像素的细节，"
            "这对缩小图片和提前得出结果（early exit）有利。"
        )
    return (
        f"{cpu}, {threads} threads, commit {commit}, {date}; speeds are medians of {rounds} interleaved rounds\n"
        f"(quartiles in brackets), accuracies are of {told} held-out images, with the 95% interval of what is lost;\n"
        "the last column has the limits, in points, at which the rule of `tune` chooses a row, and on how many parts\n"
        "of 200 of these images they are kept. The ViT-B/16 was made of the ViT-Ti/16 by widening and fine-tuning it\n"
        "(`benchmarks/grow.py`); images of CIFAR-10 have the detail of 32 pixels, which favours smaller images\n"
        "and early exit."
    )


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    found = groups(rows)
    high, wide = (len(set(names)) for names in zip(*found, strict=True))  # a row for each model
    size = (4.6 * wide, 3.8 * high)
    figure, axes = pyplot.subplots(high, wide, figsize=size, layout="constrained", squeeze=False)
    for place, ((model, batch), group) in zip(axes.flat, found.items(), strict=True):
        for row in group:
            ours = row["system"].startswith("vitkit")
            colour = "#2b5fd9" if ours else "#d9862b"
            place.plot(row["ratio_to_timm"], 100 * row["accuracy"], "o" if ours else "s", color=colour, alpha=0.75)
            if not ours:
                at = (row["ratio_to_timm"], 100 * row["accuracy"])
                place.annotate(row["system"], at, (4, -9), textcoords="offset points", fontsize=7, color=colour)
        best = front([row for row in group if row["system"].startswith("vitkit")])
        place.plot(
            [r["ratio_to_timm"] for r in best], [100 * r["accuracy"] for r in best], color="#2b5fd9", linewidth=1
        )
        base = next(row for row in group if row["system"] == "timm")["accuracy"]
        place.axhspan(100 * base - 0.5, 100 * base, color="#eeeeee", zorder=0)
        place.set(title=f"{model}, batch {batch}", xlabel="speedup over timm", ylabel="accuracy, %")
        place.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def made(results: Path, language: int) -> str:
    found = json.loads((results / "curves.json").read_text(encoding="utf-8"))
    parts = [f"**{TITLES[language]}**", f"![{FIGURES[language]}](docs/images/curves.png)"]
    return "\n\n".join([*parts, about(found["machine"], found["rows"], language), table(found["rows"], language)])


def placed(text: str, tables: str) -> str:
    """A page with the table: where it was, or after the tables of `make bench`."""
    after = "" if BEGIN in text else f"{AFTER}\n\n{BEGIN}\n{END}"
    return put(text.replace(AFTER, after) if after else text, tables, BEGIN, END)


def main() -> None:
    for name, language in LANGUAGES.items():
        page = ROOT / name
        page.write_text(placed(page.read_text(encoding="utf-8"), made(RESULTS, language)), encoding="utf-8")
    rows = json.loads((RESULTS / "curves.json").read_text(encoding="utf-8"))["rows"]
    draw(rows, ROOT / "docs" / "images" / "curves.png")


if __name__ == "__main__":
    main()
