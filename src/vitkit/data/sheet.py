"""Images of a set: a contact sheet by class, and what training will see of it."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitkit.data.augment import Augment, mix
from vitkit.data.decode import BadImage
from vitkit.data.keys import permutation
from vitkit.data.order import Order
from vitkit.data.preprocess import denormalise, normalise
from vitkit.data.samples import Batch, Samples, one_thread
from vitkit.data.source import Source, pillow
from vitkit.model.config import Preprocessing

_TILE, _GAP, _MARGIN = 112, 8, 24
_PAPER, _INK, _FAINT, _RED = (255, 255, 255), (28, 28, 30), (120, 120, 126), (176, 32, 32)
_MOST_CLASSES, _COLUMNS = 24, 8

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Tile(NamedTuple):
    image: Image.Image | None  # None: it could not be read
    caption: str = ""


class Row(NamedTuple):
    title: str
    note: str
    tiles: list[Tile]


def contact_sheet(source: Source) -> Image.Image:
    """One row per class with a few of its images, drawn at random but always the same."""
    rows = []
    titles = source.classes or (", ".join(source.targets),)
    for number, members in enumerate(source.members[:_MOST_CLASSES]):
        chosen = members[permutation(0, 0, len(members), f"sheet {number}")[:_COLUMNS]]
        tiles = []
        for i in chosen.tolist():
            try:
                tiles.append(Tile(source.image(i)))
            except BadImage as e:
                tiles.append(Tile(None, e.reason))
        rows.append(Row(titles[number], f"{len(members):,}", tiles))
    note = f", the first {len(rows)} shown" if len(titles) > len(rows) else ""
    sizes = ", ".join(f"{s} {n:,}" for s, n in source.splits.items())
    what = f"{len(source.classes)} classes{note}" if source.classes else "values"
    return draw(rows, source.name, f"{what}; {sizes}", _COLUMNS)


def training_sheet(
    source: Source, pre: Preprocessing, augment: Augment, rows: int = 6, seed: int = 0, about: str = ""
) -> Image.Image:
    """The evaluation view of a few samples, then the same samples as training sees them, epoch by epoch."""
    rows = min(rows, len(source))
    indices = permutation(seed, 0, len(source), "show")[: rows - rows % 2 or rows]
    order = Order(indices, np.zeros(len(indices), dtype=np.int64))
    channels = source.channels if source.channels in (1, 3) else None
    plain = Samples(source, pre, None, seed, channels).load(0, order)
    training = Samples(source, pre, augment, seed, channels)
    with one_thread():
        seen = [_as_trained(training.load(epoch, order), pre, augment, source) for epoch in range(_COLUMNS - 1)]
    drawn = [
        Row(source.label_name(index), "", [Tile(pillow(plain.images[r]), "evaluation"), *(epoch[r] for epoch in seen)])
        for r, index in enumerate(plain.indices.tolist())
    ]
    return draw(drawn, f"{source.name}: what training sees", about, _COLUMNS)


def _as_trained(batch: Batch, pre: Preprocessing, augment: Augment, source: Source) -> list[Tile]:
    images, captions = batch.images, [""] * len(batch)
    if (augment.mixup or augment.cutmix) and source.label_kind != "values":
        mixed, targets = mix(normalise(images, pre), batch.labels, batch.keys, augment, len(source.classes))
        images = denormalise(mixed, pre)
        names = [name if len(name) <= 7 else name[:6] + "…" for name in source.classes]
        for r, target in enumerate(targets.numpy()):  # the two largest shares: "cat 72%, dog 28%"
            largest = [i for i in np.argsort(-target, kind="stable")[:2] if target[i] > 0.05]
            captions[r] = ", ".join(f"{names[i]} {100 * target[i]:.0f}%" for i in largest)
    return [Tile(pillow(image), caption) for image, caption in zip(images, captions, strict=True)]


def draw(rows: list[Row], title: str, about: str, columns: int) -> Image.Image:
    """Rows of tiles with their titles on the left."""
    font, small, large = (ImageFont.load_default(size) for size in (14, 11, 20))
    label = min(220, 30 + max((int(font.getlength(r.title)) for r in rows), default=0))
    captions = any(t.caption for r in rows for t in r.tiles if t.image)
    height = _TILE + (16 if captions else 0) + _GAP
    size = (_MARGIN * 2 + label + columns * (_TILE + _GAP) - _GAP, _MARGIN * 2 + 52 + len(rows) * height)
    sheet = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN - 6), _shorten(title, large, size[0] - 2 * _MARGIN), _INK, large)
    pen.text((_MARGIN, _MARGIN + 20), _shorten(about, font, size[0] - 2 * _MARGIN), _FAINT, font)
    for r, row in enumerate(rows):
        y = _MARGIN + 52 + r * height
        pen.text((_MARGIN, y + _TILE // 2 - 16), _shorten(row.title, font, label - 14), _INK, font)
        pen.text((_MARGIN, y + _TILE // 2 + 2), row.note, _FAINT, font)
        for c, tile in enumerate(row.tiles[:columns]):
            _draw_tile(sheet, pen, tile, (_MARGIN + label + c * (_TILE + _GAP), y), small)
    return sheet


def _draw_tile(sheet: Image.Image, pen: ImageDraw.ImageDraw, tile: Tile, at: tuple[int, int], font: Font) -> None:
    x, y = at
    if tile.image is None:
        pen.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), outline=_RED)
        text = textwrap.fill(tile.caption, 17, max_lines=7, placeholder="…")
        pen.multiline_text((x + 8, y + 8), text, _RED, font, spacing=2)
        return
    image = tile.image.convert("RGB")
    scale = _TILE / max(image.size)
    width, height = (max(1, round(n * scale)) for n in image.size)
    how = Image.Resampling.NEAREST if scale > 1.5 else Image.Resampling.LANCZOS  # pixels of small images stay sharp
    sheet.paste(image.resize((width, height), how), (x + (_TILE - width) // 2, y + (_TILE - height) // 2))
    if tile.caption:
        pen.text((x, y + _TILE + 1), _shorten(tile.caption, font, _TILE), _FAINT, font)


def _shorten(text: str, font: Font, width: float) -> str:
    """Text on one line that fits: the end is cut off where need be."""
    text = whole = " ".join(text.encode(errors="replace").decode().split())
    while text and font.getlength(text + "…" * (text != whole)) > width:
        text = text[:-1]
    return text + "…" * (text != whole)
