"""What a set consists of: a digest with a plain definition, however many samples are looked at together."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from making import encode, photo

from vitkit.data import identity as module
from vitkit.data import open_data
from vitkit.data.dataset import Dataset
from vitkit.data.identity import digest, identity
from vitkit.data.sources.shardtable import ShardTable
from vitkit.storage import stamp

CLASSES = 5


def shards(folder: Path) -> None:
    """Keys of different lengths; every class in every shard; no split but by content."""
    for shard in range(4):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            for i in range(17):
                key, label = f"{'k' * (i % 4)}é{i}", f"{(i * 7 + shard) % CLASSES}".encode()
                for suffix, data in (("png", encode(photo(shard * 50 + i, (4, 4)), "PNG")), ("cls", label)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def folders(folder: Path) -> None:
    for i in range(12):
        path = folder / "train" / f"class {i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(i, (4, 4)), "PNG"))


def arrays(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (150, 4, 4, 3), dtype=np.uint8)
    np.savez(folder / "set.npz", images=pixels, labels=np.arange(150) % 3)


def as_defined(data: Dataset, rows: np.ndarray) -> str:
    """Sample after sample: name, zero, label, and its pixels, or its file where it has one of its own."""
    found, source = hashlib.blake2b(digest_size=8), data.samples
    for row in rows.tolist():
        found.update(os.fsencode(source.where(row)) + b"\0" + source.labels[row].tobytes())
        if source.pixels is not None:
            found.update(source.pixels[row].numpy().tobytes())
        elif os.path.exists(source.names[row]):
            found.update(stamp(source.names[row]).encode())
    return found.hexdigest()


@pytest.mark.parametrize("make", [shards, folders, arrays])
@pytest.mark.parametrize("at_once", [None, 7])
def test_the_digest_is_that_of_its_definition(
    make: Callable[[Path], None], at_once: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    if at_once:
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        monkeypatch.setattr(module, "_WITH_PIXELS", at_once)
    data = open_data(tmp_path / "set.npz" if make is arrays else tmp_path)
    found, expected = identity(data), {}
    for split, rows in data.rows.items():
        labels = data.samples.labels[rows]
        for label in np.unique(labels).tolist():
            own = rows[labels == label]
            expected[f"{split}: {data.classes[label]}"] = f"{len(own):,} images {as_defined(data, own)}"
    assert len(expected) >= 3
    assert {key: value for key, value in found.items() if key in expected} == expected
    assert len(found) == len(expected) + 1 + (4 if make is shards else 0)  # the classes, and the shards
    assert digest(data.samples) == as_defined(data, np.arange(len(data.samples)))


def test_the_keys_of_a_shard_are_read_once_for_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each class: of a thousand classes and 200 shards that would be 200,000 times."""
    shards(tmp_path)
    data, asked, names = open_data(tmp_path), [], ShardTable.names

    def counted(self: ShardTable, shard: int, rows: np.ndarray) -> list[bytes]:
        asked.append(shard)
        return names(self, shard, rows)

    monkeypatch.setattr(ShardTable, "names", counted)
    assert len(data.splits) == 3
    assert len(data.classes) == CLASSES
    identity(data)
    assert len(asked) <= 3 * 4
