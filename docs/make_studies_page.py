"""Take finished studies into the docs: `python docs/make_studies_page.py FOLDER`.

FOLDER is the --out of `vitkit study`. Table, figure and text of each study go to docs/studies/, and on docs/studies.md
and docs/zh/studies.md two parts are written again from the tables that are there: the paper's figures and tables with
the command that makes each of them here, and the results. In Chinese a study has its question, as the table at the top
of that page has it, and what was compared; the whole finding stays on the study's own page.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("studies.md", "zh/studies.md")
RESULTS = ("<!-- results: made by docs/make_studies_page.py -->\n", "<!-- end of results -->\n")
PAPER = ("<!-- the paper: made by docs/make_studies_page.py -->\n", "<!-- end of the paper -->\n")
# what of the paper -> the study, or a command that makes it of any model and what one sees
FIGURES: dict[str, str] = {
    "table 1, sizes of models": "`vitkit zoo`",
    "table 2, results on large sets": "",
    "table 3 and 4, hyperparameters": "[train.md](train.md)",
    "table 5, fine-tuned on other sets": "transfer",
    "table 6, compute": "`vitkit plan vit-b/16`",
    "table 7, SGD and Adam": "",
    "table 8, position encodings": "positions",
    "table 9, ObjectNet": "",
    "figure 1, the model": "`vitkit.create`, [model.md](model.md)",
    "figure 2, VTAB": "",
    "figure 3 and 4, data": "data-size",
    "figure 5, accuracy and compute": "scaling",
    "figure 6, attention maps": "`vitkit explain`, attention",
    "figure 7 left and middle, filters and positions": "`vitkit explain`, filters and positions",
    "figure 7 right and 11, attention distance": "attention-distance",
    "figure 8, depth, width and patch size": "depth-width",
    "figure 9, class token and mean": "head-type",
    "figure 10, positions of several trainings": "`vitkit explain` of each, positions",
    "figure 12, speed and memory": "`python benchmarks/forward.py`",
    "figure 13, axial attention": "",
    "figure 14, many attention maps": "`vitkit explain --images 100`, attention",
    "B.1.2, self-supervision": "self-supervision",
    "4.5, patch size": "patch-size",
    "3.2, higher resolution": "resolution",
}
DOUBTS = {"underpowered": "功效不足", "short": "预算用完时训练还在进步"}
WORDS = {"agrees": "一致", "contradicts": "不一致", "does not show here": "这里看不到", "open": "尚无定论"}


def made(name: str) -> dict | None:
    path = DOCS / "studies" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def results(chinese: str = "") -> str:
    """The part of every study that is there; `chinese`: the text of that page, in whose table the questions are."""
    from vitkit.study.studies import STUDIES

    found = {name: result for name in STUDIES if (result := made(name)) is not None}
    parts = [_chinese(n, r, chinese) if chinese else _english(n, r) for n, r in found.items()]
    if missing := ", ".join(f"`{name}`" for name in STUDIES if name not in found):
        parts.append(f"尚未发布结果的实验：{missing}。\n" if chinese else f"Not published yet: {missing}.\n")
    return "\n".join(parts)


def _english(name: str, result: dict) -> str:
    first, second = result["finding"]
    doubts = "".join(f" **{doubt[0].upper()}{doubt[1:]}.**" for doubt in result["doubts"])
    data, minutes = result["data"], result["training_seconds"] / 60
    return (
        f"### `{name}`: {result['question']}\n\n"
        f"[![{name}](studies/{name}.png)](studies/{name}.md)\n\n{first} {second}{doubts}\n\n"
        f"`{result['command']}`, {data['train']:,} training and {data['test']:,} test images; {result['machine']}, "
        f"{minutes:.1f} minutes of processor time. [Table](studies/{name}.md), [CSV](studies/{name}.csv), "
        f"[JSON](studies/{name}.json)\n"
    )


def _chinese(name: str, result: dict, page: str) -> str:
    from vitkit.study.numbers import interval
    from vitkit.study.studies import STUDIES

    found = re.search(rf"^\| `{name}` \| ([^|]+) \|", page, re.M)
    if found is None:
        raise SystemExit(f"docs/zh/studies.md has no row `{name}` in its table; add the question in Chinese")
    data, minutes = result["data"], result["training_seconds"] / 60
    gap, arms = interval(result["effect_by_seed"]), result["contrast"]
    points = "sought" not in vars(type(STUDIES[name]))  # otherwise it is a length
    unit, scale = (" 个百分点", 100) if points else ("", 1)
    compared = f"“{arms[0]}”与“{arms[1]}”相比" if len(arms) == 2 else "所看的差值"
    sure = (
        f"95% 区间 {scale * gap.low:+.1f} 到 {scale * gap.high:+.1f}，{gap.seeds} 个种子"
        if gap.known
        else "只有一个种子"
    )
    doubts = "".join(f"（**{DOUBTS[doubt.split(':')[0]]}**）" for doubt in result["doubts"])
    answer = (
        f"{compared}：{scale * gap.mean:+.1f}{unit}（{sure}）。与所检验的说法{WORDS[result['agreement']]}{doubts}。"
    )
    return (
        f"### `{name}`：{found[1]}\n\n"
        f"[![{name}](../studies/{name}.png)](../studies/{name}.md)\n\n{answer}\n\n"
        f"`{result['command']}`，训练图片 {data['train']:,} 张，测试图片 {data['test']:,} 张；{result['machine']}，"
        f"处理器时间 {minutes:.1f} 分钟。[完整结论与表格（英文）](../studies/{name}.md)、[CSV](../studies/{name}.csv)、"
        f"[JSON](../studies/{name}.json)\n"
    )


def paper(chinese: bool) -> str:
    from vitkit.study.studies import STUDIES

    lines = [
        "| 论文 | 命令 | 这里的结果 | 一致吗 |" if chinese else "| of the paper | command | here | agrees |",
        "|---|---|---|---|",
    ]
    for what, by in FIGURES.items():
        command, shown, agrees = by or ("无" if chinese else "none"), "", ""
        if by in STUDIES:
            command, result = f"`vitkit study {by}`", made(by)
            shown = ("尚未发布" if chinese else "not published yet") if result is None else result["headline"]
            if result is not None:
                agrees = WORDS[result["agreement"]] if chinese else result["agreement"]
        if chinese:
            command = command.replace("](", "](../")
        lines.append(f"| {what} | {command} | {shown} | {agrees} |")
    return "\n".join(lines) + "\n"


def page(name: str = "studies.md") -> str:
    text = (DOCS / name).read_text(encoding="utf-8")
    chinese = name.startswith("zh/")
    for (begin, end), shown in ((PAPER, paper(chinese)), (RESULTS, results(text if chinese else ""))):
        head, rest = text.split(begin)
        text = head + begin + "\n" + shown + "\n" + end + rest.split(end)[1]
    return text


def take(folder: Path) -> None:
    (DOCS / "studies").mkdir(exist_ok=True)
    for path in sorted(folder.glob("*/*.json")):
        name = path.stem
        if path.parent.name == name:
            for ending in ("json", "csv", "md", "png"):
                shutil.copyfile(path.with_suffix(f".{ending}"), DOCS / "studies" / f"{name}.{ending}")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        take(Path(folder))
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
