"""Take finished studies into the docs: `python docs/make_studies_page.py FOLDER`.

FOLDER is the --out of `vitkit study`. Table, figure and text of each study go to docs/studies/, and the results
on docs/studies.md and docs/zh/studies.md are written again from the tables that are there. In Chinese a study has its
question, as the table at the top of that page has it, and its figure; the finding stays on the study's own page.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = ("studies.md", "zh/studies.md")
BEGIN, END = "<!-- results: made by docs/make_studies_page.py -->\n", "<!-- end of results -->\n"


def results(chinese: str = "") -> str:
    """The part of every study that is there; `chinese`: the text of that page, in whose table the questions are."""
    from vitkit.study.studies import STUDIES

    parts = []
    for name in STUDIES:
        path = DOCS / "studies" / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        parts.append(_chinese(name, result, chinese) if chinese else _english(name, result))
    return "\n".join(parts)


def _english(name: str, result: dict) -> str:
    first, second = result["finding"]
    data, minutes = result["data"], result["training_seconds"] / 60
    return (
        f"### `{name}`: {result['question']}\n\n{first} {second}\n\n"
        f"[![{name}](studies/{name}.png)](studies/{name}.md)\n\n"
        f"`{result['command']}`, {data['train']:,} training and {data['test']:,} test images; {result['machine']}, "
        f"{minutes:.1f} minutes of processor time. [Table](studies/{name}.md), [CSV](studies/{name}.csv), "
        f"[JSON](studies/{name}.json)\n"
    )


def _chinese(name: str, result: dict, page: str) -> str:
    found = re.search(rf"^\| `{name}` \| ([^|]+) \|", page, re.M)
    if found is None:
        raise SystemExit(f"docs/zh/studies.md has no row `{name}` in its table; add the question in Chinese")
    data, minutes = result["data"], result["training_seconds"] / 60
    return (
        f"### `{name}`：{found[1]}\n\n"
        f"[![{name}](../studies/{name}.png)](../studies/{name}.md)\n\n"
        f"`{result['command']}`，训练图片 {data['train']:,} 张，测试图片 {data['test']:,} 张；{result['machine']}，"
        f"处理器时间 {minutes:.1f} 分钟。[结论与表格（英文）](../studies/{name}.md)、[CSV](../studies/{name}.csv)、"
        f"[JSON](../studies/{name}.json)\n"
    )


def page(name: str = "studies.md") -> str:
    text = (DOCS / name).read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    shown = results(text if name.startswith("zh/") else "")
    return head + BEGIN + "\n" + shown + "\n" + END + rest.split(END)[1]


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
