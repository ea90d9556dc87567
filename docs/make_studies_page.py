"""Take finished studies into the docs: `python docs/make_studies_page.py [FOLDER ...]`.

FOLDER is the --out of `vitkit study`. NAME.json of each finished study goes to docs/studies/, or to docs/studies/again/
when it was run on other images than the study's own; its page then tells both. Everything else is made from these
files, in English and in Chinese, without any training: table, figure and page of each study; the gallery; the page of
questions; and two tables on docs/studies.md, of all studies and of the paper's figures and tables. A study without a
result is "not run yet".
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

from studies_in_chinese import AGREES, DOUBTS, VERDICT, WORDS, compare

from vitkit.study.studies import STUDIES
from vitkit.study.table import Result
from vitkit.study.write import answer, as_csv, as_markdown, read, table_lines, write

DOCS = Path(__file__).parent
AGAIN = "studies/again"
MARKS = ("<!-- {}: made by docs/make_studies_page.py -->\n", "<!-- end of {} -->\n")
# in the order of the articles: an image becomes patches, gets a class token and positions, and meets attention
SECTIONS = {
    ("Patches", "图块"): ("patch-embed", "patch-size"),
    ("Class token", "分类 token"): ("why-a-class-token", "pooling", "head-type"),
    ("Positions", "位置编码"): ("positions", "add-or-concatenate", "positions-by-patch-size"),
    ("Attention", "注意力"): (
        "attention-bug",
        "scale-in-softmax",
        "why-sqrt",
        "how-many-heads",
        "heads",
        "attention-distance",
        "registers",
    ),
    ("Encoder and training", "编码器与训练"): (
        "depth-width",
        "dropout",
        "gradient-accumulation-and-normalisation",
    ),
    ("Data", "数据"): ("data-size", "shift", "scaling", "augmentation-vs-data", "self-supervision"),
    ("Fine-tuning", "微调"): ("transfer", "resolution"),
}
DRAWN = ("drawn of any checkpoint", "可对任何检查点作图")
LARGE = ("none: needs images and machines that are not at hand", "无：需要手头没有的图片和机器")
# what of the paper, in both languages -> the study; or a command, and what it shows
FIGURES: dict[tuple[str, str], str | tuple[str, tuple[str, str]]] = {
    ("table 1, sizes of models", "表 1，模型大小"): ("`vitkit zoo`", ("the same sizes", "大小相同")),
    ("table 2, results on large sets", "表 2，大数据集上的结果"): ("", LARGE),
    ("tables 3 and 4, hyperparameters", "表 3、表 4，超参数"): ("[train.md](train.md)", ("", "")),
    ("table 5, fine-tuned on other sets", "表 5，在其他数据集上微调"): "transfer",
    ("table 6, compute", "表 6，计算量"): (
        "`vitkit plan vit-b/16`",
        ("time and cost on your machine", "本机的时间与费用"),
    ),
    ("table 7, SGD and Adam", "表 7，SGD 与 Adam"): ("", ("none: every study uses AdamW", "无：所有实验都用 AdamW")),
    ("table 8, position encodings", "表 8，位置编码"): "positions",
    ("table 9, ObjectNet", "表 9，ObjectNet"): ("", LARGE),
    ("figure 1, the model", "图 1，模型"): ("`vitkit.create`, [model.md](model.md)", ("the same model", "同一个模型")),
    ("figure 2, VTAB", "图 2，VTAB"): ("", LARGE),
    ("figures 3 and 4, data", "图 3、图 4，数据量"): "data-size",
    ("figure 5, accuracy and compute", "图 5，准确率与算力"): "scaling",
    ("figure 6, attention maps", "图 6，注意力图"): ("`vitkit explain --only attention`", DRAWN),
    ("figure 7 left, filters", "图 7 左，滤波器"): ("`vitkit explain --only filters`", DRAWN),
    ("figure 7 middle, positions", "图 7 中，位置编码"): ("`vitkit explain --only positions`", DRAWN),
    ("figures 7 right and 11, attention distance", "图 7 右、图 11，注意力距离"): "attention-distance",
    ("figure 8, depth, width and patch size", "图 8，深度、宽度与图块大小"): "depth-width",
    ("figure 9, class token and mean", "图 9，分类 token 与平均"): "head-type",
    ("figure 10, positions of several trainings", "图 10，多次训练的位置编码"): (
        "`vitkit explain --only positions` of each",
        DRAWN,
    ),
    ("figure 12, speed and memory", "图 12，速度与内存"): (
        "`python benchmarks/forward.py`",
        ("on your machine", "在本机测量"),
    ),
    ("figure 13, axial attention", "图 13，轴向注意力"): ("", ("none: no such model here", "无：本项目没有这种模型")),
    ("figure 14, many attention maps", "图 14，更多注意力图"): (
        "`vitkit explain --only attention --images 100`",
        DRAWN,
    ),
    ("section 3.2, higher resolution", "3.2 节，更高分辨率"): "resolution",
    ("section 4.5, heads of the lowest layers", "4.5 节，最低几层的头"): "heads",
    ("section 4.6 and B.1.2, self-supervision", "4.6 节与附录 B.1.2，自监督"): "self-supervision",
    ("table 5, patches of 16 and 32", "表 5，图块 16 与 32"): "patch-size",
}


CAUSES = {"head-type": "why-a-class-token", "pooling": "why-a-class-token"}  # of what contradicts: who looked for it


@cache
def result(name: str, folder: str = "studies") -> Result | None:
    path = DOCS / folder / f"{name}.json"
    return read(path) if path.exists() else None


def on_other_images(page: str, name: str, chinese: bool) -> str:
    """The page of a study, with what it showed when it was run again on another set."""
    if (found := result(name, AGAIN)) is None:
        return page
    data, context = found.context.data, found.context
    if chinese:
        about = f"{data['name']}，训练图片 {data['train']:,} 张，{context.steps:,} 步，{context.seeds} 个种子"
        told = f"**换一组图片**（{about}）：{answer_zh(found)}{also_zh(found)}"
    else:
        about = f"{data['name']}, {data['train']:,} training images, {context.steps:,} steps, {context.seeds} seeds"
        told = f"**On other images** ({about}). {answer(found)} {' '.join(found.finding.sentences)}"
    link = f"{'../../studies/' * chinese}again/{name}.json"
    by = f"（`{context.command}`，[JSON]({link})）" if chinese else f" `{context.command}` ([JSON]({link}))"
    return f"{page}\n{told}{by}\n"


def with_cause(page: str, name: str, chinese: bool) -> str:
    """The page of a study that contradicts its claim, with what another study found of the cause."""
    if name not in CAUSES or (found := result(CAUSES[name])) is None:
        return page
    link = f"[{CAUSES[name]}]({CAUSES[name]}.md)"
    if chinese:
        return f"{page}\n**原因**（见 {link}）：{also_zh(found)}\n"
    return f"{page}\n**The cause**, looked for in {link}. {found.finding.sentences[1]}\n"


def page(found: Result, chinese: bool) -> str:
    name = found.study.name
    return on_other_images(with_cause(study_zh(found) if chinese else as_markdown(found), name, chinese), name, chinese)


def command(name: str) -> str:
    return f"`vitkit study {name}`"


# --- in Chinese ---------------------------------------------------------------------------------


def answer_zh(found: Result) -> str:
    """What is looked for, how that stands to the claim, and why it is not to be trusted, if so."""
    words = WORDS[found.study.name]
    doubts = "".join(f"（**{DOUBTS[doubt.split(':')[0]]}**）" for doubt in found.doubts)
    gap = compare(*words.compared, found.gap, words.measure)
    return f"{words.when}{gap}。{VERDICT[found.agreement]}{doubts}"


def also_zh(found: Result) -> str:
    table = found.table
    pairs = [compare(first, second, table.gap(a, b)) for a, b, first, second in WORDS[found.study.name].also]
    best = max(table.rows, key=lambda row: row.mean.mean)
    return "；".join(pairs or [f"准确率最高的对照组是“{best.name}”（{best.mean.mean:.1%}）"]) + "。"


def sure_zh(found: Result) -> str:
    context = found.context
    lengths = {True: "训练加长一倍，提高不足一个百分点", None: "训练长度由人指定"}
    length = lengths.get(context.plateau, "训练长度受预算所限，尚未看到平台期")
    if context.power is None:
        seen = "只有一个种子，无从得知种子之间的差别"
    elif found.agreement == "does not show here":
        seen = f"{context.seeds} 个种子，95% 置信区间排除了要找的效应"
    elif found.gap.covers_zero:
        seen = f"{context.seeds} 个种子，看到要找的效应的功效为 {context.power:.0%}"
    else:
        seen = f"{context.seeds} 个种子，95% 置信区间不含零"
    return f"{seen}；{length}。"


def unlike_zh(found: Result) -> str:
    params, data = [row.params for row in found.table.rows], found.context.data
    seen = max(row.images for row in found.table.rows)
    often = seen / max(1, int(data["train"]))
    ours = f"这里的模型有 {min(params):,} 到 {max(params):,} 个参数，最多看 {seen:,} 张 {data['side']} 像素的图片"
    ours += f"（训练集共 {data['train']:,} 张，每张约 {often:.0f} 次）"
    theirs = "论文的模型有 8600 万到 6.32 亿个参数，最多用 3 亿张 224 像素的图片，每张 7 到 14 次"
    return f"{ours}；{theirs}。规模这么小，是为了让每个实验在两个核上几小时内跑完。"


def study_zh(found: Result) -> str:
    name, context, data = found.study.name, found.context, found.context.data
    words = WORDS[name]
    head, *rest = table_lines(found.table, found.study.reference)
    columns = {"arm": "对照组", "test accuracy": "测试准确率", "learning rate": "学习率", "parameters": "参数量"}
    columns |= {
        "M multiply-adds": "百万次乘加",
        f"difference minus {found.study.reference}": f"与 {found.study.reference} 之差",
    }
    cells = [columns[cell] for cell in head.strip("| ").split(" | ")]
    lines = [f"# {name}：{words.question}", "", f"**说法**：{words.claim}（{words.source}）。", ""]
    lines += [f"![{words.question}](../../studies/{name}.png)", "", f"**答案**：{answer_zh(found)}", ""]
    lines += [f"**其他比较**：{also_zh(found)}", "", f"**有多大把握**：{sure_zh(found)}", ""]
    lines += [f"**与论文有何不同，为什么**：{unlike_zh(found)}", "", f"| {' | '.join(cells)} |", *rest, ""]
    counts = f"训练 {data['train']:,} 张，验证 {data['val']:,} 张，测试 {data['test']:,} 张，边长 {data['side']} 像素"
    lines += [
        f"数据：{data['name']}，{counts}。"
        f"每次训练 {context.steps:,} 步，每步 {context.batch} 张，{context.seeds} 个种子。",
        "",
        f"**重新运行**：`{context.command}`",
        "",
        f"**开销**：处理器时间 {context.training_seconds / 60:.1f} 分钟（{context.machine}）。",
        "",
        f"逐条结论、公平性说明与原始数据（英文）：[页面](../../studies/{name}.md)、[CSV](../../studies/{name}.csv)、"
        f"[JSON](../../studies/{name}.json)。",
        "",
    ]
    return "\n".join(lines)


# --- pages in both languages --------------------------------------------------------------------


def question(name: str, chinese: bool) -> str:
    return WORDS[name].question if chinese else STUDIES[name].question


def headline(name: str, chinese: bool) -> str:
    found = result(name)
    if found is None:
        return "尚未运行" if chinese else "not run yet"
    words = WORDS[name]
    return f"{words.when}{compare(*words.compared, found.gap, words.measure)}" if chinese else found.finding.headline


def studies_table(chinese: bool) -> str:
    lines = [
        "| 名字 | 问题 | 改变什么 | 结果 |" if chinese else "| name | question | what it varies | result |",
        "|---|---|---|---|",
    ]
    for name, study in STUDIES.items():
        shown = f"[{headline(name, chinese)}](studies/{name}.md)" if result(name) else headline(name, chinese)
        varies = WORDS[name].varies if chinese else study.varies
        lines.append(f"| `{name}` | {question(name, chinese)} | {varies} | {shown} |")
    return "\n".join(lines) + "\n"


def paper(chinese: bool) -> str:
    head = (
        "| 论文 | 命令 | 这里的结果 | 一致吗 |" if chinese else "| of the paper | command | what ours shows | agrees |"
    )
    lines = [head, "|---|---|---|---|"]
    for what, by in FIGURES.items():
        if isinstance(by, str):
            found, made = result(by), command(by)
            shown = headline(by, chinese)
            agrees = "" if found is None else AGREES[found.agreement] if chinese else found.agreement
        else:
            made, shown, agrees = by[0].replace("](", "](../") if chinese else by[0], by[1][chinese], ""
        lines.append(f"| {what[chinese]} | {made} | {shown} | {agrees} |")
    return "\n".join(lines) + "\n"


def gallery(chinese: bool) -> str:
    title, intro = "The gallery of studies", "One picture for each study that was run; it leads to its page."
    if chinese:
        title, intro = "实验图集", "每个做过的实验一张图，点开看它的页面。图中文字为英文。"
    parts, up = (
        [f"# {title}\n", f"{intro} [{'怎样运行' if chinese else 'How they are run'}](studies.md)\n"],
        "../" * chinese,
    )
    for section, names in SECTIONS.items():
        parts.append(f"## {section[chinese]}\n")
        for name in names:
            if (found := result(name)) is None:
                continue
            told = answer_zh(found) if chinese else answer(found)
            picture = f"[![{name}]({up}studies/{name}.png)](studies/{name}.md)"
            parts.append(f"### {question(name, chinese)}\n\n{picture}\n\n{told}\n")
        if missing := [name for name in names if result(name) is None]:
            listed = ("、" if chinese else ", ").join(f"`{name}`" for name in missing)
            parts.append(f"尚未运行：{listed}。\n" if chinese else f"Not run yet: {listed}.\n")
    return "\n".join(parts)


def questions(chinese: bool) -> str:
    intro = (
        "# Questions that the articles ask, and what the studies answer\n\n"
        "In the order in which an image meets the model. Every answer is made from the table of the study; where none "
        "was run, none is given. "
        "The models are small, and so are the images: the page of each study says how that differs from the paper.\n"
    )
    if chinese:
        intro = (
            "# 文章提出的问题，实验给出的答案\n\n按图片经过模型的顺序排列。"
            "每个答案都由该实验的结果表生成；没有做过的实验，不给答案。"
            "模型和图片都很小，与论文有何不同，见各实验的页面。\n"
        )
    parts = [intro]
    for section, names in SECTIONS.items():
        parts.append(f"## {section[chinese]}\n")
        for name in names:
            found, words = result(name), WORDS[name]
            parts.append(f"### {question(name, chinese)}\n")
            claim = (
                f"说法：{words.claim}（{words.source}）。"
                if chinese
                else f"The claim: {STUDIES[name].claim} ({STUDIES[name].source})."
            )
            if found is None:
                run = (
                    f"尚未运行；{command(name)} 给出答案。" if chinese else f"Not run yet; {command(name)} answers it."
                )
                parts.append(f"{claim}\n\n{run}\n")
            else:
                told = (
                    f"{answer_zh(found)}{also_zh(found)}"
                    if chinese
                    else f"{answer(found)} {' '.join(found.finding.sentences)}"
                )
                more = f"[图与表](studies/{name}.md)" if chinese else f"[Picture and table](studies/{name}.md)"
                parts.append(f"{claim}\n\n{told}{more if chinese else f' {more}'}\n")
    return "\n".join(parts)


def _filled(name: str, chinese: bool) -> str:
    """A page that is written by hand, with its two tables."""
    text = (DOCS / name).read_text(encoding="utf-8")
    for what, shown in (("the studies", studies_table(chinese)), ("the paper", paper(chinese))):
        begin, end = (mark.format(what) for mark in MARKS)
        head, rest = text.split(begin)
        text = head + begin + "\n" + shown + "\n" + end + rest.split(end)[1]
    return text


def pages() -> dict[str, Callable[[], str]]:
    """All pages by their file, each with what makes it."""
    made: dict[str, Callable[[], str]] = {}
    for chinese, folder in ((False, ""), (True, "zh/")):
        made[f"{folder}studies.md"] = lambda c=chinese, f=folder: _filled(f"{f}studies.md", c)
        made[f"{folder}gallery.md"] = lambda c=chinese: gallery(c)
        made[f"{folder}questions.md"] = lambda c=chinese: questions(c)
    for name in STUDIES:
        if (found := result(name)) is not None:
            made[f"studies/{name}.md"] = lambda r=found: page(r, False)
            made[f"studies/{name}.csv"] = lambda r=found: as_csv(r)
            made[f"zh/studies/{name}.md"] = lambda r=found: page(r, True)
    return made


def take(folder: Path) -> None:
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name == path.stem and path.stem in STUDIES:
            own = read(path).context.data["name"] == STUDIES[path.stem].data
            shutil.copyfile(path, DOCS / ("studies" if own else AGAIN) / path.name)


if __name__ == "__main__":
    for folder in (AGAIN, "zh/studies"):
        (DOCS / folder).mkdir(parents=True, exist_ok=True)
    for given in sys.argv[1:]:
        take(Path(given))
    with tempfile.TemporaryDirectory() as drawn:
        for name, (folder, endings) in product(STUDIES, (("studies", ("json", "png")), (AGAIN, ("json",)))):
            if (found := result(name, folder)) is not None:
                write(found, Path(drawn))
                for ending in endings:
                    shutil.copyfile(Path(drawn) / f"{name}.{ending}", DOCS / folder / f"{name}.{ending}")
    for name, text in pages().items():
        (DOCS / name).write_text(text(), encoding="utf-8")
