"""One argument, DATA, names any set of pictures."""

from __future__ import annotations

import os
from pathlib import Path

from vitkit.data.named import NAMES, open_named
from vitkit.data.progress import Track, quiet
from vitkit.data.source import Source
from vitkit.errors import DataError, did_you_mean

_MANIFESTS = (".csv", ".tsv", ".jsonl")


def open_data(data: str | os.PathLike[str], split: str = "train", track: Track = quiet) -> Source:
    """Open one split of a set.

    data   a name (digits, mnist, fashion-mnist, cifar10), a folder of classes (alone or inside train/, val/,
           test/), a manifest (.csv .tsv .jsonl .parquet), .npz arrays, Parquet with pictures inside, or
           WebDataset shards (shards/train-{0000..0099}.tar, or their folder)
    split  train, val or test; several joined with "+"; or all
    track  wraps loops that take long, for a progress bar: see `vitkit.data.progress.bar`
    """
    text = os.fspath(data)
    if text in NAMES:
        return open_named(text, split)
    source = _open_path(text, split, track)
    if not len(source):
        raise DataError(f"the split {split!r} of {text} is empty; it has {_sizes(source)}. Choose another split")
    return source


def _open_path(text: str, split: str, track: Track) -> Source:
    from vitkit.data import arrays, folder, manifest, parquet, shards

    path = Path(text).expanduser()
    suffix = path.suffix.lower()
    if suffix != ".tar" and not path.exists():
        hint = did_you_mean(text, NAMES)
        raise DataError(
            f"there is no file or folder {text!r}, and no set of that name.{hint} "
            f"Give a path that exists, or one of: {', '.join(NAMES)}"
        )
    if shards.is_shards(str(path)):
        return shards.open_shards(str(path), split, track)
    if path.is_dir():
        is_parquet = next(path.rglob("*.parquet"), None) is not None
        return parquet.open_parquet(path, split) if is_parquet else folder.open_folder(path, split, track)
    if suffix == ".npz":
        return arrays.open_npz(path, split)
    if suffix == ".parquet" and parquet.holds_pictures(path):
        return parquet.open_parquet(path, split)
    if suffix in (*_MANIFESTS, ".parquet"):
        return manifest.open_manifest(path, split, track)
    raise DataError(
        f"{text} is not a set of pictures: vitkit reads folders, {', '.join(_MANIFESTS)}, .parquet, .npz and .tar files"
    )


def _sizes(source: Source) -> str:
    return ", ".join(f"{s} {n}" for s, n in source.splits.items())
