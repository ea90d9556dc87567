"""One page, one file: findings, figures inside it, light and dark, phone and print. No network is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from vitkit.explain.section import Section, Subject
from vitkit.model.config import Size

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f27; --grey: #5f6877; --line: #dde1e8; --paper: #ffffff;
  --card: #f6f7f9; --accent: #1f6fb2; --warn: #8a5a00; --warn-paper: #fff6e0; --mat: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --grey: #9aa4b4; --line: #333a45; --paper: #14171c;
  --card: #1c2027; --accent: #7db8ec; --warn: #f0c674; --warn-paper: #2c2618; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; -webkit-text-size-adjust: 100%;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 44rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
header h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .35rem; overflow-wrap: anywhere; }
header p { margin: .2rem 0; color: var(--grey); }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1.1rem 0 0; padding: 0; }
nav a { padding: .35rem .7rem; border: 1px solid var(--line); border-radius: 99px; font-size: .875rem;
  color: var(--ink); text-decoration: none; }
nav a:hover, nav a:focus-visible { border-color: var(--accent); color: var(--accent); }
section { margin-top: 3rem; scroll-margin-top: 1rem; }
.kind { margin: 0; color: var(--grey); font-size: .875rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: .1rem 0 .9rem; text-wrap: balance; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; max-height: none; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit !important; }
figcaption, .note { color: var(--grey); font-size: .875rem; margin-top: .7rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums;
  margin-top: 1rem; }
th, td { padding: .4rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { color: var(--grey); font-weight: 500; }
td.best { font-weight: 700; color: var(--accent); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0 0; font-size: .9rem; }
dt { color: var(--grey); }
dd { margin: 0; overflow-wrap: anywhere; }
.warning { background: var(--warn-paper); color: var(--warn); border-radius: .5rem; padding: .7rem .9rem;
  margin-top: 1rem; font-size: .9rem; overflow-wrap: anywhere; }
.warning p, .warning ul { margin: 0; }
.warning ul { padding-left: 1.1rem; }
@media (max-width: 30rem) { table { font-size: .8rem; } th, td { padding: .35rem .25rem; }
  nav { flex-wrap: nowrap; overflow-x: auto; margin-right: -1rem; padding: 0 1rem .4rem 0; }
  nav a { white-space: nowrap; } }
@media print { nav { display: none; } section, figure, table { break-inside: avoid; } main { max-width: none; } }
"""


def page(
    subject: Subject, sections: Sequence[Section], drawn: Sequence[str], left_out: Sequence[tuple[str, str]]
) -> str:
    """The whole report as one HTML document."""
    links = "".join(f'<a href="#{s.name}">{escape(s.heading)}</a>' for s in sections)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(subject.name)}, explained</title>",
        f"<style>{STYLE}</style></head><body><main>",
        _header(subject),
        _warnings(subject),
        f'<nav aria-label="Figures">{links}</nav>' if sections else "",
        *(_section(section, svg) for section, svg in zip(sections, drawn, strict=True)),
        _left_out(left_out),
        '<p class="note">Every figure is also in figures/ as PNG and SVG, every array in arrays/ as .npz.</p>',
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _header(subject: Subject) -> str:
    config = subject.model.config
    parameters = sum(p.numel() for p in subject.model.parameters())
    facts = {
        "model": f"{config.depth} layers, {config.heads} heads, width {config.width}, {parameters:,} parameters",
        "input": f"{_times(config.image_size)} pixels, {config.channels} "
        f"channel{'s' if config.channels > 1 else ''}, patches of {_times(config.patch_size)}: "
        f"a grid of {_times(config.grid)}",
        "tokens": _tokens(subject),
        "positions": config.positions,
        "pictures": f"{len(subject.pictures)} shown, {max(len(subject.sample), len(subject.pictures))} in statistics",
    }
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    title = f"<h1>{escape(subject.name)}</h1><p>What the model has learned, and where it looks.</p>"
    return f"<header>{title}<dl>{rows}</dl></header>"


def _tokens(subject: Subject) -> str:
    config = subject.model.config
    names = []
    if config.class_token:
        names.append("a class token")
    if config.distillation_token:
        names.append("a distillation token")
    if config.registers:
        names.append(f"{config.registers} register{'s' if config.registers > 1 else ''}")
    before = f", of which {' and '.join(names)}" if names else ""
    return f"{config.tokens}{before}; pooling: {config.pooling}"


def _times(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _warnings(subject: Subject) -> str:
    boxes = [f'<div class="warning" role="note"><p>{escape(w)}.</p></div>' for w in subject.warnings]
    skipped = list(dict.fromkeys([*subject.pictures.skipped, *subject.sample.skipped]))
    if skipped:
        items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in skipped[:50])
        more = f"<li>and {len(skipped) - 50} more</li>" if len(skipped) > 50 else ""
        boxes.append(
            f'<div class="warning" role="note"><p>Pictures that could not be read:</p><ul>{items}{more}</ul></div>'
        )
    return "".join(boxes)


def _section(section: Section, svg: str) -> str:
    table = _table(section.table) if section.table else ""
    return (
        f'<section id="{section.name}"><p class="kind">{escape(section.heading)}</p><h2>{escape(section.finding)}</h2>'
        f"<figure>{svg}{table}<figcaption>{escape(section.how)}</figcaption></figure></section>"
    )


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Deletion and insertion areas of each method; the best of each column stands out."""
    rows = list(rows)
    names = {
        "deletion": "deletion",
        "deletion_ratio": "/ random",
        "insertion": "insertion",
        "insertion_ratio": "/ random",
    }
    best = {k: (min if k.startswith("deletion") else max)(row[k] for row in rows) for k in names}
    lines = []
    for row in rows:
        cells = "".join(
            f"<td{' class=best' if row[k] == best[k] else ''}>{row[k]:.{2 if k.endswith('ratio') else 3}f}</td>"
            for k in names
        )
        lines.append(f"<tr><td>{escape(str(row['method']))}</td>{cells}</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in names.values())
    head = f'<thead><tr><th scope="col">map</th>{head}</tr></thead>'
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _left_out(left_out: Sequence[tuple[str, str]]) -> str:
    if not left_out:
        return ""
    items = "".join(f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in left_out)
    return f'<section id="left-out"><p class="kind">Not made</p><ul class="note">{items}</ul></section>'
