"""Write the README's comparison tables, in both languages, from benchmarks/results/: `make tables`.

All tables are of one run of `make bench`: one machine, one commit, one day, which stand above them; what was measured
again since has its own beside its title, and what that run did not measure has no table. Speeds are medians over
interleaved rounds; behind a ratio stand its quartiles over the rounds. Ratios are to the best peer, so that a value
below 1 says where vitkit loses.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- tables: made by `make tables` -->", "<!-- tables: end -->"
LANGUAGES = {"README.md": 0, "README.zh-CN.md": 1}
SYSTEMS = {
    "vitkit": "vitkit",
    "timm": "timm",
    "huggingface": "Hugging Face",
    "torchvision": "torchvision",
    "vit-pytorch": "vit-pytorch",
}

Words = tuple[str, str]  # English, Chinese
Made = tuple[list[Words], list[list[Any]]]  # heads of the columns, cells: text, or words in both languages

MODEL: Words = ("model", "模型")
BATCH: Words = ("batch size", "批大小")
RATIO: Words = ("vs. best peer", "相对最快的同类")


def side_by_side(rows: list[dict[str, Any]]) -> Made:
    """Throughput of every system, by model and batch; the best in bold."""
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["batch"]), {})[row["system"]] = row
    present = [s for s in SYSTEMS if any(s in case for case in cases.values())]
    cells = []
    for (model, batch), case in cases.items():
        best = max(row["images_per_second"] for row in case.values())
        speeds = [_speed(case[s]["images_per_second"], best) if s in case else "-" for s in present]
        ours = case["vitkit"]
        cells.append([model, str(batch), *speeds, _ratio(ours["ratio_to_best_peer"], ours["ratio_quartiles"])])
    return [MODEL, BATCH, *((SYSTEMS[s], SYSTEMS[s]) for s in present), RATIO], cells


def _speed(value: float, best: float) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"**{text}**" if value == best else text


def _ratio(value: float, quartiles: list[float]) -> str:
    return f"{value:.2f}x ({quartiles[0]:.2f}-{quartiles[1]:.2f})"


def loading(rows: list[dict[str, Any]]) -> Made:
    """Seconds of vitkit and of the family's own reader, by format."""
    cells = []
    for name in dict.fromkeys(row["format"] for row in rows):
        ours, *theirs = sorted((r for r in rows if r["format"] == name), key=lambda r: r["system"] != "vitkit")
        peer = min(theirs, key=lambda r: r["seconds"], default=None)
        beside = f"{peer['seconds']:.2f} s ({peer['system']})" if peer else "-"
        cells.append([name, f"{ours['seconds']:.2f} s", beside])
    return [("format", "格式"), ("vitkit", "vitkit"), ("its own library", "原生库")], cells


def reaching(rows: list[dict[str, Any]]) -> Made:
    """Test accuracy that each system reached: the mean over seeds, with their range where there are several."""
    cells = []
    for data, system in dict.fromkeys((row["data"], row["system"]) for row in rows):
        looks = [row["looks"][-1] for row in rows if (row["data"], row["system"]) == (data, system)]
        found = [100 * look["test"] for look in looks]
        spread = f" ({min(found):.1f}-{max(found):.1f})" if len(found) > 1 else ""
        minutes = statistics.mean(look["seconds"] for look in looks) / 60
        cells.append(
            [data, SYSTEMS[system], f"{statistics.mean(found):.1f}%{spread}", str(len(found)), f"{minutes:.1f}"]
        )
    heads: list[Words] = [("data", "数据"), ("system", "系统"), ("test accuracy", "测试准确率"), ("seeds", "种子数")]
    return [*heads, ("minutes", "分钟")], cells


def running(rows: list[dict[str, Any]]) -> Made:
    """The speedup over timm of every runtime that gives the same answers; pareto.py has the others, with accuracies."""
    timed = [r for r in rows if "batch" in r and not {"int8", "merge"} & set(r["system"].split())]
    cases = list(dict.fromkeys((r["model"], r["batch"]) for r in timed))
    found = {(r["system"], r["model"], r["batch"]): (r["ratio_to_timm"], r["ratio_quartiles"]) for r in timed}
    heads: list[Words] = [("speedup over timm", "相对 timm 的加速比")]
    heads += [(f"{model}, {batch}", f"{model}，{batch}") for model, batch in cases]
    cells = []
    for system in dict.fromkeys(r["system"] for r in timed):
        values = [found.get((system, *case)) for case in cases]
        cells.append([system, *("-" if value is None else _ratio(*value) for value in values)])
    return heads, cells


SERVING: dict[str, Words] = {
    "throughput": ("throughput with 32 clients, relative to the bare runtime", "32 个客户端时的吞吐，相对裸运行时"),
    "half load": ("p99 latency at half load, in batch times", "半载时的 P99 延迟，以单批耗时为单位"),
    "overload": (
        "p99 latency at four times the load, relative to 32 clients",
        "四倍负载时的 P99 延迟，相对 32 个客户端",
    ),
    "SIGTERM": ("requests lost at SIGTERM", "收到 SIGTERM 时丢失的请求"),
    "memory": (
        "memory after all requests, relative to after a fifth of them",
        "全部请求之后的内存，相对完成五分之一时",
    ),
}


def serving(rows: list[dict[str, Any]]) -> Made:
    heads: list[Words] = [("metric", "指标"), ("measured", "实测"), ("goal", "目标"), ("met", "达标")]
    cells = []
    for row in rows:
        goal = f"{'≥' if row['what'] == 'throughput' else '≤'} {row['limit']:g}"
        cells.append([SERVING[row["what"]], f"{row['value']:.3g}", goal, "✓" if row["holds"] else "✗"])
    return heads, cells


def planning(rows: list[dict[str, Any]]) -> Made:
    heads: list[Words] = [MODEL, BATCH, ("checkpointing", "梯度检查点")]
    heads += [("memory, planned / measured", "内存，计划 / 实测"), ("time, planned / measured", "时间，计划 / 实测")]
    cells = []
    for row in rows:
        again = "✓" if row["checkpointing"] else ""
        ratios = [f"{row['memory_ratio']:.2f}", f"{row['time_ratio']:.2f}"]
        cells.append([row["model"], str(row["batch"]), again, *ratios])
    return heads, cells


TABLES: dict[str, tuple[Words, Callable[[list[dict[str, Any]]], Made]]] = {
    "forward": (("Forward pass, img/s", "前向推理吞吐（img/s）"), side_by_side),
    "train_step": (("Training step, img/s", "训练吞吐（img/s）"), side_by_side),
    "load": (("Loading a ViT-B/16 checkpoint", "加载 ViT-B/16 检查点"), loading),
    "time_to_accuracy": (("Accuracy reached in a given time", "限定时间内达到的准确率"), reaching),
    "inference": (("Runtimes in fp32, by model and batch size", "各运行时的 fp32 速度，按模型与批大小"), running),
    "serve": (("Serving under load", "服务的负载测试"), serving),
    "plan": (("`vitkit plan` against measurements", "`vitkit plan` 与实测对比"), planning),
}


def made(results: Path, language: int) -> str:
    """All tables of the last `make bench`, under one line about it."""
    summary = results / "bench.json"
    if not summary.exists():
        return ""
    bench = json.loads(summary.read_text(encoding="utf-8"))
    parts = [about(bench, language)]
    for name in (name for name in TABLES if name in bench["minutes"]):
        (title, make), found = TABLES[name], json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
        parts.append(f"**{title[language]}**{apart(found['machine'], bench['machine'], language)}")
        parts.append(table(*make(found["rows"]), language))
    return "\n\n".join(parts)


def apart(found: dict[str, Any], bench: dict[str, Any], language: int) -> str:
    """Commit and day of a table that was measured again after `make bench`."""
    if found["commit"] == bench["commit"]:
        return ""
    commit, date = found["commit"], found["date"]
    return f"（提交 {commit}，{date}）" if language else f" (commit {commit}, {date})"


def table(heads: list[Words], cells: list[list[Any]], language: int) -> str:
    told = [[cell if isinstance(cell, str) else cell[language] for cell in line] for line in [heads, *cells]]
    lines = [told[0], ["---"] * len(heads), *told[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def about(bench: dict[str, Any], language: int) -> str:
    """Machine, versions, commit and day, in words."""
    found, minutes = bench["machine"], sum(bench["minutes"].values())
    cpu, threads, torch = found["cpu"], found["threads"], found["packages"]["torch"]
    if language:
        return (
            f"除另有注明外，以下全部来自同一次 `make bench`：{cpu}，{threads} 线程，torch {torch}，"
            f"提交 {found['commit']}，{found['date']}，共 {minutes:.0f} 分钟。速度为各轮的中位数，括号内为四分位数。"
        )
    return (
        f"All of one `make bench`, if not said otherwise: {cpu}, {threads} threads, torch {torch},\n"
        f"commit {found['commit']}, {found['date']}, {minutes:.0f} minutes.\n"
        "Speeds are medians over interleaved rounds, quartiles in brackets."
    )


def put(text: str, tables: str, begin: str = BEGIN, end: str = END) -> str:
    """A page with the tables between its marks."""
    if begin not in text or end not in text:
        raise SystemExit(f"the page has no place for tables; add the lines {begin} and {end}")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n\n{tables}\n\n{end}{rest.split(end, 1)[1]}"


def main(root: Path = ROOT, results: Path = RESULTS) -> None:
    if not (results / "bench.json").exists():
        raise SystemExit("nothing was measured yet: run `make bench`")
    for name, language in LANGUAGES.items():
        page = root / name
        page.write_text(put(page.read_text(encoding="utf-8"), made(results, language)), encoding="utf-8")
    bench = json.loads((results / "bench.json").read_text(encoding="utf-8"))
    if {"forward", "train_step", "time_to_accuracy"} <= bench["minutes"].keys():
        from figure import draw

        draw(results, root / "docs" / "images" / "bench.png")


if __name__ == "__main__":
    sys.exit(main())
