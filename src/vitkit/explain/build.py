"""Everything in one call: sections made, figures and arrays written, the page put together.

    build_report(subject, Path("out"))

What cannot be made is listed with its reason; the rest is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.errors import InputError, VitkitError, did_you_mean
from vitkit.explain import about_model, about_pictures
from vitkit.explain.figures.style import inline_svg, need_matplotlib, save, styled
from vitkit.explain.report import page
from vitkit.explain.section import LeftOut, Section, Subject

Say = Callable[[str], None]

# In the order of the page. Each gives one or more sections.
MAKERS: dict[str, Callable[[Subject], list[Section]]] = {
    "attention": about_pictures.attention,
    "relevance": about_pictures.relevance,
    "occlusion": about_pictures.occlusion,
    "faithfulness": about_pictures.faithfulness,
    "query": about_pictures.query,
    "tokens": about_pictures.tokens,
    "distance": about_model.distance,
    "positions": about_model.positions,
    "filters": about_model.filters,
    "training": about_model.training,
}


@dataclass
class Report:
    out: Path
    sections: list[Section] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # name and reason
    warnings: list[str] = field(default_factory=list)
    page: Path | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "report": str(self.page),
            "warnings": self.warnings,
            "figures": [
                {"name": s.name, "finding": s.finding, **({"table": list(s.table)} if s.table else {})}
                for s in self.sections
            ],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
        }


def quiet(line: str) -> None:
    """Say nothing."""


def build_report(subject: Subject, out: Path, only: Sequence[str] | None = None, say: Say = quiet) -> Report:
    """Make the sections (all, or `only` those named) and write figures/, arrays/ and report.html into `out`."""
    need_matplotlib()
    names = choose(only)
    skipped = dict([*subject.pictures.skipped, *subject.sample.skipped])
    report = Report(out, warnings=[*subject.warnings, *(f"{name} was skipped: {why}" for name, why in skipped.items())])
    drawn: list[str] = []
    for folder in ("figures", "arrays"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    was_training = subject.model.training
    subject.model.eval()
    try:
        for name in names:
            say(name)
            try:
                made = MAKERS[name](subject)
            except (LeftOut, VitkitError) as e:
                report.left_out.append((name, str(e)))
                continue
            for section in made:
                drawn.append(write(section, out))
                report.sections.append(section)
    finally:
        subject.model.train(was_training)
    report.page = out / "report.html"
    report.page.write_text(page(subject, report.sections, drawn, report.left_out), encoding="utf-8")
    return report


def choose(only: Sequence[str] | None) -> list[str]:
    for name in only or ():
        if name not in MAKERS:
            known = ", ".join(MAKERS)
            raise InputError(f"there is no figure {name!r}.{did_you_mean(name, MAKERS)} Choose from: {known}")
    return [name for name in MAKERS if not only or name in only]


def write(section: Section, out: Path) -> str:
    """The section's files; returns its drawing for the page."""
    np.savez_compressed(out / "arrays" / f"{section.name}.npz", **section.arrays)  # type: ignore[arg-type]
    with styled():
        svg = save(section.draw(), out / "figures" / section.name, section.finding, section.alt)
    return inline_svg(svg, section.alt, section.name)
