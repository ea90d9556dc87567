"""The look of all figures, and saving them: PNG and SVG files, and SVG inside the page in the page's own colours.

Figures are 5.6 inches wide with text of 9.5 points: readable when the whole figure is as wide as a phone,
and as large as the page's own text on a screen. Ink, grey and lines use three fixed colours, which the
page replaces with its own for light and dark.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import UNSAFE, MissingPackage, printable
from vitkit.io import write_bytes, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
else:  # names for the annotations of every file that draws: matplotlib is imported when something is drawn
    Axes = AxesImage = Figure = object

WIDTH = 5.6  # inches, like the next two
MARGIN = 0.12
LINE_HEIGHT = 0.19  # of the title
DPI = 200
INK, GREY, LINE = "#1b1f27", "#667080", "#d3d8e0"
PAGE_COLOURS = {INK: "var(--ink)", GREY: "var(--grey)", LINE: "var(--line)"}
COLOURS = ("#2f7fc1", "#d9622b", "#1f9d78", "#b065b8", "#c99700")  # told apart by the colour-blind, on light and dark
MARK = "#ff3355"
RC: dict[str, object] = {
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 9.5),
    **dict.fromkeys(("legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("axes.facecolor", "image.interpolation", "svg.fonttype"), "none"),
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.7,
    "grid.color": LINE,
    "svg.hashsalt": "vitkit",
}


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackage("matplotlib", "drawing figures", "explain") from None


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """A figure that arranges its own panels."""
    need_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.04, wspace=0.02, hspace=0.02)
    return Figure(figsize=(width, height), layout=layout)


def styled() -> AbstractContextManager[None]:
    """A context in which matplotlib draws and saves in our style."""
    need_matplotlib()
    import matplotlib as mpl

    return mpl.rc_context(RC)


def save(figure: Figure, stem: Path, title: str, alt: str) -> str:
    """stem.png and stem.svg with the finding as their title, on white; returns the <svg> element for the page."""
    title, alt = printable(title), printable(alt)
    save_png(figure, stem.with_suffix(".png"), title, alt)
    svg = _rendered(figure, "svg", {"Title": title, "Date": None, "Creator": None}).decode()
    svg = UNSAFE.sub(lambda c: c[0] if c[0] in "\n\t" else "\ufffd", svg)  # XML cannot hold them
    write_text(stem.with_suffix(".svg"), svg.replace("</title>", f"</title><desc>{escape(alt)}</desc>", 1))
    return _inline(svg, figure, alt, stem.name)


def save_png(figure: Figure, path: Path, title: str, alt: str) -> None:
    """The figure with its finding above it, as PNG or, where the name of the file says so, as SVG."""
    title, alt = printable(title), printable(alt)
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(title, round(10.4 * width))
    top = 1 + (LINE_HEIGHT * len(lines) + 0.1) / height
    figure.text(0, top, "\n".join(lines), va="top", fontsize=11, fontweight="bold", gid="finding")
    about: dict[str, str | None] = {"Title": title, "Description": alt, "Software": None}
    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    write_bytes(path, _rendered(figure, kind, {"Title": title, "Date": None} if kind == "svg" else about))


def _rendered(figure: Figure, kind: str, about: dict[str, str | None]) -> bytes:
    """A file of that kind: the figure and the title above it, with a margin, on white."""
    from matplotlib.transforms import Bbox

    width, height = figure.get_size_inches()
    top = max(text.get_position()[1] for text in figure.texts) * height
    area = Bbox([[-MARGIN, -MARGIN], [width + MARGIN, top + MARGIN]])
    figure.patch.set_gid("ground")
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # names of classes may be in letters that the font lacks
        warnings.filterwarnings("ignore", message="Glyph")
        if figure.get_layout_engine() is not None:  # arrange the panels once and keep them there
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        for legend in figure.legends:  # beside the panels, not beside what is saved
            legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
        figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches=area, metadata=about)
    return buffer.getvalue()


def _inline(svg: str, figure: Figure, alt: str, key: str) -> str:
    """The <svg> element cut to the figure itself, without title, ground, size and metadata; 72 units are an inch.

    It has the page's colours instead of ours, ids of its own, and the description as its label.
    """
    width, height = (72 * float(n) for n in figure.get_size_inches())
    bottom = float(svg.split('viewBox="0 0 ')[1].split('"')[0].split()[1]) - 72 * MARGIN
    cut = f'viewBox="{72 * MARGIN:g} {bottom - height:g} {width:g} {height:g}"'
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' (width|height)="[^"]*"|viewBox="[^"]*"', lambda m: "" if m[1] else cut, svg, count=3)
    gone = r'<metadata>.*?</metadata>|<title>.*?</title>|<g id="(finding|ground)">.*?</g>'
    svg = re.sub(gone, "", svg, flags=re.DOTALL)
    for name, variable in PAGE_COLOURS.items():
        svg = svg.replace(name, variable)
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)  # it would hold for the whole page
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    # ids must differ between the figures of one page; those that nothing refers to only repeat themselves
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{key}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)


def short(text: str, limit: int = 18, middle: bool = False) -> str:
    """One line of at most `limit` characters, cut at its end or its middle; bytes that are no text get backslashes."""
    text = printable(" ".join(text.split()))
    end = (limit - 1) // 2 if middle else 0
    return text if len(text) <= limit else text[: limit - 1 - end] + "…" + text[len(text) - end :]


def wrapped(text: str, width: int) -> str:
    """All of a name, in lines of at most `width` characters, broken at spaces, dashes and underscores where it can."""
    lines, rest = [], printable(" ".join(text.split()))
    while len(rest) > width:
        cut = max(rest.rfind(mark, width // 3, width) for mark in " -_.") + 1 or width
        lines.append(rest[:cut])
        rest = rest[cut:]
    return "\n".join([*lines, rest])


def percent(share: float) -> str:
    """Two digits that count: 12%, 1.2%, 0.12%."""
    return f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f}%"
