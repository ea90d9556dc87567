"""Speed and accuracy of real models from results/curves.json: docs/images/curves.png, and a table in both READMEs.

The table has timm, what others make of the same weights, and our Pareto front: rows than which nothing measured is both
faster and more accurate. The READMEs need the two lines BEGIN and END where it belongs.

    python benchmarks/pareto.py        # after benchmarks/curves.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import LANGUAGES, RESULTS, ROOT, put

BEGIN, END = "<!-- curves: made by `make tables` -->", "<!-- curves: end -->"
HEADS = (
    ["model", "batch", "configuration", "speedup over timm", "accuracy", "points lost", "agreement", "fastest at"],
    ["模型", "批大小", "方案", "相对 timm 的加速比", "准确率", "损失的百分点", "与原模型一致", "在此限度内最快"],
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
    limits = ", ".join(f"{100 * limit:g}" for limit in row.get("fastest_at", []))
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
        where = (
            f"{cpu}，{threads} 线程，提交 {commit}，{date}；各方案交替测速 {rounds} 轮，取中位数（括号内为四分位数）"
        )
        return f"{where}；准确率在 {told} 张留出图像上测得，括号内为 95% 区间。"
    where = f"{cpu}, {threads} threads, commit {commit}, {date}; speeds are medians of {rounds} interleaved rounds"
    what = f"accuracies are of {told} held-out images, with the 95% interval of what is lost"
    return f"{where}\n(quartiles in brackets), {what}."


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    found = groups(rows)
    figure, axes = pyplot.subplots(1, len(found), figsize=(4.2 * len(found), 4.2), layout="constrained", squeeze=False)
    for place, ((model, batch), group) in zip(axes[0], found.items(), strict=True):
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
    return f"{about(found['machine'], found['rows'], language)}\n\n{table(found['rows'], language)}"


def main() -> None:
    for name, language in LANGUAGES.items():
        page = ROOT / name
        text = put(page.read_text(encoding="utf-8"), made(RESULTS, language), BEGIN, END)
        page.write_text(text, encoding="utf-8")
    rows = json.loads((RESULTS / "curves.json").read_text(encoding="utf-8"))["rows"]
    draw(rows, ROOT / "docs" / "images" / "curves.png")


if __name__ == "__main__":
    main()
