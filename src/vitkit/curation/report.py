"""What `clean` found as one page: groups and rows with thumbnails, no script, nothing from elsewhere."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.curation.clean import ISSUES, Cleaning, Issue
from vitkit.curation.index import Index
from vitkit.curation.looks import Looks
from vitkit.errors import printable
from vitkit.io import write_text

_SHOWN = 200  # rows of each kind; issues.csv has all
_STYLE = """:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #8884;
overflow-wrap:anywhere}img{width:64px;height:64px;display:block}"""
_TITLES = {
    "leak": "The same photograph in several splits",
    "exact-duplicate": "Exact duplicates",
    "near-duplicate": "Near duplicates",
    "label": "Labels that seem wrong",
    "junk": "Junk",
    "outlier": "Outliers",
    "small-class": "Classes with too few images",
    "drift": "Splits that differ from train",
}


def write_report(path: Path, found: Cleaning, index: Index, looks: Looks) -> None:
    rows = {name: row for row, name in enumerate(index.paths)}
    counts = ", ".join(f"{n:,} {kind}" for kind, n in found.counts().items()) or "nothing"
    parts = [f"<p>{found.images:,} images; found: {escape(counts)}. Features: {escape(str(index.about['model']))}.</p>"]
    parts += [f"<p>{_safe(note)}</p>" for note in found.notes]
    for kind in ISSUES:
        mine = [issue for issue in found.issues if issue.issue == kind]
        if mine:
            parts.append(f"<h2>{_TITLES[kind]} ({len(mine):,})</h2>")
            parts.append(_table(mine[:_SHOWN], rows, looks))
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    title = f"Cleaning {_safe(found.data)}"
    write_text(path, f"{head}<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>")


def _table(issues: list[Issue], rows: dict[str, int], looks: Looks) -> str:
    names = ("image", "path", "split", "label", "suggestion", "score", "group")
    lines = ["".join(f"<th scope=col>{name}</th>" for name in names)]
    for issue in issues:
        cells = (issue.path, issue.split, issue.label, issue.suggestion, f"{issue.score:.3f}", issue.group)
        shown = _image(rows[issue.path], looks) if issue.path in rows else ""
        lines.append(f"<td>{shown}</td>" + "".join(f"<td>{_safe(cell)}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _image(row: int, looks: Looks) -> str:
    file = io.BytesIO()
    Image.fromarray(looks.thumbnails(np.array([row]))[0]).save(file, "JPEG", quality=80)
    return f"<img alt='' src='data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'>"


def _safe(text: str) -> str:
    return escape(printable(text))
