"""The look of all figures, and saving them: PNG and SVG files, and SVG inside the page in the page's own colours.

Figures are 5.6 inches wide with text of 9.5 points: readable when the whole figure is as wide as a phone,
and as large as the page's own text on a screen. Ink, grey and lines use three fixed colours, which the
page replaces with its own for light and dark.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitkit.errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.6  # inches, like the next two
MARGIN = 0.12
LINE_HEIGHT = 0.19  # of the title
DPI = 200
INK, GREY, LINE = "#1b1f27", "#667080", "#d3d8e0"
PAGE_COLOURS = {INK: "var(--ink)", GREY: "var(--grey)", LINE: "var(--line)"}
COLOURS = ("#2f7fc1", "#d9622b", "#1f9d78", "#b065b8", "#c99700")  # told apart by the colour-blind, on light and dark
MARK = "#ff3355"
RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "vitkit",
    "image.interpolation": "none",
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

    figure = Figure(figsize=(width, height), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.03, h_pad=0.04, wspace=0.02, hspace=0.02)
    return figure


def new_tiles(
    down: int, across: int, ratio: float, top: float = 0.24, below: float = 0.2, foot: float = 0.0
) -> tuple[Figure, np.ndarray]:
    """A figure of equal tiles (height / width = ratio) with room for names on top and a line below each; inches."""
    need_matplotlib()
    from matplotlib.figure import Figure

    gap = 0.07
    wide = (WIDTH - gap * (across - 1)) / across
    tall = wide * ratio
    height = top + down * (tall + below) + (down - 1) * gap + foot
    figure = Figure(figsize=(WIDTH, height))
    axes = np.empty((down, across), dtype=object)
    for r in range(down):
        for c in range(across):
            bottom = height - top - (r + 1) * tall - r * (below + gap)
            place = (c * (wide + gap) / WIDTH, bottom / height, wide / WIDTH, tall / height)
            axes[r, c] = figure.add_axes(place)
            bare(axes[r, c])
    return figure, axes


def styled() -> Any:
    """A context in which matplotlib draws and saves in our style."""
    need_matplotlib()
    import matplotlib as mpl

    return mpl.rc_context(RC)


def save(figure: Figure, stem: Path, title: str, alt: str) -> str:
    """stem.png and stem.svg with the finding as their title, on white; returns the bare <svg> element.

    The figure is drawn once for each format: drawing takes far longer than everything else.
    """
    lines = save_png(figure, stem.with_suffix(".png"), title, alt)
    svg = _bare_svg(figure)
    stem.with_suffix(".svg").write_text(_titled_svg(svg, lines, title, alt), encoding="utf-8")
    return svg


def freeze(figure: Figure) -> None:
    """Arrange the panels now and keep them there."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def _pixels(figure: Figure) -> np.ndarray:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DPI)
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def save_png(figure: Figure, path: Path, title: str, alt: str) -> list[str]:
    """The figure with its finding above it; returns the lines of the title."""
    from matplotlib.figure import Figure
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    freeze(figure)
    lines = textwrap.wrap(title, 58)
    heading = Figure(figsize=(WIDTH, LINE_HEIGHT * len(lines) + 0.1))
    heading.text(0, 0.99, "\n".join(lines), va="top", fontsize=11, fontweight="bold", color=INK)
    whole = np.concatenate([_pixels(heading), _pixels(figure)])
    margin = round(MARGIN * DPI)
    whole = np.pad(whole, ((margin, margin), (margin, margin), (0, 0)), constant_values=255)
    info = PngInfo()
    info.add_itxt("Title", title)
    info.add_itxt("Description", alt)
    Image.fromarray(whole).save(path, pnginfo=info, dpi=(DPI, DPI))
    return lines


def _bare_svg(figure: Figure) -> str:
    """The <svg> element of a figure, without background, size and metadata; 72 units are an inch."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def _titled_svg(svg: str, lines: list[str], title: str, alt: str) -> str:
    """The same with a white ground, and the finding above it."""
    width, height = (float(n) for n in svg.split('viewBox="0 0 ')[1].split('"')[0].split())
    margin, line = 72 * MARGIN, 72 * LINE_HEIGHT
    top = margin + line * len(lines) + 7
    size = (width + 2 * margin, height + top + margin)
    box = f'x="{-margin:g}" y="{-top:g}" width="{size[0]:g}" height="{size[1]:g}"'
    words = "".join(
        f'<text x="0" y="{margin + 11 - top + i * line:g}" font-family="DejaVu Sans, sans-serif" font-size="11" '
        f'font-weight="bold" fill="{INK}">{escape(text)}</text>'
        for i, text in enumerate(lines)
    )
    about = f"<title>{escape(title)}</title><desc>{escape(alt)}</desc>"
    seen = f'viewBox="{-margin:g} {-top:g} {size[0]:g} {size[1]:g}" width="{size[0]:g}pt" height="{size[1]:g}pt"'
    svg = re.sub(r'viewBox="[^"]*"', seen, svg, count=1)
    start = svg.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:start]}{about}<rect {box} fill="white"/>{words}{svg[start:]}'


def inline_svg(svg: str, alt: str, key: str) -> str:
    """For the page: its colours instead of ours, ids of its own, and the description as its label."""
    for name, variable in PAGE_COLOURS.items():
        svg = svg.replace(name, variable)
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)  # it would hold for the whole page
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
    # ids must differ between the figures of one page; those that nothing refers to only repeat themselves
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)


# --- parts of figures --------------------------------------------------------------------------------


def mosaic(tiles: np.ndarray, gap: int = 1) -> np.ndarray:
    """R C h w (or R C h w 3) -> one array, tiles side by side with gaps of nan (transparent)."""
    rows, columns, h, w = tiles.shape[:4]
    shape = (rows * (h + gap) - gap, columns * (w + gap) - gap, *tiles.shape[4:])
    out = np.full(shape, np.nan)
    for r in range(rows):
        for c in range(columns):
            y, x = r * (h + gap), c * (w + gap)
            out[y : y + h, x : x + w] = tiles[r, c]
    return out


def heat(axes: Axes, values: np.ndarray, low: float, high: float, colours: str = "viridis") -> Any:
    """A map of values on a fixed scale, without ticks."""
    bare(axes)
    return axes.imshow(values, cmap=colours, vmin=low, vmax=high)


def show(axes: Axes, picture: np.ndarray) -> None:
    bare(axes)
    axes.imshow(picture)


def bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def scale_bar(figure: Figure, mappable: Any, axes: Any, label: str, **more: Any) -> None:
    """A slim colour bar below the panels."""
    options: dict[str, Any] = {"location": "bottom", "shrink": 0.5, "aspect": 40, "pad": 0.02} | more
    _finish(figure.colorbar(mappable, ax=axes, **options), label)


def scale_bar_at_foot(figure: Figure, mappable: Any, label: str, **more: Any) -> None:
    """The same for tiles: in the room left at the foot (0.55 inches)."""
    height = figure.get_figheight()
    place = figure.add_axes((0.25, 0.4 / height, 0.5, 0.08 / height))
    _finish(figure.colorbar(mappable, cax=place, orientation="horizontal", **more), label)


def _finish(bar: Any, label: str) -> None:
    bar.outline.set_visible(False)
    bar.set_label(label)


def tile_ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str], tile: tuple[int, int], gap: int) -> None:
    """Names along a mosaic's left and top, thinned out so that they never touch."""
    h, w = tile
    axes.set_yticks([r * (h + gap) + (h - 1) / 2 for r in range(len(rows))], rows)
    axes.set_xticks([c * (w + gap) + (w - 1) / 2 for c in range(len(columns))], columns)
    axes.tick_params(length=0, top=False, labeltop=True, labelbottom=False, pad=2)


def short(text: str, limit: int = 18) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
