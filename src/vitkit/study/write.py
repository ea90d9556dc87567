"""A study's result as files: NAME.json, NAME.csv, NAME.md, and the figure as NAME.png and NAME.svg.

`read` makes the result of NAME.json again: all other files follow from it without any training.
"""

from __future__ import annotations

import csv
import io
import math
from dataclasses import asdict, fields
from pathlib import Path

from vitkit.errors import DataError
from vitkit.figures.style import save, styled
from vitkit.io import adding_to_folder, dumps, read_json, write_text
from vitkit.study.compare import WANTED
from vitkit.study.numbers import Interval, sentence
from vitkit.study.studies import STUDIES
from vitkit.study.table import Context, Result, Row, Table

Record = dict[str, object]  # of an arm, flat
FIELDS = {"name": "arm", "tags": "about", "lr": "learning_rate", "at_edge": "rate_at_edge", "params": "parameters"}
FIELDS |= {"macs": "multiply_adds", "images": "images_seen", "seconds": "cpu_seconds"}  # of a row, in NAME.json
AGREES = {
    "agrees": "this agrees with the claim",
    "contradicts": "this contradicts the claim",
    "does not show here": "what the claim says does not show here: the difference that was looked for is excluded",
    "open": "whether the claim holds here stays open",
}


def write(result: Result, folder: Path) -> None:
    with adding_to_folder(folder) as new, styled():
        stem = new / result.study.name
        write_text(stem.with_suffix(".json"), dumps(as_json(result), indent=1) + "\n")
        write_text(stem.with_suffix(".csv"), as_csv(result))
        write_text(stem.with_suffix(".md"), as_markdown(result))
        doubts = "".join(f" ({doubt.split(':')[0]})" for doubt in result.doubts)
        save(result.study.draw(result.table), stem, result.finding.headline + doubts, alternative(result))


def read(path: Path) -> Result:
    """Of NAME.json; the finding is made again from the table."""
    found = read_json(path)
    try:
        study, rows = STUDIES[found["study"]], list[Row]()
        for arm in found["arms"]:
            accuracy, losses = tuple(arm["accuracy_by_seed"]), tuple(map(tuple, arm.get("loss_by_seed", ())))
            extra, steps = (tuple(arm.get(key, ())) for key in ("measured_by_seed", "loss_steps"))
            known = {field: arm[key] for field, key in FIELDS.items()}
            rows.append(Row(accuracy=accuracy, losses=losses, extra=extra, steps=steps, **known))
        table = Table(tuple(rows), found["data"])
        context = Context(**{f.name: found[f.name] for f in fields(Context)})
    except (KeyError, TypeError) as e:
        raise DataError(f"{path} is no result of a study ({e}); {WANTED}") from e
    return Result(study, table, study.find(table), context)


def alternative(result: Result) -> str:
    """The figure in words, for those who cannot see it."""
    means = ", ".join(f"{row.name} {row.mean.mean:.1%}" for row in result.table.rows)
    return f"{result.study.question} Test accuracy: {means}."


def records(result: Result) -> list[Record]:
    """One per arm; None where a number is not known."""
    rows, reference = [], result.study.reference
    for row in result.table.rows:
        mean, gap = row.mean, Interval(math.nan, math.nan, math.nan, 0)
        if reference and row.name != reference:
            gap = result.table.gap(row.name, reference)
        record: Record = {"arm": row.name, "accuracy": mean.mean, "low": mean.low, "high": mean.high}
        record |= {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
        record |= {"learning_rate": row.lr, "parameters": row.params, "multiply_adds": row.macs}
        record |= {"images_seen": row.images, "cpu_seconds": row.seconds}
        rows.append({key: None if value != value else value for key, value in record.items()})
    return rows


def as_json(result: Result) -> Record:
    study, table = result.study, result.table
    arms = []
    for record, row in zip(records(result), table.rows, strict=True):
        arm = {**record, "accuracy_by_seed": list(row.accuracy), "rate_at_edge": row.at_edge, "about": row.tags}
        if row.extra:
            arm["measured_by_seed"] = list(row.extra)
        if study.curves:
            arm |= {"loss_steps": list(row.steps), "loss_by_seed": [list(losses) for losses in row.losses]}
        arms.append(arm)
    words: Record = {"study": study.name, "question": study.question, "claim": study.claim, "source": study.source}
    words |= {"held_equal": study.fair, "compared_with": study.reference, "doubts": result.doubts}
    about = study.compared([row.name for row in table.rows])
    words |= {
        "headline": result.finding.headline,
        "agreement": result.agreement,
        "contrast": list(about),
        "effect_by_seed": study.effects(table),
    }
    return {**words, "finding": list(result.finding.sentences), **asdict(result.context), "arms": arms}


def as_csv(result: Result) -> str:
    text, rows = io.StringIO(), records(result)
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def answer(result: Result) -> str:
    """Two plain sentences, and why they are not to be trusted, if so."""
    doubts = "".join(f" **{sentence(doubt)}**" for doubt in result.doubts)
    return f"{sentence(result.finding.headline)} {sentence(AGREES[result.agreement])}{doubts}"


def as_markdown(result: Result) -> str:
    study, context = result.study, result.context
    data = context.data
    lines = [f"# {study.name}: {study.question}", "", f"**The claim**: {study.claim} ({study.source}).", ""]
    lines += [f"![{alternative(result)}]({study.name}.png)", "", f"**Answer.** {answer(result)}", ""]
    lines += [f"**In numbers.** {' '.join(result.finding.sentences)}", ""]
    lines += [f"**How sure.** {sentence(_sure(result))}", ""]
    lines += [f"**How it differs from the paper, and why.** {sentence(_unlike_the_paper(result))}", ""]
    lines += [*table_lines(result.table, study.reference), "", f"Held equal: {study.fair}."]
    if edge := ", ".join(row.name for row in result.table.rows if row.at_edge):
        lines += ["", f"The best learning rate was the smallest or the largest that is tried (*) for: {edge}."]
    counts = f"{data['train']:,} training, {data['val']:,} validation and {data['test']:,} test images"
    trained = f"{context.steps:,} steps of {context.batch} images, {_seeds(result)}; learning rates chosen on the "
    trained += "validation images in trainings of a sixth of the length (of half, where they follow another one; "
    trained += "pre-training by its own loss), until both neighbours of the best are worse."
    lines += ["", f"Data: {data['name']}, {counts} of {data['side']} pixels. Each training: {trained}"]
    lines += ["", f"**Run it again.** `{context.command}`", ""]
    lines += [f"**Cost.** {context.training_seconds / 60:.1f} minutes of processor time; {context.machine}.", ""]
    return "\n".join(lines)


def _unlike_the_paper(result: Result) -> str:
    """Sizes, which are the first suspects when a result is another one."""
    params = [row.params for row in result.table.rows]
    seen, data = max(row.images for row in result.table.rows), result.context.data
    ours = f"{min(params):,} to {max(params):,} parameters and up to {seen:,} images of {data['side']} pixels, each of "
    ours += f"{data['train']:,} about {seen / max(1, int(data['train'])):.0f} times"
    theirs = (
        "the paper's models have 86 to 632 million and see up to 300 million images of 224 pixels, each 7 to 14 times"
    )
    return f"{ours}; {theirs}. The studies are this small so that each of them runs on two cores within hours"


def _seeds(result: Result) -> str:
    seeds, others = result.context.seeds, result.study.others
    return f"{seeds} seeds" + (f" of what is compared and {others} of the other arms" if 0 < others < seeds else "")


def _sure(result: Result) -> str:
    context, sought = result.context, result.study.sought
    lengths = {True: "twice as long a training gains less than a point", None: "the length was set by hand"}
    length = lengths.get(context.plateau, "the length is what the budget bought, before a plateau was seen")
    if context.power is None:
        seen = "one seed has no spread"
    elif result.agreement == "does not show here":
        seen = f"the 95% interval excludes what is looked for, {sought} ({context.seeds} seeds)"
    elif result.gap.covers_zero:
        seen = f"{sought} is seen with {context.power:.0%} power ({context.seeds} seeds)"
    else:
        seen = f"the 95% interval of what is looked for, {sought}, excludes zero ({context.seeds} seeds)"
    return f"{seen}; {length}"


def table_lines(table: Table, reference: str) -> list[str]:
    head = ["arm", "test accuracy", *([f"difference minus {reference}"] if reference else [])]
    head += ["learning rate", "parameters", "M multiply-adds"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in table.rows:
        cells = [row.name, _with_interval(row.mean)]
        if reference:
            cells.append("" if row.name == reference else _with_interval(table.gap(row.name, reference), sign=True))
        rate = "" if row.lr is None else f"{row.lr:g}{'*' if row.at_edge else ''}"
        cells += [rate, f"{row.params:,}", f"{row.macs / 1e6:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _with_interval(value: Interval, sign: bool = False) -> str:
    mean = f"{100 * value.mean:+.2f}" if sign else f"{100 * value.mean:.2f}%"
    return f"{mean} ± {100 * value.half:.2f}" if value.known else mean
