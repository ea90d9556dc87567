"""What `clean` found as one page: groups side by side, suggestions with what speaks for them; no script, one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.curation.clean import ISSUES, Cleaning, Issue
from vitkit.curation.index import Index
from vitkit.curation.looks import Looks
from vitkit.errors import printable
from vitkit.io import write_text

_SHOWN = 100  # groups and rows of each kind; issues.csv has all
_IN_GROUP = 12
_STYLE = """:root{color-scheme:light dark;--line:#8883}
:root{--quiet:light-dark(#5b6270,#a4abb8);--drop:light-dark(#a3261b,#ff9b91)}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 .25rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
p,.quiet{color:var(--quiet)}a{color:inherit}nav{display:flex;flex-wrap:wrap;gap:.4rem;margin:1rem 0}
nav a{border:1px solid var(--line);border-radius:99px;padding:.1rem .7rem;text-decoration:none}
ul.cards{list-style:none;margin:0;padding:0;display:grid;gap:.8rem;
grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr))}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.7rem}.tiles{display:flex;flex-wrap:wrap;gap:.7rem}
figure{margin:0;width:7.2rem;font-size:.8rem;line-height:1.35}figcaption{overflow-wrap:anywhere}
img{width:7.2rem;height:7.2rem;display:block;object-fit:contain;background:#8882;border-radius:.25rem}
.drop{color:var(--drop);font-weight:600}.head{display:flex;justify-content:space-between;gap:1rem;margin-bottom:.5rem}
.small img,.small figure{width:3.2rem}.small img{height:3.2rem}.scroll{overflow-x:auto}
table{border-collapse:collapse}
td,th{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line)}"""
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
_GROUPED = ("leak", "exact-duplicate", "near-duplicate")


def write_report(path: Path, found: Cleaning, index: Index, looks: Looks) -> None:
    shown = _Shown(found, {name: row for row, name in enumerate(index.paths)}, looks)
    title = f"Cleaning {_safe(found.data)}"
    model = _safe(str(index.about["model"]))
    parts = [f"<h1>{title}</h1><p>{found.images:,} images; features: {model}. Nothing was changed.</p>", _nav(found)]
    parts += [f"<p>{_safe(note)}</p>" for note in found.notes]
    parts += [shown.section(kind) for kind in ISSUES]
    overlaps = [(o.first, o.second, f"{o.share:.0%}") for o in found.overlaps]
    heads = ("class", "and", "nearest images in the other")
    parts.append(_table("overlap", "Classes that overlap", heads, overlaps))
    shares = [(u.split, u.label, f"{u.share:.1%}", f"{u.share_of_train:.1%}") for u in found.unbalanced]
    parts.append(_table("balance", "Unbalanced splits", ("split", "class", "share of it", "share of train"), shares))
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    write_text(path, f"{head}<title>{title}</title><style>{_STYLE}</style><main>{''.join(parts)}</main></html>")


def _nav(found: Cleaning) -> str:
    counts = [(kind, _TITLES[kind], n) for kind, n in found.counts().items()]
    counts += [("overlap", "Classes that overlap", len(found.overlaps))] * bool(found.overlaps)
    counts += [("balance", "Unbalanced splits", len(found.unbalanced))] * bool(found.unbalanced)
    links = "".join(f"<a href='#{kind}'>{title} <b>{n:,}</b></a>" for kind, title, n in counts)
    return f"<nav aria-label=Issues>{links}</nav>" if links else "<p>Nothing was found.</p>"


def _table(name: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["".join(f"<th scope=col>{head}</th>" for head in heads)]
    lines += ["".join(f"<td>{_safe(cell)}</td>" for cell in row) for row in rows]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2 id={name}>{title}</h2><div class=scroll><table>{table}</table></div>"


class _Shown:
    def __init__(self, found: Cleaning, rows: dict[str, int], looks: Looks) -> None:
        self.found, self.rows, self.looks = found, rows, looks

    def section(self, kind: str) -> str:
        mine = [issue for issue in self.found.issues if issue.issue == kind]
        if not mine:
            return ""
        groups: dict[str, list[Issue]] = {}
        for number, issue in enumerate(mine):
            groups.setdefault(issue.group if kind in _GROUPED else str(number), []).append(issue)
        cards = "".join(self._card(kind, group) for group in list(groups.values())[:_SHOWN])
        more = len(groups) - _SHOWN
        rest = f"<p>and {more:,} more, all of them in issues.csv</p>" if more > 0 else ""
        return f"<h2 id={kind}>{_TITLES[kind]} ({len(mine):,})</h2><ul class=cards>{cards}</ul>{rest}"

    def _card(self, kind: str, group: list[Issue]) -> str:
        first = group[0]
        about = f"group {first.group}" if kind in _GROUPED else first.group or "an image"
        if kind == "label":
            about = f"{first.label} \u2192 {first.suggestion}"
        elif not first.path:
            about = f"{first.label or first.split}: {first.group}"
        head = f"<div class=head><b>{_safe(about)}</b><span class=quiet>{first.score:.3f}</span></div>"
        tiles = "".join(self._tile(issue) for issue in group[:_IN_GROUP] if issue.path)
        more = f"<p>and {len(group) - _IN_GROUP:,} more</p>" if len(group) > _IN_GROUP else ""
        return f"<li class=card>{head}<div class=tiles>{tiles}</div>{more}{self._speaking(first)}</li>"

    def _tile(self, issue: Issue) -> str:
        drop = " <span class=drop>drop</span>" if issue.suggestion == "drop" else ""
        where = " \u00b7 ".join(_safe(word) for word in (issue.split, issue.label) if word)
        caption = f"{where}{drop}<br><span class=quiet>{_safe(issue.path)}</span>"
        return f"<figure>{self._image(issue.path)}<figcaption>{caption}</figcaption></figure>"

    def _speaking(self, issue: Issue) -> str:
        """The nearest images of the class that is suggested."""
        near = self.found.neighbours.get(issue.path, []) if issue.issue == "label" else []
        images = "".join(f"<figure>{self._image(path)}</figure>" for path in near)
        words = f"nearest of {_safe(issue.suggestion)}"
        return f"<div class=quiet>{words}</div><div class='tiles small'>{images}</div>" if images else ""

    def _image(self, path: str) -> str:
        if path not in self.rows:
            return ""
        file = io.BytesIO()
        Image.fromarray(self.looks.thumbnails(np.array([self.rows[path]]))[0]).save(file, "JPEG", quality=80)
        return f"<img alt='' src='data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}'>"


def _safe(text: str) -> str:
    return escape(printable(text))
