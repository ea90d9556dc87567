"""Pictures of a set: a contact sheet by class, and what training will see of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitkit.data.augment import Augment
from vitkit.data.decode import BadPicture
from vitkit.data.keys import permutation
from vitkit.data.order import Order
from vitkit.data.preprocess import denormalise, normalise
from vitkit.data.samples import Batch, Samples, one_thread
from vitkit.data.source import Source
from vitkit.data.targets import mix
from vitkit.model.config import Preprocessing

_TILE, _GAP, _MARGIN = 112, 8, 24
_PAPER, _INK, _FAINT, _RED = (255, 255, 255), (28, 28, 30), (120, 120, 126), (176, 32, 32)
_MOST_CLASSES = 24

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class Tile:
    picture: Image.Image | None  # None: it could not be read
    caption: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    note: str
    tiles: list[Tile]


def contact_sheet(source: Source, columns: int = 8, seed: int = 0) -> Image.Image:
    """One row per class with a few of its pictures, drawn at random but always the same."""
    rows = []
    for number, members in list(enumerate(source.members))[:_MOST_CLASSES]:
        chosen = members[permutation(seed, 0, len(members), f"sheet {number}")[:columns]]
        tiles = [_tile(source, int(i)) for i in chosen]
        rows.append(Row(source.classes[number], f"{source.counts[number]:,}", tiles))
    more = len(source.classes) - len(rows)
    note = f", the first {len(rows)} shown" if more > 0 else ""
    sizes = ", ".join(f"{s} {n:,}" for s, n in source.splits.items())
    return draw(rows, f"{source.name}", f"{len(source.classes)} classes{note}; {sizes}", columns)


def training_sheet(
    source: Source,
    pre: Preprocessing,
    augment: Augment,
    rows: int = 6,
    columns: int = 8,
    seed: int = 0,
    about: str = "",
) -> Image.Image:
    """The evaluation view of a few samples, then the same samples as training sees them, epoch by epoch."""
    rows = min(rows, len(source))
    indices = permutation(seed, 0, len(source), "show")[: rows - rows % 2 or rows]
    order = Order(indices, np.zeros(len(indices), dtype=np.int64))
    channels = source.channels if source.channels in (1, 3) else None
    plain = Samples(source, pre, None, seed, channels).load(0, order)
    training = Samples(source, pre, augment, seed, channels)
    with one_thread():
        seen = [_as_trained(training.load(epoch, order), pre, augment, source) for epoch in range(columns - 1)]
    drawn = []
    for r, index in enumerate(plain.indices.tolist()):
        tiles = [Tile(_image(plain.images[r].numpy()), "evaluation"), *(epoch[r] for epoch in seen)]
        drawn.append(Row(source.label_name(index), "", tiles))
    return draw(drawn, f"{source.name}: what training sees", about, columns)


def _as_trained(batch: Batch, pre: Preprocessing, augment: Augment, source: Source) -> list[Tile]:
    images, captions = batch.images, [""] * len(batch)
    if augment.mixup or augment.cutmix:
        mixed, targets = mix(normalise(images, pre), batch.labels, batch.keys, augment, len(source.classes))
        images = denormalise(mixed, pre)
        captions = [_shares(row, source.classes) for row in targets.numpy()]
    return [Tile(_image(image.numpy()), caption) for image, caption in zip(images, captions, strict=True)]


def _shares(target: np.ndarray, classes: Sequence[str]) -> str:
    """The two largest shares of a soft target: "cat 72%, dog 28%"."""
    order = np.argsort(-target, kind="stable")[:2]
    return ", ".join(f"{_cut(classes[i], 7)} {100 * target[i]:.0f}%" for i in order if target[i] > 0.05)


def _tile(source: Source, index: int) -> Tile:
    try:
        picture, _ = source.read(index)
    except BadPicture as e:
        return Tile(None, e.reason)
    return Tile(picture if isinstance(picture, Image.Image) else _image(picture.transpose(2, 0, 1)))


def _image(pixels: np.ndarray) -> Image.Image:
    """(C, H, W) -> a picture; of other than three channels the first is shown."""
    if pixels.shape[0] == 3:
        return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    return Image.fromarray(np.ascontiguousarray(pixels[0]))


def draw(rows: list[Row], title: str, about: str, columns: int) -> Image.Image:
    """Rows of tiles with their titles on the left."""
    font, small, large = (ImageFont.load_default(size) for size in (14, 11, 20))
    label = min(220, 30 + max((int(font.getlength(r.title)) for r in rows), default=0))
    captions = any(t.caption for r in rows for t in r.tiles if t.picture)
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
    if tile.picture is None:
        pen.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), outline=_RED)
        words, line, top = tile.caption.split(), "", y + 8
        for word in [*words, ""]:
            if font.getlength(f"{line} {word}") > _TILE - 16 or not word:
                pen.text((x + 8, top), _shorten(line, font, _TILE - 16), _RED, font)
                line, top = word, top + 14
            else:
                line = f"{line} {word}".strip()
            if top > y + _TILE - 16:
                break
        return
    picture = tile.picture.convert("RGB")
    scale = _TILE / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    enlarged = scale > 1.5  # show the pixels of small pictures as they are
    picture = picture.resize(size, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)
    sheet.paste(picture, (x + (_TILE - size[0]) // 2, y + (_TILE - size[1]) // 2))
    if tile.caption:
        pen.text((x, y + _TILE + 1), _shorten(tile.caption, font, _TILE), _FAINT, font)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _shorten(text: str, font: Font, width: float) -> str:
    """Text on one line that fits: the end is cut off where need be."""
    text = " ".join(text.encode(errors="replace").decode().split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
