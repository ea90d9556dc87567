"""Samples of any set -> one tar shard or Parquet file, read back and compared before it counts.

Images are copied byte for byte; only `size` or `quality` re-encodes them, and arrays in memory become PNG. What is
written depends on the samples alone: the same pack gives the same bytes again.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitkit.data.badfiles import BadFile
from vitkit.data.decode import BadImage, decode, header, read_bytes
from vitkit.data.preprocess import RESAMPLING
from vitkit.data.source import Source
from vitkit.data.sources.lists import require_pyarrow
from vitkit.data.sources.tarscan import read_range, scan
from vitkit.errors import DataError
from vitkit.io import canonical, replacing

if TYPE_CHECKING:
    from pyarrow import Schema, Table

QUALITY = 90  # of JPEG, where images are re-encoded and nothing else is asked for
_SUFFIX = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}  # others are called as their format
_ROWS = 100  # of a row group, as Hugging Face `datasets` writes images


@dataclass(frozen=True)
class Sample:
    """An image as it is packed."""

    row: int
    data: bytes
    suffix: str

    @property
    def key(self) -> str:
        return f"{self.row:09d}"


@dataclass(frozen=True)
class Reader:
    """sample(row) gives what is packed of an image."""

    source: Source
    size: int | None = None  # the shorter side; smaller images stay as they are
    quality: int | None = None

    def sample(self, row: int) -> Sample:
        """Raises `BadImage`."""
        if self.source.pixels is not None:
            image, data, suffix = self.source.image(row), b"", "png"
        else:
            data = _raw(self.source.encoded(row))
            about = header(data)
            grey = about.mode in ("1", "L", "LA", "F") or about.mode.startswith("I")
            image = decode(data, 1 if grey else 3)
            suffix = _SUFFIX.get(about.format, about.format.lower())
        if self.quality is None and (self.size is None or min(image.size) <= self.size):
            return Sample(row, data or _png(image), suffix)
        return Sample(row, _jpeg(image, self.size, self.quality or QUALITY), "jpg")


def _raw(encoded: bytes | str | Path) -> bytes:
    try:
        return encoded if isinstance(encoded, bytes) else read_bytes(encoded)
    except OSError as e:
        raise BadImage(f"cannot be read: {e.strerror}") from e


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    if not np.array_equal(np.asarray(decode(out.getvalue(), len(image.getbands()))), np.asarray(image)):
        raise DataError("PNG gives other pixels back than were written; another version of Pillow may help")
    return out.getvalue()


def _jpeg(image: Image.Image, size: int | None, quality: int) -> bytes:
    scale = min(1.0, size / min(image.size)) if size else 1.0
    width, height = (max(1, round(side * scale)) for side in image.size)
    out = io.BytesIO()
    image.resize((width, height), RESAMPLING["bicubic"]).save(out, "JPEG", quality=quality)
    return out.getvalue()


@dataclass
class Done:
    """What became of the samples of a file."""

    kept: list[int] = field(default_factory=list)  # rows of the set, in the order of the file
    sums: list[int] = field(default_factory=list)  # checksums of what was written
    bad: list[BadFile] = field(default_factory=list)

    def read(self, reader: Reader, rows: Sequence[int]) -> Iterator[Sample]:
        """The samples that can be read, one by one; the others are noted."""
        for row in rows:
            try:
                sample = reader.sample(row)
            except BadImage as e:
                self.bad.append(BadFile(reader.source.where(row), reader.source.label_name(row), e.reason))
                continue
            self.kept.append(row)
            self.sums.append(zlib.crc32(sample.data))
            yield sample


def write_shard(path: Path, reader: Reader, rows: Sequence[int], by_name: bool) -> Done:
    """A tar of `key.jpg` and `key.cls` (the number of the class) or `key.json`, as WebDataset reads it."""
    done = Done()
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for sample in done.read(reader, rows):
            _add(tar, f"{sample.key}.{sample.suffix}", sample.data)
            if label := _label_file(reader.source, sample.row, by_name):
                _add(tar, f"{sample.key}.{label[0]}", label[1])
    found = scan(str(path)) if done.kept else None
    keys = [f"{row:09d}" for row in done.kept]
    same = found is None or ([*found.keys] == keys and not found.left_out.damage)
    for number in range(len(keys) if same and found is not None else 0):
        content = read_range(str(path), int(found.offsets[number]), int(found.sizes[number])) if found else b""
        same = same and zlib.crc32(content) == done.sums[number]
    _require(same, path)
    return done


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _label_file(source: Source, row: int, by_name: bool) -> tuple[str, bytes] | None:
    """How a label is written: a number that classes.txt names, or JSON."""
    if not source.labelled:
        return None
    label = source.labels[row]
    if source.label_kind == "values":
        values = {name: float(value) for name, value in zip(source.targets, label, strict=True)}
        return "json", canonical({"target": values}).encode()
    numbers = np.flatnonzero(label).tolist() if source.multi_label else [int(label)]
    written = [source.classes[n] for n in numbers] if by_name else numbers
    if source.multi_label or by_name:
        return "json", canonical({"labels": written} if source.multi_label else {"label": written[0]}).encode()
    return "cls", str(written[0]).encode()


def write_parquet(path: Path, reader: Reader, rows: Sequence[int], by_name: bool) -> Done:
    """Columns `image` (bytes, path) and `label`, `labels` or the values, as Hugging Face `datasets` reads them."""
    arrow, done = require_pyarrow(), Done()
    schema = _schema(reader.source)
    with replacing(path) as file, arrow.parquet.ParquetWriter(file, schema) as writer:
        some: list[Sample] = []
        for sample in done.read(reader, rows):
            some.append(sample)
            if len(some) == _ROWS:
                writer.write_table(_table(reader.source, some, schema))
                some = []
        writer.write_table(_table(reader.source, some, schema))
    _require(_sums_of(path) == done.sums, path)
    return done


def _sums_of(path: Path) -> list[int]:
    file = require_pyarrow().parquet.ParquetFile(path)
    groups = (file.read_row_group(n, columns=["image"]).column(0) for n in range(file.num_row_groups))
    return [zlib.crc32(cell["bytes"].as_py()) for group in groups for cell in group]


def _schema(source: Source) -> Schema:
    arrow = require_pyarrow()
    columns = [("image", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))]
    named: dict[str, object] = {"names": list(source.classes), "_type": "ClassLabel"}
    features: dict[str, object] = {"image": {"_type": "Image"}}
    if source.label_kind == "values":
        columns += [(name, arrow.float32()) for name in source.targets]
        features |= {name: {"dtype": "float32", "_type": "Value"} for name in source.targets}
    elif source.multi_label:
        columns.append(("labels", arrow.list_(arrow.int64())))
        features["labels"] = {"feature": named, "_type": "List"}
    elif source.labelled:
        columns.append(("label", arrow.int64()))
        features["label"] = named
    return arrow.schema(columns, metadata={"huggingface": canonical({"info": {"features": features}})})


def _table(source: Source, samples: Sequence[Sample], schema: Schema) -> Table:
    arrow, rows = require_pyarrow(), [sample.row for sample in samples]
    columns: list[object] = [[{"bytes": s.data, "path": f"{s.key}.{s.suffix}"} for s in samples]]
    labels = source.labels[rows]
    if source.label_kind == "values":
        columns += [labels[:, number] for number in range(len(source.targets))]
    elif source.multi_label:
        columns.append([np.flatnonzero(several).tolist() for several in labels])
    elif source.labelled:
        columns.append(labels)
    arrays = [arrow.array(cells, kind) for cells, kind in zip(columns, schema.types, strict=True)]
    return arrow.Table.from_arrays(arrays, schema=schema)


def _require(same: bool, path: Path) -> None:
    if not same:
        path.unlink(missing_ok=True)
        raise DataError(f"{path} gives other images back than were written; check the disk and pack again")
