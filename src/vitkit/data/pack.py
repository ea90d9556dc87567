"""`vitkit data pack`: any set -> shards or Parquet, in parallel, resumable, verified.

The plan says which samples go into which file; it follows from the set and the options alone. A file is written all or
nothing and noted when it has been read back; after a kill the same command writes the files that are missing. In the
end the pack is opened like any set and compared with the original. For a URL it is made on this machine, then uploaded.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitkit.data.badfiles import BadFile, BadFiles
from vitkit.data.dataset import Dataset, first_word
from vitkit.data.decode import BadImage
from vitkit.data.identity import identity
from vitkit.data.keys import permutation
from vitkit.data.loader import in_order
from vitkit.data.packing import Done, Reader, write_parquet, write_shard
from vitkit.data.source import Source
from vitkit.data.sources import open_data
from vitkit.data.sources.shardtable import INDEX, make_index, restamp
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.io import canonical, parse_bytes, parse_json, remove_folder, remove_leftovers, write_json, write_text
from vitkit.locks import only_one
from vitkit.progress import SILENT, Progress
from vitkit.storage import is_url, join, remote, workplace

PLAN, NOTES = "pack.json", ".pack"
_TRIED = 32  # images whose lengths tell how many shards there will be
_EVEN = 8  # more shards than this are a multiple of it: ranks get equal numbers
Write = Callable[[Path, Reader, Sequence[int], bool], Done]
WRITERS: dict[str, tuple[Write, str]] = {
    "shards": (write_shard, "{split}-{number:05d}.tar"),
    "parquet": (write_parquet, "{split}-{number:05d}-of-{count:05d}.parquet"),
}


@dataclass(frozen=True)
class Packed:
    """What was packed: images in every split, the files, bytes, and how many images could not be read."""

    out: str
    splits: dict[str, int]
    files: int
    bytes: int
    bad: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def pack(
    data: str | os.PathLike[str] | Dataset,
    out: str | os.PathLike[str],
    to: str = "shards",
    *,
    size: int | None = None,
    quality: int | None = None,
    shard_size: str | int = "1GB",
    workers: int = 0,
    max_bad: str | float = "5%",
    progress: Progress = SILENT,
) -> Packed:
    """Write any set as tar shards with their index, or as Parquet; the same call continues after a kill.

    data        as for `open_data`, or what it returned
    out         a folder that is new, empty, or holds an unfinished pack of the same set; or such a URL
    size        the shorter side in pixels; larger images become JPEG of this size
    quality     of JPEG; every image is encoded again. Without `size` and `quality` all bytes stay as they are
    shard_size  about how large a file becomes
    workers     processes; 0 does all in this one
    max_bad     how many images may be unreadable; they are listed in bad-files.csv and left out
    """
    dataset = data if isinstance(data, Dataset) else open_data(data, progress)
    work = _Work(dataset, os.fspath(out), _checked(dataset, to, size, quality), to, parse_bytes(shard_size))
    with only_one(work.out / f"{NOTES}.lock", f"the pack in {out}", "choose another folder"):
        if not is_url(out):
            return work.run(workers, max_bad, progress)
        there = remote.find(work.name)
        if (packed := work.claim(set(there), lambda: remote.read(join(work.name, PLAN)))) is None:
            packed = work.run(workers, max_bad, progress)
            work.publish(there, progress)
            remove_folder(work.out, of=work.out)
        return packed


def _checked(dataset: Dataset, to: str, size: int | None, quality: int | None) -> Reader:
    if to not in WRITERS:
        raise ConfigError(f"--to {to} is not known; choose {' or '.join(WRITERS)}")
    if (size is not None and size < 1) or (quality is not None and not 1 <= quality <= 100):
        raise ConfigError(f"size={size} must be at least 1, and quality={quality} from 1 to 100")
    if dataset.samples.pixels is not None and dataset.channels not in (1, 3):
        raise DataError(f"{dataset.name} has {dataset.channels} channels, and an image file 1 or 3; keep it as .npz")
    for split in dataset.splits:
        if first_word(Path(f"{split}-0.tar")) != split or Path(split).name != split:
            raise DataError(f"the split {split!r} cannot begin the name of a file; give it a name of letters")
    blank = next((name for name in dataset.classes if name and name.strip() != name), None)
    if blank is not None and to == "shards":
        raise DataError(f"the class {blank!r} begins or ends with a blank, which shards do not keep; rename it")
    if "image" in dataset.targets:
        raise DataError("a value is called 'image', as the column of images; give it another name")
    return Reader(dataset.samples, size, quality)


@dataclass(frozen=True)
class _Piece:
    """A file of the pack, and the rows of the set that go into it."""

    split: str
    name: str
    rows: np.ndarray


class _Work:
    """`out` is the folder in which the pack is made; `name` what the user calls it, which may be a URL."""

    def __init__(self, dataset: Dataset, name: str, reader: Reader, to: str, limit: int) -> None:
        self.dataset, self.name, self.out, self.reader, self.to = dataset, name, workplace(name), reader, to
        self.pieces, self.by_name = list(_pieces(dataset, reader, to, limit)), not _fit_lines(dataset.classes)
        about = {"data": identity(dataset), "to": to, "size": reader.size, "quality": reader.quality, "limit": limit}
        self.fingerprint = hashlib.blake2b(canonical(about).encode(), digest_size=16).hexdigest()

    def run(self, workers: int, max_bad: str | float, progress: Progress) -> Packed:
        remove_leftovers(self.out, inside=True)
        there = {p.name for p in self.out.iterdir()} - {f"{NOTES}.lock"}
        if (finished := self.claim(there, (self.out / PLAN).read_bytes)) is not None:
            remove_folder(self.out / NOTES, of=self.out / PLAN)
            return finished
        write_json(self.out / PLAN, {"fingerprint": self.fingerprint, "finished": False})
        files = [self.out / piece.name for piece in self.pieces]
        bad = BadFiles(self.out / "bad-files.csv", total=len(self.dataset.samples), max_bad=max_bad)
        job = partial(_write_piece, self.pieces, self.out, self.reader, self.to, self.by_name)
        kept: list[list[int]] = []
        for done in in_order(job, len(self.pieces), min(workers, len(self.pieces)), "packing", progress):
            if isinstance(done, VitkitError):
                raise done
            bad.record(*done.bad)
            kept.append(done.kept)
        if self.to == "shards":
            if self.dataset.classes and self.dataset.samples.labelled and not self.by_name:
                write_text(self.out / "classes.txt", "".join(f"{name}\n" for name in self.dataset.classes))
            make_index(self.out / INDEX, [str(file) for file in files], progress)
        notes = self._verify(kept, progress)
        own = [(piece.split, len(rows)) for piece, rows in zip(self.pieces, kept, strict=True)]
        splits = {split: sum(n for s, n in own if s == split) for split in self.dataset.splits}
        size = sum(file.stat().st_size for file in files)
        packed = Packed(self.name, splits, len(files), size, len(bad), tuple(notes))
        write_json(self.out / PLAN, {"fingerprint": self.fingerprint, "finished": True, **packed.to_dict()})
        remove_folder(self.out / NOTES, of=self.out / PLAN)
        return packed

    def claim(self, there: set[str], plan: Callable[[], bytes]) -> Packed | None:
        """The folder is ours or empty; what was packed, where that is finished."""
        try:
            before = parse_json(plan()) if there else {"fingerprint": self.fingerprint}
            if before.pop("fingerprint") != self.fingerprint:
                raise ValueError("of another set")
            if before.pop("finished", False) and {piece.name for piece in self.pieces} <= there:
                return Packed(**{**before, "out": self.name, "notes": tuple(before["notes"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            what = "holds something else, or a pack of another set or with other options"
            raise DataError(f"{self.name} {what}; choose an empty folder") from None
        return None

    def publish(self, there: Container[str], progress: Progress) -> None:
        """Every file at its URL, verified; then the index, which knows the shards as they are there; the plan last."""
        url = self.name
        remote.put_bytes(canonical({"fingerprint": self.fingerprint, "finished": False}).encode(), join(url, PLAN))
        files = [p for p in sorted(self.out.iterdir()) if not p.name.startswith(".") and p.name not in (PLAN, INDEX)]
        for path in progress.track(files, "uploading"):
            target = join(url, path.name)
            if path.name not in there or not remote.is_copy(path, target):
                remote.put(path, target)
        if self.to == "shards":
            restamp(self.out / INDEX, url)
            remote.put(self.out / INDEX, join(url, INDEX))
        remote.put(self.out / PLAN, join(url, PLAN))

    def _verify(self, kept: list[list[int]], progress: Progress) -> list[str]:
        """Open the pack as a user would, and compare splits, names of classes and every label."""
        original = self.dataset.samples
        packed = open_data(self.out, progress, target=original.targets, labelled=original.labelled)
        rows = np.array([row for piece in kept for row in piece], dtype=np.int64)
        wanted = [s for piece, own in zip(self.pieces, kept, strict=True) for s in [piece.split] * len(own)]
        order, found = np.empty(len(rows), dtype=object), packed.samples
        for split, own in packed.rows.items():
            order[own] = split
        same = len(found) == len(rows) and order.tolist() == wanted
        if not same or not np.array_equal(_in_words_of(found, original), original.labels[rows]):
            raise DataError(f"{self.out} does not give back what {self.dataset.name} holds; pack it again elsewhere")
        unused = [name for name in original.classes if name not in set(found.classes)] if original.labelled else []
        return [f"classes without an image are left out: {', '.join(unused)}"] if unused else []


def _in_words_of(found: Source, original: Source) -> np.ndarray:
    """The labels of one source in the numbers of another's classes."""
    if original.label_kind == "values" or not original.labelled:
        return found.labels
    number = {name: n for n, name in enumerate(original.classes)}
    if len(number) < len(original.classes) or not set(found.classes) <= set(number):
        return found.labels if found.classes == original.classes else np.empty(0)
    places = np.array([number[name] for name in found.classes], dtype=np.int64)
    if not original.multi_label:
        renumbered: np.ndarray = places[found.labels]
        return renumbered
    wide = np.zeros((len(found), len(original.classes)), dtype=np.uint8)
    wide[:, places] = found.labels
    return wide


def _pieces(dataset: Dataset, reader: Reader, to: str, limit: int) -> list[_Piece]:
    """Shuffled samples of each split in files of equal numbers."""
    _, name = WRITERS[to]
    found, mean = [], _mean_length(reader)
    for split, rows in dataset.rows.items():
        count = max(1, min(len(rows), math.ceil(len(rows) * mean / limit)))
        count = min(len(rows), -(-count // _EVEN) * _EVEN) if count > _EVEN else count
        mixed = rows[permutation(0, 0, len(rows), f"pack {split}")]
        parts = np.array_split(mixed, count) if len(rows) else []
        found += [_Piece(split, name.format(split=split, number=n, count=count), p) for n, p in enumerate(parts)]
    return sorted(found, key=lambda piece: piece.name)  # as they are read


def _mean_length(reader: Reader) -> float:
    """Of an image as it will be packed."""
    lengths, count = [], len(reader.source)
    for row in range(0, count, max(1, count // _TRIED)):
        try:
            lengths.append(len(reader.sample(row).data))
        except BadImage:
            continue  # it will be met again, and listed
    return float(np.mean(lengths)) + 1536 if lengths else 1.0  # and two headers, and a label


def _write_piece(
    pieces: Sequence[_Piece], out: Path, reader: Reader, to: str, by_name: bool, number: int
) -> Done | VitkitError:
    """Write a file, unless that was done before a kill. Errors travel as values, whole and without a traceback."""
    piece = pieces[number]
    path, notes = out / piece.name, out / NOTES / f"{piece.name}.json"
    try:
        if (done := _noted(path, notes)) is None:
            done = WRITERS[to][0](path, reader, piece.rows.tolist(), by_name)
            bad = [[b.path, b.label, b.reason] for b in done.bad]
            write_json(notes, {"kept": done.kept, "bad": bad, "size": path.stat().st_size}, indent=None)
    except VitkitError as e:
        return e
    return done


def _noted(path: Path, notes: Path) -> Done | None:
    """What became of a file that is finished."""
    try:
        found = parse_json(notes.read_text())
        if path.stat().st_size == found["size"]:
            return Done(kept=found["kept"], bad=[BadFile(*b) for b in found["bad"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _fit_lines(names: Sequence[str]) -> bool:
    """Whether each name comes back from a line of classes.txt."""
    text = "".join(f"{name}\n" for name in names).encode(errors="backslashreplace").decode()
    return [line.strip() for line in text.splitlines()] == list(names) and len(set(names)) == len(names)
