"""What results look like: one list of parts, drawn as HTML in a notebook and as text by rich.

A result derives from `Shown` and says its `parts`: sentences, tables (the heads first), images. Jupyter asks for
`_repr_html_`, `rich.print` for `__rich_console__`; neither package is imported before it asks.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from vitkit.errors import printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console, ConsoleOptions, RenderableType

_SIDE = 256  # pixels of an image in a notebook, at most
_CELL = 'style="text-align:{};padding:.1em .8em"'


class Grid(NamedTuple):
    rows: Sequence[Sequence[str]]  # the heads first; the first column holds words, the others numbers


class Drawing(NamedTuple):
    png: bytes
    alt: str


Part = str | Grid | Drawing


class Shown:
    """A result that shows itself."""

    def parts(self) -> Iterable[Part]:
        return ()

    def _repr_html_(self) -> str:
        return "".join(map(_html, self.parts()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        for part in self.parts():
            if isinstance(part, str):
                yield Text(printable(part, keep="\n"))
            elif isinstance(part, Grid):
                table = Table(box=None, pad_edge=False)
                for i, head in enumerate(part.rows[0]):
                    table.add_column(Text(printable(head)), justify="right" if i else "left")
                for row in part.rows[1:]:
                    table.add_row(*(Text(printable(cell)) for cell in row))
                yield table


def _html(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{escape(printable(part, keep=chr(10)))}</p>"
    if isinstance(part, Drawing):
        data = base64.b64encode(part.png).decode()
        return f'<img src="data:image/png;base64,{data}" alt="{escape(printable(part.alt))}" style="max-width:100%">'
    sides = ["left", *["right"] * (len(part.rows[0]) - 1)]
    lines = []
    for kind, row in zip(["th", *["td"] * len(part.rows)], part.rows, strict=False):
        pairs = zip(sides, row, strict=True)
        cells = "".join(f"<{kind} {_CELL.format(side)}>{escape(printable(cell))}</{kind}>" for side, cell in pairs)
        lines.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def drawing(image: Image, alt: str) -> Drawing:
    """An image small enough to be kept inside a notebook."""
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(file, "PNG")
    return Drawing(file.getvalue(), alt)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML; a terminal with IPython is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
