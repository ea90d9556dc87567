"""Everything in one call: the model and the images that a user names, sections, figures and arrays, the page.

    build_report(make_subject("runs/photos", "cat.jpg", data="photos"), Path("out"))

What cannot be made is listed with its reason; the rest is made. The page is one file: findings, figures inside it,
light and dark, phone and print. No network is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from vitkit.checkpoints.load import load
from vitkit.checkpoints.options import ModelOptions
from vitkit.data.given import GivenImages
from vitkit.display import Part, Shown
from vitkit.errors import InputError, VitkitError, printable
from vitkit.explanation.inside import as_vit, check_patch
from vitkit.explanation.subject import LeftOut, Section, Subject, load_images, sample_data
from vitkit.explanation.table import Row, choose
from vitkit.figures.style import need_matplotlib, save, styled
from vitkit.io import adding_to_folder, write_text
from vitkit.model.base import VisionModel, find_class
from vitkit.model.config import Size, ViTConfig
from vitkit.model.stem import ResNet
from vitkit.progress import SILENT, Progress
from vitkit.world import resolve_device

WARNING = '<div class="warning" role="note">{}</div>'


def make_subject(
    model: str | Path | VisionModel,
    images: GivenImages = (),
    data: str | None = None,
    classes: Sequence[str] = (),
    query: str | None = None,
    run: str | Path | None = None,
    options: ModelOptions | None = None,
    most: int = 8,
    samples: int = 200,
    device: str | None = None,
    class_map: Mapping[str, str] | None = None,
) -> Subject:
    """Load the model and the images that a report is about; `vitkit.explain` says what the arguments are."""
    loaded = model if isinstance(model, VisionModel) else load(model, options=options)
    subject = loaded if isinstance(loaded, ResNet) else as_vit(loaded)
    subject.to(resolve_device(device))
    name = type(subject).__name__ if isinstance(model, VisionModel) else str(model)
    given = load_images(images, subject.config)
    sample = sample_data(data, subject, samples, class_map) if data else given
    names = subject.class_names or sample.class_names
    warnings = [f"{line[:1].upper()}{line[1:].rstrip('.')}" for line in subject.load_report]
    if not subject.pretrained and subject.load_report:
        fresh = "the weights are fresh and random, so the figures show what an untrained model does"
        warnings = [f"{name} is a name, not a checkpoint: {fresh}"]
    if sample.matched_by:
        warnings.append(f"{sample.matched_by[:1].upper()}{sample.matched_by[1:]}")
    if sample.no_labels:
        warnings.append(f"The labels of {data} are not used: {sample.no_labels}".rstrip("."))
    if len(given) > most:
        warnings.append(f"{len(given)} images were given: the first {most} are shown, all count in the statistics")
    shown = given if len(given) else replace(sample, skipped=[*given.skipped, *sample.skipped])
    wanted = [find_class(word, names, subject.config.classes) for word in classes] or None
    patch = None if query is None else _patch(query, as_vit(subject).config.grid)
    folder = Path(run) if run else _run_of(Path(name))
    return Subject(name, subject, shown.first(most), sample, names, wanted, patch, folder, warnings)


def _run_of(path: Path) -> Path | None:
    """The run that a checkpoint belongs to: its own directory, when that has a log."""
    directory = path if path.is_dir() else path.parent
    return directory if path.exists() and (directory / "log.jsonl").is_file() else None


def _patch(query: str, grid: Size) -> Size:
    parts = query.replace("x", ",").split(",")
    if len(parts) != 2 or not all(p.strip().isdigit() for p in parts):
        raise InputError(f"--query {query} is not a patch; write ROW,COLUMN counted from 0, such as 3,5")
    patch = int(parts[0]), int(parts[1])
    check_patch(patch, grid)
    return patch


@dataclass
class Report(Shown):
    out: Path
    sections: list[Section] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # name and reason
    warnings: list[str] = field(default_factory=list)

    @property
    def page(self) -> Path:
        return self.out / "report.html"

    def as_json(self) -> Mapping[str, object]:
        tables = [{"table": list(s.table)} if s.table else {} for s in self.sections]
        return {
            "report": str(self.page),
            "warnings": self.warnings,
            "figures": [{"name": s.name, "finding": s.finding} | t for s, t in zip(self.sections, tables, strict=True)],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
        }

    def reasons(self) -> dict[str, list[str]]:
        """Why figures were left out: reason -> their names."""
        found: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            found.setdefault(reason, []).append(name)
        return found

    def parts(self) -> Iterable[Part]:
        yield from (f"{section.heading}: {section.finding}" for section in self.sections)
        yield f"open {self.page}"

    def _repr_html_(self) -> str:
        """In a notebook: the page, in a frame, for its style is its own."""
        return f'<iframe srcdoc="{escape(self.page.read_text(encoding="utf-8"))}" width="100%" height="800"></iframe>'


def build_report(subject: Subject, out: Path, only: Sequence[str] | None = None, progress: Progress = SILENT) -> Report:
    """Make the sections (all, or `only` those named) and write figures/, arrays/ and report.html into `out`."""
    need_matplotlib()
    report = Report(out, warnings=[*subject.warnings, *(f"{name} was skipped: {why}" for name, why in subject.skipped)])
    rows = choose(only)
    was_training = subject.model.training
    subject.model.eval()
    try:
        with adding_to_folder(out) as new:
            drawn = _write_sections(subject, report, progress.track(rows, "figures"), new)
            write_text(new / report.page.name, printable(page(subject, report, drawn), keep="\n\t"))
    finally:
        subject.model.train(was_training)
    return report


def _write_sections(subject: Subject, report: Report, rows: Iterable[Row], new: Path) -> list[str]:
    """Write arrays and figures, and add to the report what was made and what was not; the drawings for the page."""
    drawn = []
    (new / "arrays").mkdir()
    for row in rows:
        try:
            section = make(row, subject)
        except (LeftOut, VitkitError) as e:
            report.left_out.append((row.name, str(e)))
            continue
        np.savez_compressed(new / "arrays" / f"{row.name}.npz", **section.arrays)  # type: ignore[arg-type]
        with styled():
            drawn.append(save(section.draw(), new / "figures" / row.name, section.finding, section.alt))
        report.sections.append(section)
    return drawn


def make(row: Row, subject: Subject) -> Section:
    """The figure of one row of the table."""
    function = f"{row.module}:make_{row.name}" if row.module else f"{row.name}:make"
    return replace(resolve_name(f"vitkit.explanation.{function}")(subject), name=row.name)


def page(subject: Subject, report: Report, drawn: Sequence[str]) -> str:
    """The whole report as one HTML document, with the drawing of each of its sections."""
    style = (files("vitkit.explanation") / "report.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{s.name}">{escape(s.heading)}</a>' for s in report.sections)
    missing = _items(f"{', '.join(names)}: {reason}" for reason, names in report.reasons().items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(subject.name)}, explained</title>",
        f"<style>\n{style}</style></head><body><main>",
        _header(subject),
        _warnings(subject),
        f'<nav aria-label="Figures">{links}</nav>' if links else "",
        *(
            f'<section id="{s.name}"><p class="kind">{escape(s.heading)}</p><h2>{escape(s.finding)}</h2>'
            f'<figure><div class="drawing" tabindex="0">{svg}</div>{_table(s)}'
            f"<figcaption>{escape(s.how)}</figcaption></figure></section>"
            for s, svg in zip(report.sections, drawn, strict=True)
        ),
        f'<section id="left-out"><p class="kind">Not made</p><ul class="note">{missing}</ul></section>' * bool(missing),
        '<p class="note">Every figure is also in figures/ as PNG and SVG, every array in arrays/ as .npz.</p>',
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _header(subject: Subject) -> str:
    config, count = subject.model.config, sum(p.numel() for p in subject.model.parameters())
    h, w = config.image_size
    facts = {"input": f"{h}x{w} pixels, {_plural(config.channels, 'channel')}"}
    if isinstance(config, ViTConfig):
        facts = _about_vit(config, count, facts["input"])
    else:
        stages = ", ".join(str(n) for n in config.stem.layers)
        facts = {"model": f"a ResNet with stages of {stages} blocks, {count:,} parameters", **facts}
    shown = f"{len(subject.images)} shown, {max(len(subject.sample), len(subject.images))} in statistics"
    facts["images"] = shown
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    title = f"<h1>{escape(subject.name)}</h1><p>What the model has learned, and where it looks.</p>"
    return f"<header>{title}<dl>{rows}</dl></header>"


def _about_vit(config: ViTConfig, parameters: int, pixels: str) -> dict[str, str]:
    patch, grid = (f"{h}x{w}" for h, w in (config.patch_size, config.grid))
    tokens = {
        "a class token": config.class_token,
        "a distillation token": config.distillation_token,
        _plural(config.registers, "register"): config.registers,
    }
    prefix = " and ".join(name for name, there in tokens.items() if there)
    return {
        "model": f"{config.depth} layers, {config.heads} heads, width {config.width}, {parameters:,} parameters",
        "input": f"{pixels}, patches of {patch}: a grid of {grid}",
        "tokens": f"{config.tokens}{prefix and f', of which {prefix}'}; pooling: {config.pooling}",
        "positions": config.positions,
    }


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _warnings(subject: Subject) -> str:
    boxes = [WARNING.format(f"<p>{escape(warning)}.</p>") for warning in subject.warnings]
    if subject.skipped:
        more = [f"and {len(subject.skipped) - 50} more"] if len(subject.skipped) > 50 else []
        items = _items([*(f"{name}: {reason}" for name, reason in subject.skipped[:50]), *more])
        boxes.append(WARNING.format(f"<p>Images that could not be read:</p><ul>{items}</ul>"))
    return "".join(boxes)


def _table(section: Section) -> str:
    """The section's table; the best of each column stands out."""
    if not section.table:
        return ""
    first, lines = next(iter(section.table[0])), []
    for row in section.table:
        cells = [f"<td>{escape(str(row[first]))}</td>"]
        for key, column in section.columns.items():
            best = (min if column.lower_is_better else max)(float(other[key]) for other in section.table)
            style = " class=best" if row[key] == best else ""
            cells.append(f"<td{style}>{float(row[key]):.{column.digits}f}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    headings = [first, *(column.heading for column in section.columns.values())]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in headings)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
