"""A study's result as files: NAME.json, NAME.csv, NAME.md, and the figure as NAME.png and NAME.svg."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.checkpoints.write import replacing
from vitkit.study.numbers import Interval, percent
from vitkit.study.table import Row, Table

if TYPE_CHECKING:
    from vitkit.study.run import Result

CURVE = 100  # losses kept of each curve, at most
COLUMNS = (
    *("arm", "accuracy", "low", "high", "difference", "difference_low", "difference_high"),
    *("learning_rate", "parameters", "multiply_adds", "pictures_seen", "cpu_seconds"),
)


def write(result: Result, folder: Path) -> list[Path]:
    from vitkit.explain.figures.style import save, styled

    folder.mkdir(parents=True, exist_ok=True)
    name = result.study.name
    texts = {"json": json.dumps(as_json(result), indent=1, ensure_ascii=False) + "\n"}
    texts |= {"csv": as_csv(result), "md": as_markdown(result)}
    for ending, text in texts.items():
        with replacing(folder / f"{name}.{ending}") as file:
            file.write(text.encode())
    with styled():
        save(result.study.draw(result.table), folder / name, result.finding.headline, alternative(result))
    return [folder / f"{name}.{ending}" for ending in (*texts, "png", "svg")]


def alternative(result: Result) -> str:
    """The figure in words, for those who cannot see it."""
    means = ", ".join(f"{row.name} {percent(row.mean.mean)}" for row in result.table.rows)
    return f"{result.study.question} Test accuracy: {means}."


def _gap(result: Result, row: Row) -> Interval | None:
    reference = result.study.reference
    return result.table.gap(row.name, reference) if reference and row.name != reference else None


def records(result: Result) -> list[dict[str, Any]]:
    """One flat record per arm."""
    found = []
    for row in result.table.rows:
        gap = _gap(result, row)
        values = (
            *(row.name, row.mean.mean, row.mean.low, row.mean.high),
            *((gap.mean, gap.low, gap.high) if gap else (None, None, None)),
            *(row.lr, row.params, row.macs, row.pictures, round(row.seconds, 2)),
        )
        known = [None if isinstance(v, float) and v != v else v for v in values]
        found.append(dict(zip(COLUMNS, known, strict=True)))
    return found


def as_json(result: Result) -> dict[str, Any]:
    study, table = result.study, result.table
    arms = []
    for record, row in zip(records(result), table.rows, strict=True):
        arm = {**record, "accuracy_by_seed": list(row.accuracy), "rate_at_edge": row.at_edge, "about": row.about}
        if row.extra:
            arm["measured_by_seed"] = list(row.extra)
        if study.curves:
            arm["loss_by_seed"] = [_thinned(losses) for losses in row.losses]
        arms.append(arm)
    return {
        "study": study.name,
        "question": study.question,
        "claim": study.claim,
        "held_equal": study.fair,
        "compared_with": study.reference,
        "finding": list(result.finding.sentences),
        **result.about,
        "arms": arms,
    }


def _thinned(losses: tuple[float, ...]) -> list[float]:
    step = -(-len(losses) // CURVE)
    return [float(f"{x:.9g}") for x in losses[:: max(1, step)]]


def as_csv(result: Result) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(result))
    return text.getvalue()


def as_markdown(result: Result) -> str:
    study, about = result.study, result.about
    lines = [f"# {study.name}: {study.question}", "", *result.finding.sentences, ""]
    lines += [f"![{alternative(result)}]({study.name}.png)", ""]
    lines += table_lines(result.table, study.reference)
    edge = [row.name for row in result.table.rows if row.at_edge]
    lines += ["", f"The claim: {study.claim}. Held equal: {study.fair}."]
    if edge:
        lines += ["", f"The best learning rate was the smallest or the largest tried (*) for: {', '.join(edge)}."]
    data = about["data"]
    lines += [
        "",
        f"Data: {data['name']}, {data['train']:,} training, {data['val']:,} validation and {data['test']:,} test "
        f"pictures of {data['side']} pixels. Each training: {about['steps']} steps of {about['batch']} pictures, "
        f"{about['seeds']} seeds; learning rates chosen on the validation pictures in trainings of a third of the "
        "length.",
        "",
        f"Made with `{about['command']}` on {about['machine']}: {about['training_seconds'] / 60:.1f} minutes of "
        "processor time.",
        "",
    ]
    return "\n".join(lines)


def table_lines(table: Table, reference: str) -> list[str]:
    against = f" minus {reference}" if reference else ""
    head = ["arm", "test accuracy", *([f"difference{against}"] if reference else [])]
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


def _with_interval(found: Interval, sign: bool = False) -> str:
    mean = f"{100 * found.mean:+.2f}" if sign else f"{100 * found.mean:.2f}%"
    return f"{mean} ± {100 * found.half:.2f}" if found.known else mean
