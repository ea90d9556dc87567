"""Take finished studies into the docs: `python docs/make_studies_page.py FOLDER`.

FOLDER is the --out of `vitkit study`. Table, figure and text of each study go to docs/studies/, and the results
on docs/studies.md are written again from the tables that are there.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
BEGIN, END = "<!-- results: made by docs/make_studies_page.py -->\n", "<!-- end of results -->\n"


def results() -> str:
    from vitkit.study.studies import STUDIES

    parts = []
    for name in STUDIES:
        path = DOCS / "studies" / f"{name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        first, second = result["finding"]
        data, minutes = result["data"], result["training_seconds"] / 60
        parts.append(
            f"### `{name}`: {result['question']}\n\n{first} {second}\n\n"
            f"[![{name}](studies/{name}.png)](studies/{name}.md)\n\n"
            f"`{result['command']}`, {data['train']:,} training and {data['test']:,} test images; {result['machine']}, "
            f"{minutes:.1f} minutes of processor time. [Table](studies/{name}.md), [CSV](studies/{name}.csv), "
            f"[JSON](studies/{name}.json)\n"
        )
    return "\n".join(parts)


def page() -> str:
    text = (DOCS / "studies.md").read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + results() + "\n" + END + rest.split(END)[1]


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
    (DOCS / "studies.md").write_text(page(), encoding="utf-8")
