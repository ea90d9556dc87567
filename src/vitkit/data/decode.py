"""Encoded bytes -> an upright 8-bit picture, or the reason why not.

The whole decode happens here, inside one guard: Pillow opens lazily, so a file that opens well may
still be cut short. Whatever goes wrong becomes `BadPicture` with a reason a person can act on.

Pictures come out with the wanted number of channels: 1 (grey) or 3 (RGB). Transparency is dropped,
as timm and Hugging Face do; 16-bit and floating-point pictures are scaled to 8 bits (Pillow alone
would clip them to white); of an animation the first frame is taken.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from vitkit.errors import DataError

MAX_PIXELS = 178_956_970  # the limit at which Pillow speaks of a decompression bomb

# Formats that Pillow decodes by itself. Not EPS, PDF or WMF: those start other programs.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "TIFF", "WEBP", "PPM", "AVIF", "JPEG2000", "TGA", "ICO")
SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k", ".tga", ".ico"),
    )
)
_ORIENTATION = 0x0112  # the EXIF tag; its values 5 to 8 mean a picture that lies on its side
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Given the upright (width, height), the smallest (width, height) that the whole picture is needed at.
Needed = Callable[[int, int], tuple[int, int]]


class BadPicture(DataError):
    """One picture that cannot be read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(data: bytes | str | Path, channels: int = 3, needed: Needed | None = None) -> Image.Image:
    """A file or its bytes -> an upright picture in mode "RGB" (3 channels) or "L" (1 channel).

    With `needed`, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size (never below what is needed):
    several times faster for photographs. Without it, every pixel is exact.
    """
    raw = b""
    try:
        raw = data if isinstance(data, bytes) else _read(data)
        if not raw:
            raise BadPicture("the file is empty (0 bytes)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oddities of metadata; what matters raises
            with Image.open(io.BytesIO(raw), formats=available_formats()) as image:
                return _decode_opened(image, channels, needed)
    except BadPicture:
        raise
    except Exception as e:  # Pillow's plugins raise almost anything on damaged input
        raise BadPicture(_reason(e, raw)) from e


def available_formats() -> tuple[str, ...]:
    """The formats of our list that this Pillow was built with."""
    global _available
    if not _available:
        Image.init()
        _available = tuple(f for f in FORMATS if f in Image.OPEN)
    return _available


_available: tuple[str, ...] = ()


def _read(path: str | Path) -> bytes:
    """As `open(path, "rb").read()` with half the calls to the system."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        whole = os.read(file, os.fstat(file).st_size + 1)
        while more := os.read(file, 1 << 20) if whole else b"":  # a pipe, or a file that grows
            whole += more
        return whole
    finally:
        os.close(file)


def _decode_opened(image: Image.Image, channels: int, needed: Needed | None) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadPicture(f"{width}x{height} pixels is beyond the limit of {MAX_PIXELS:,} (a decompression bomb?)")
    if needed is not None and image.format == "JPEG":
        sideways = _orientation(image) >= 5
        wanted = needed(height, width)[::-1] if sideways else needed(width, height)
        image.draft(None, wanted)
    if isinstance(image, ImageFile.ImageFile) and (image.format, image.mode) == ("JPEG", "RGB"):
        # Pillow keeps four bytes a pixel: let the decoder write them as such
        image.tile[:] = [(codec, box, at, ("RGBX", *how[1:])) for codec, box, at, how in image.tile]  # type: ignore
    image.load()
    upright = _UPRIGHT.get(_orientation(image))
    return to_channels(image.transpose(upright) if upright is not None else image, channels)


def _orientation(image: Image.Image) -> int:
    if "exif" not in image.info and "xmp" not in image.info and image.format not in ("TIFF", "MPO"):
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not make the picture unreadable
        image.info.pop("exif", None)
        return 1
    return value if value in range(1, 9) else 1


def sniff_channels(pictures: Sequence[bytes | str], looked_at: int = 16) -> int:
    """1 when a few pictures spread over the set are all grey, otherwise 3. Only their headers are read."""
    modes = set()
    for picture in pictures[:: max(1, len(pictures) // looked_at)]:
        try:
            with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as image:
                modes.add(image.mode)
        except Exception:  # whatever is wrong with it is said when it is decoded
            continue
    return 1 if modes and all(m in ("1", "L", "LA", "F") or m.startswith("I") for m in modes) else 3


def to_channels(image: Image.Image, channels: int) -> Image.Image:
    """Any mode of Pillow -> "RGB" or "L", scaling deep pictures rather than clipping them."""
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise DataError(f"files are read with 1 or 3 channels, not {channels}; put other data into an .npz array")
    if image.mode == mode:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(to_8_bits(np.asarray(image)))
    return image.convert(mode)


def to_8_bits(pixels: np.ndarray) -> np.ndarray:
    """16-bit, 32-bit or floating-point values -> uint8. What fits in 0..255 already is kept as it is."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    values = np.nan_to_num(pixels.astype(np.float64))
    top = float(values.max(initial=0.0))
    if np.issubdtype(pixels.dtype, np.floating) and top <= 1.0:
        values = values * 255  # a picture in 0..1
    elif pixels.dtype.itemsize == 2 or 255 < top <= 65535:
        values = values / 257  # 65535 / 255
    elif top > 65535:
        values = values * (255 / top)
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _reason(error: Exception, raw: bytes) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file has vanished"
    if isinstance(error, PermissionError):
        return "permission denied"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    if isinstance(error, UnidentifiedImageError):
        return f"not a picture in a known format (it begins with {raw[:8]!r})"
    if isinstance(error, Image.DecompressionBombError):
        return f"too many pixels, beyond the limit of {MAX_PIXELS:,} (a decompression bomb?)"
    text = " ".join(str(error).split()) or type(error).__name__
    return f"truncated: {text}" if "truncated" in text.lower() else f"damaged: {text}"
