"""Encoded bytes -> an upright 8-bit image, or the reason why not.

The whole decode happens here, inside one guard: Pillow opens lazily, so a file that opens well may
still be cut short. Whatever goes wrong becomes `BadImage` with a reason a person can act on.

Images come out with the wanted number of channels: 1 (grey) or 3 (RGB). Transparency is dropped,
as timm and Hugging Face do; 16-bit and floating-point images are scaled to 8 bits (Pillow alone
would clip them to white); of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from vitkit.errors import DataError, MissingPackage, NotThere, StorageError, reason_of
from vitkit.storage import open_regular

MAX_PIXELS = 178_956_970  # the limit at which Pillow speaks of a decompression bomb
SURE_PIXELS = 1 << 24  # so many are decoded whatever the file's size; of more, each byte may stand for
PIXELS_PER_BYTE = 10_000  # more than black and white PNG at its best (8,256)

# Formats that Pillow decodes by itself. Not EPS, PDF or WMF: those start other programs.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "AVIF", "JPEG2000", "TGA", "ICO")
_ENDINGS = "jpg jpeg jpe jfif png apng gif bmp dib tif tiff webp ppm pgm pbm pnm avif jp2 j2k tga ico"
SUFFIXES = frozenset(f".{ending}" for ending in _ENDINGS.split())
_ORIENTATION = 0x0112  # the EXIF tag; its values 5 to 8 mean an image that lies on its side
_TURNS = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_UPRIGHT = {value: Image.Transpose[turn] for value, turn in enumerate(_TURNS.split(), start=2)}

# Given the upright (width, height), the smallest (width, height) that the whole image is needed at.
Needed = Callable[[int, int], tuple[int, int]]


class BadImage(DataError):
    """One image that cannot be read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(data: bytes | str | Path, channels: int = 3, needed: Needed | None = None) -> Image.Image:
    """A file or its bytes -> an upright image in mode "RGB" (3 channels) or "L" (1 channel).

    With `needed`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size (never below what is needed):
    several times faster for photographs. Without it, every pixel is exact.
    """
    with _opened(data) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise BadImage(f"{width}x{height} pixels is beyond the limit of {MAX_PIXELS:,} (a decompression bomb?)")
        if needed is not None and image.format == "JPEG":
            sideways = _orientation(image) >= 5
            image.draft(None, needed(height, width)[::-1] if sideways else needed(width, height))
        if isinstance(image, ImageFile.ImageFile) and (image.format, image.mode) == ("JPEG", "RGB"):
            # Pillow keeps four bytes a pixel: let the decoder write them as such
            image.tile[:] = [(codec, box, at, ("RGBX", *how[1:])) for codec, box, at, how in image.tile]  # type: ignore
        image.load()
        return _turned(image, channels)


def upright(image: Image.Image, channels: int = 3) -> Image.Image:
    """An image that Pillow has opened already, as `decode` gives it. Raises `BadImage`."""
    try:
        image.load()
        return _turned(image, channels)
    except Exception as e:  # Pillow opens lazily: the file may be damaged, or gone
        raise BadImage(_reason(e, b"")) from e


def _turned(image: Image.Image, channels: int) -> Image.Image:
    turn = _UPRIGHT.get(_orientation(image))
    return to_channels(image.transpose(turn) if turn is not None else image, channels)


class Header(NamedTuple):
    width: int
    height: int
    format: str
    mode: str


def header(data: bytes | str | Path) -> Header:
    """What an image says about itself before it is decoded."""
    with _opened(data) as image:
        return Header(*image.size, image.format or "unknown", image.mode)


@contextmanager
def _opened(data: bytes | str | Path) -> Iterator[Image.Image]:
    """The image as Pillow opens it; whatever goes wrong while it is in use becomes a `BadImage`."""
    raw = b""
    try:
        raw = data if isinstance(data, bytes) else read_bytes(data)
        if not raw:
            raise BadImage("the file is empty (0 bytes)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oddities of metadata; what matters raises
            with Image.open(io.BytesIO(raw), formats=available_formats()) as image:
                if image.width * image.height > max(SURE_PIXELS, PIXELS_PER_BYTE * len(raw)):
                    raise BadImage(f"{image.width}x{image.height} pixels are declared by a file of {len(raw):,} bytes")
                yield image
    except NotThere as e:
        raise BadImage(_reason(e, raw)) from e
    except (BadImage, StorageError, MissingPackage):  # a server that does not answer says nothing about the image
        raise
    except Exception as e:  # Pillow's plugins raise almost anything on damaged input
        raise BadImage(_reason(e, raw)) from e


@lru_cache
def available_formats() -> tuple[str, ...]:
    """The formats of our list that this Pillow was built with."""
    Image.init()
    return tuple(f for f in FORMATS if f in Image.OPEN)


def read_bytes(path: str | Path) -> bytes:
    """As `open(path, "rb").read()` with half the calls to the system."""
    file = open_regular(path)
    try:
        whole = os.read(file, os.fstat(file).st_size + 1)
        while more := os.read(file, 1 << 20) if whole else b"":  # a file that grows
            whole += more
        return whole
    finally:
        os.close(file)


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info and "xmp" not in image.info and image.format not in ("TIFF", "MPO"):
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not make the image unreadable
        image.info.pop("exif", None)
        return 1
    return value if value in range(1, 9) else 1


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Any mode of Pillow -> "RGB" or "L", scaling deep images rather than clipping them."""
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise DataError(f"files are read with 1 or 3 channels, not {channels}; put other data into an .npz array")
    if image.mode == mode:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(to_8_bits(np.asarray(image)))
    return image.convert(mode)


def to_8_bits(pixels: np.ndarray, white: float | None = None) -> np.ndarray:
    """Values from 0 to `white` -> uint8; by default the white of a single image of this type and these values."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if white is None:
        top = float(pixels.max(initial=0))
        if not np.isfinite(pixels).all():
            raise BadImage("it holds values that are no finite numbers")
        white = 65535.0 if pixels.dtype == np.uint16 else white_of(pixels.dtype, top) or top
    return np.clip(np.rint(pixels.astype(np.float64) * (255 / white)), 0, 255).astype(np.uint8)


def white_of(kind: np.dtype, top: float) -> float | None:
    """What stands for white where the highest value is `top`: 1, 255 or 65535; None beyond.

    Fractions count as 0..1 up to half a level above 1, where rounding may have put them.
    """
    fractions = np.issubdtype(kind, np.floating)
    return 1.0 if fractions and top <= 1 + 0.5 / 255 else next((w for w in (255.0, 65535.0) if top < w + 0.5), None)


def _reason(error: Exception, raw: bytes) -> str:
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return "the file has vanished" if isinstance(error, FileNotFoundError) else "permission denied"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    if isinstance(error, UnidentifiedImageError):
        return f"not an image in a known format (it begins with {raw[:8]!r})"
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels, beyond the limit of {MAX_PIXELS:,} (a decompression bomb?)"
    text = reason_of(error)
    if isinstance(error, DataError):  # our own words
        return text
    return f"truncated: {text}" if "truncated" in text.lower() else f"damaged: {text}"
