"""Images for the tests: every mode and format, and every kind of damage."""

from __future__ import annotations

import io
import os
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, features


def photo(seed: int = 0, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A smooth colourful image with some detail; (width, height)."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.integers(-12, 13, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8))


def encode(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


FORMATS = {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP", "ppm": "PPM"}
if features.check("avif"):
    FORMATS["avif"] = "AVIF"
if features.check("jpg_2000"):
    FORMATS["jp2"] = "JPEG2000"


@lru_cache
def good_files(seed: int = 0) -> dict[str, bytes]:
    """Readable images of every mode and format, under awkward names."""
    image = photo(seed)
    grey16 = (np.asarray(image.convert("L")).astype(np.uint16) * 257).astype(np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [photo(seed + i).convert("P") for i in range(3)]
    files = {f"plain.{suffix}": encode(image, format) for suffix, format in FORMATS.items()}
    files |= {
        "grey.png": encode(image.convert("L"), "PNG"),
        "one bit.png": encode(image.convert("1"), "PNG"),
        "palette.png": encode(image.convert("P"), "PNG"),
        "palette with transparency.png": encode(image.convert("P"), "PNG", transparency=0),
        "alpha.png": encode(image.convert("RGBA"), "PNG"),
        "grey alpha.png": encode(image.convert("LA"), "PNG"),
        "alpha.webp": encode(image.convert("RGBA"), "WEBP"),
        "cmyk.jpg": encode(image.convert("CMYK"), "JPEG"),
        "cmyk.tif": encode(image.convert("CMYK"), "TIFF"),
        "grey.jpg": encode(image.convert("L"), "JPEG"),
        "progressive.jpg": encode(image, "JPEG", progressive=True),
        "16 bit.png": encode(Image.fromarray(grey16), "PNG"),
        "16 bit.tif": encode(Image.fromarray(grey16), "TIFF"),
        "32 bit.tif": encode(Image.fromarray(grey16.astype(np.int32)), "TIFF"),
        "float.tif": encode(Image.fromarray(grey16.astype(np.float32) / 65535), "TIFF"),
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated.png": encode(image, "PNG", save_all=True, append_images=[photo(seed + 9)]),
        "animated.webp": encode(image, "WEBP", save_all=True, append_images=[photo(seed + 9)]),
        "on its side.jpg": encode(image, "JPEG", exif=exif),
        "UPPER.JPG": encode(image),
        "wrong suffix.png": encode(image),
        "line\nbreak.jpg": encode(image),
        "日本語 émoji 🙂.jpg": encode(image),
        "comma, \"quote\" 'and' %s.jpg": encode(image),
        "tiny.png": encode(image.resize((1, 1)), "PNG"),
        "thin.png": encode(image.resize((1, 300)), "PNG"),
    }
    return files


@lru_cache
def damaged_files(seed: int = 0) -> dict[str, bytes]:
    """At least fifty ways in which an image cannot be read."""
    rng = random.Random(seed)
    image = photo(seed, (96, 72))
    whole = {suffix: encode(image, format) for suffix, format in FORMATS.items()}
    files = {}
    for suffix, data in whole.items():
        files[f"first tenth.{suffix}"] = data[: len(data) // 10]
        files[f"first half.{suffix}"] = data[: len(data) // 2]
        files[f"header only.{suffix}"] = data[:12]
        files[f"header of zeros.{suffix}"] = bytes(16) + data[16:]
        files[f"beginning lost.{suffix}"] = data[len(data) // 3 :]
    files |= {
        "empty.jpg": b"",
        "one byte.png": b"\x89",
        "zeros.jpg": bytes(4000),
        "noise.jpg": bytes(rng.randrange(256) for _ in range(4000)),
        "error page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "text.png": "not an image".encode("utf-16"),
        "almost whole.jpg": whole["jpg"][: int(len(whole["jpg"]) * 0.9)],
        "flipped chunk.png": _spoil(whole["png"], 40, 60),
        "pointer to a large file.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "script.bmp": b"#!/bin/sh\necho no\n",
        "archive.webp": b"PK\x03\x04" + bytes(200),
        "postscript.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
        "vector.png": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "bomb.png": _bomb(),
    }
    return files


def _spoil(data: bytes, low: int, high: int) -> bytes:
    return data[:low] + bytes(255 - b for b in data[low:high]) + data[high:]


def _bomb() -> bytes:
    """A PNG that claims to have 900 million pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def write_folder(root: Path, counts: dict[str, int], size: tuple[int, int] = (64, 48)) -> Path:
    """class -> number of JPEGs."""
    for c, (label, count) in enumerate(counts.items()):
        (root / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (root / label / f"{i:03}.jpg").write_bytes(encode(photo(1000 * c + i, size)))
    return root


def torture_folder(root: Path) -> tuple[Path, set[str]]:
    """The worst folder there is, and the paths of exactly those files that cannot be read."""
    bad = set()
    for label, seed in (("first class", 1), ("zweite Klasse ü", 2), ("dritte\nKlasse", 3)):
        folder = root / label
        (folder / "deeper" / "still").mkdir(parents=True)
        for name, data in good_files(seed).items():
            (folder / name).write_bytes(data)
        for name, data in damaged_files(seed).items():
            (folder / "deeper" / name).write_bytes(data)
            bad.add(str(folder / "deeper" / name))
        for i in range(30):
            (folder / "deeper" / "still" / f"{i}.jpg").write_bytes(encode(photo(100 * seed + i)))
    first = root / "first class"
    (first / "a folder.jpg").mkdir()
    (first / "notes.txt").write_text("not an image, and not meant to be one")
    (first / ".hidden.jpg").write_bytes(b"")
    os.symlink(root, first / "loop")
    os.symlink("itself", first / "itself")
    os.symlink("nowhere.jpg", first / "dangling.jpg")
    bad.add(str(first / "dangling.jpg"))
    (root / "empty class").mkdir()
    (root / ".hidden class").mkdir()
    return root, bad
