"""The images that a user names or hands over: files, folders, sets, URLs, bytes, Pillow, NumPy and torch.

Everything becomes a `Source`, so that it is read as the images of a set are: by the model's own preprocessing.
Arrays hold pixels, 0..255 or 0..1: (H, W), (H, W, C) or a batch (N, H, W, C) in NumPy and (C, H, W) or (N, C, H, W) in
torch, as each of the two has it.
"""

from __future__ import annotations

import http.client
import urllib.request
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitkit.data.decode import SUFFIXES, BadImage, Needed, decode, read_bytes, to_8_bits, upright, white_of
from vitkit.data.preprocess import prepare, read_image, read_pixels, to_tensor
from vitkit.data.source import Names, Source, pillow
from vitkit.data.sources import FILES, open_data
from vitkit.errors import ConfigError, InputError, StorageError
from vitkit.model.config import Preprocessing
from vitkit.progress import SILENT, Progress
from vitkit.storage import is_url, is_web, join, listing, repeated, suffix
from vitkit.storage.remote import Short, patience

OneImage = str | Path | bytes | Image.Image | np.ndarray | Tensor
GivenImages = OneImage | Iterable[OneImage]
_WRITTEN = "!#$%&'()*+,/:;=?@[]~"  # stays as it is in an address; blanks and ü are sent as browsers send them
_MOST = 256 << 20  # bytes of an image behind a URL


def open_inputs(given: GivenImages, split: str | None = None, progress: Progress = SILENT) -> Source:
    """Images and folders as they are, whatever folder an image is in; any other text is a set, as in training.

    A set is taken whole, or its `split`. The order is that of the arguments; within a folder, of the names.
    """
    parts: list[Source] = []
    items = [(item, _paths(item, split) if isinstance(item, str | Path) else []) for item in listed(given)]
    for kind, several in groupby(items, key=_kind):
        if kind == "files":
            paths = [path for _, paths in several for path in paths]
            parts.append(_source(paths[0] if len(paths) == 1 else f"{len(paths):,} images", paths))
        elif kind == "set":
            parts += [open_data(str(name), progress).split(split or "all") for name, _ in several]
        else:
            parts.append(_handed(item for item, _ in several))
    if not parts:
        raise ConfigError("no images were named; give files, folders or a set such as digits")
    return parts[0] if len(parts) == 1 else Joined(parts)


def is_image_url(given: object) -> bool:
    """Whether an address is that of an image: by its ending, and on the web also where it does not say."""
    if not is_url(given):
        return False
    web = is_web(str(given))
    return suffix(str(given)) in SUFFIXES or (web and suffix(str(given)) not in FILES)


def is_one(given: GivenImages) -> bool:
    """Whether one image was given, by itself: no list, no folder, no set, no batch."""
    if isinstance(given, str | Path):
        return is_image_url(given) or (Path(given).expanduser().is_file() and bool(_paths(given, None)))
    if isinstance(given, np.ndarray):
        return given.ndim <= 3
    return given.ndim == 3 if isinstance(given, Tensor) else isinstance(given, bytes | Image.Image)


def listed(given: GivenImages) -> list[OneImage]:
    """The images one by one; a batch of arrays is taken apart."""
    if isinstance(given, str | Path | bytes | Image.Image | np.ndarray | Tensor):
        given = [given]
    several = list(given) if isinstance(given, Iterable) else [given]  # what is no image is refused when it is read
    batches = [list(x) if isinstance(x, np.ndarray | Tensor) and x.ndim == 4 else [x] for x in several]
    return [item for batch in batches for item in batch]


def _kind(item: tuple[OneImage, list[str]]) -> str:
    given, paths = item
    if isinstance(given, str | Path) and not is_image_url(given):
        return "files" if paths else "set"
    return "handed over"


def _paths(given: str | Path, split: str | None) -> list[str]:
    """The paths of images; none for the name of a set."""
    if is_url(given):
        folder = split is None and not is_image_url(given) and suffix(str(given)) not in FILES
        return _images_below(str(given)) if folder else []
    path = Path(given).expanduser()
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return [str(path)]
    if not path.is_dir() or split is not None:
        return []
    paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    return [str(p) for p in paths if not any(part.startswith(".") for part in p.relative_to(path).parts)]


def _images_below(url: str) -> list[str]:
    """Those of a folder behind a URL; none where it holds a set in large files."""
    below = listing(url)
    if below.paths(".tar") or below.paths(".parquet"):
        return []
    return [join(f.url, name) for f in below.walk() for name in sorted(f.files) if suffix(name) in SUFFIXES]


def _source(name: str, paths: Sequence[str]) -> Source:
    return Source(name, "all", {"all": len(paths)}, ("",), np.zeros(len(paths), np.int64), Names(paths))


def _handed(items: Iterable[OneImage]) -> Source:
    """What is in memory or behind a URL; named by its URL or file, else by its number."""
    kept = [item if isinstance(item, str | bytes | Image.Image) else to_pixels(item) for item in items]
    names = [x if isinstance(x, str) else getattr(x, "filename", "") or f"image {i}" for i, x in enumerate(kept)]
    plain = _source(names[0] if len(names) == 1 else f"{len(names):,} images", [str(name) for name in names])
    return Given(**vars(plain), items=tuple(kept))


def to_pixels(given: object) -> Tensor:
    """An array of pixels -> uint8 (C, H, W). Values that were normalised already are refused."""
    if not isinstance(given, np.ndarray | Tensor):
        known = "a path, a URL, bytes, a Pillow image, an array or a tensor"
        raise InputError(f"{type(given).__name__} is no image; give {known}, or a list of these")
    array = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    if array.ndim == 2:
        array = array[None]
    elif array.ndim == 3 and not isinstance(given, Tensor):
        array = array.transpose(2, 0, 1)  # C H W
    if array.ndim != 3 or not array.size or len(array) > 64:
        layout = "(C, H, W)" if isinstance(given, Tensor) else "(H, W) or (H, W, C)"
        raise InputError(f"an array of shape {tuple(given.shape)} is no image; give {layout}")
    if array.dtype.kind not in "buif" or not np.isfinite(array).all() or float(array.min()) < 0:
        hint = "give values 0..255 or 0..1; a tensor that is normalised already goes into model(x)"
        raise InputError(f"the array holds values that are no pixels; {hint}")
    white = white_of(array.dtype, float(array.max()))
    return torch.from_numpy(np.ascontiguousarray(to_8_bits(array, None if array.dtype == np.uint16 else white)))


def fetch(url: str) -> bytes:
    """What is behind a URL, as a person would see it in a browser. Raises `BadImage`."""
    if not is_web(url):
        return read_bytes(url)
    try:
        content = repeated(url, partial(_asked, url))
    except StorageError as e:
        raise BadImage(f"the URL cannot be fetched ({e.__cause__ or e})") from e
    if len(content) > _MOST:
        raise BadImage(f"the URL gives more than {_MOST >> 20} MB")
    return content


def _asked(url: str) -> bytes:
    """One request, without any package of fsspec's."""
    try:
        request = urllib.request.Request(quote(url, safe=_WRITTEN), headers={"User-Agent": "vitkit"})
        with closing(urllib.request.urlopen(request, timeout=patience())) as answer:
            content: bytes = answer.read(_MOST + 1)
    except (ValueError, http.client.InvalidURL) as e:
        raise StorageError(f"this is no address of a web server: {e}") from e
    stated = answer.headers.get("Content-Length", "")
    if stated.isdecimal() and len(content) < min(int(stated), _MOST):
        raise Short(f"{len(content)} of {stated} bytes arrived")
    return content


@dataclass(eq=False, repr=False)
class Given(Source):
    """Images in memory or behind URLs, each as it was given."""

    items: tuple[str | bytes | Image.Image | Tensor, ...] = ()  # a str is a URL

    def pixels_of(self, index: int, pre: Preprocessing, channels: int) -> Tensor:
        item = self.items[index]
        if isinstance(item, Tensor):
            return read_pixels(item[None], pre, channels)[0]
        if isinstance(item, Image.Image):
            return to_tensor(prepare(upright(item, channels), pre))
        return read_image(fetch(item) if isinstance(item, str) else item, pre, channels)

    def image(self, index: int, channels: int | None = None, needed: Needed | None = None) -> Image.Image:
        item = self.items[index]
        if isinstance(item, Tensor):
            return pillow(item)
        if isinstance(item, Image.Image):
            return upright(item, channels or 3)
        return decode(fetch(item) if isinstance(item, str) else item, channels or 3, needed)


class Joined(Source):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts, self.starts = parts, np.cumsum([0, *map(len, parts)]).tolist()
        name, count = ", ".join(p.name for p in parts), self.starts[-1]
        super().__init__(name, "all", {"all": count}, ("",), np.zeros(count, np.int64))

    def _find(self, index: int) -> tuple[Source, int]:
        part = bisect_right(self.starts, index) - 1
        return self.parts[part], index - self.starts[part]

    def where(self, index: int) -> str:
        source, own = self._find(index)
        return source.where(own)

    @property
    def labelled(self) -> bool:
        return any(part.labelled for part in self.parts)

    def label_name(self, index: int) -> str:
        source, own = self._find(index)
        return source.label_name(own) if source.labelled else ""

    def split_of(self, index: int) -> str:
        source, own = self._find(index)
        return source.split_of(own) if source.labelled else ""

    def pixels_of(self, index: int, pre: Preprocessing, channels: int) -> Tensor:
        source, own = self._find(index)
        return source.pixels_of(own, pre, channels)

    def image(self, index: int, channels: int | None = None, needed: Needed | None = None) -> Image.Image:
        source, own = self._find(index)
        return source.image(own, channels, needed)
