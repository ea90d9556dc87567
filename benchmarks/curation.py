"""Planted truths: flipped labels of digits against cleanlab, changed copies of photographs against imagehash's pHash.

    python benchmarks/curation.py --photos FOLDER --count 5000 --each 100

FOLDER holds photographs (.jpg, .JPEG) of any names; without it only labels are measured. Nothing here depends on time.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

import vitkit
from vitkit.curation.labels import confident_learning, cross_validated
from vitkit.io import write_json


def crop(image: Image.Image, chance: random.Random) -> Image.Image:
    """80 to 95% of each side, anywhere."""
    share = chance.uniform(0.80, 0.95)
    width, height = round(image.width * share), round(image.height * share)
    left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


def resize(image: Image.Image, chance: random.Random) -> Image.Image:
    factor = chance.uniform(0.3, 1.5)
    return image.resize((max(32, round(image.width * factor)), max(32, round(image.height * factor))))


def brighten(image: Image.Image, chance: random.Random) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(chance.choice([chance.uniform(0.6, 0.85), chance.uniform(1.15, 1.5)]))


def turn(image: Image.Image, chance: random.Random) -> Image.Image:
    return image.rotate(chance.choice([-1, 1]) * chance.uniform(2, 8), Image.Resampling.BICUBIC)


CHANGES = {
    "crop 80-95%": crop,
    "JPEG 30-95": lambda image, chance: image,
    "resize": resize,
    "flip": lambda image, chance: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "brightness": brighten,
    "rotation 2-8 degrees": turn,
}


def plant(photos: Path, folder: Path, count: int, each: int) -> dict[str, tuple[int, str]]:
    """Originals as train, changed copies as test; the copy's name -> number of its original, and what was changed."""
    chance = random.Random(0)
    files = sorted(p for p in photos.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    files = [files[i] for i in sorted(chance.sample(range(len(files)), count))]
    for split in ("train", "test"):
        (folder / split / "x").mkdir(parents=True)
    for i, file in enumerate(files):
        (folder / "train" / "x" / f"{i:05d}.jpg").symlink_to(file.resolve())
    chosen, truth = chance.sample(range(count), each * len(CHANGES)), {}
    for n, i in enumerate(chosen):
        kind = list(CHANGES)[n // each]
        with Image.open(files[i]) as image:
            changed = CHANGES[kind](image.convert("RGB"), chance)
        quality = chance.randint(30, 95) if kind.startswith("JPEG") else 90
        changed.save(folder / "test" / "x" / f"copy-{n:05d}.jpg", quality=quality)
        truth[f"copy-{n:05d}"] = i, kind
    return truth


def duplicates(photos: Path, count: int, each: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        truth = plant(photos, Path(scratch) / "set", count, each)
        index = vitkit.index(Path(scratch) / "set", out=Path(scratch) / "index")
        names = [Path(p).stem for p in index.paths]
        groups = index.duplicates()
        ours = {tuple(sorted((names[a], names[b]))) for g in groups for a in g.rows for b in g.rows if a != b}
        leaks = sum(g.leaks for g in groups)
        found = {"vitkit": scored(ours, truth, each)}
        for distance in (4, 8, 12):
            found[f"pHash, distance up to {distance}"] = scored(by_hash(index.paths, names, distance), truth, each)
    return {"photographs": count, "copies": len(truth), "groups across splits": leaks, "found": found}


def by_hash(paths: list[str], names: list[str], distance: int) -> set[tuple[str, ...]]:
    import imagehash

    def bits(path: str) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(imagehash.phash(image).hash).ravel()

    codes = np.stack([bits(path) for path in paths]).astype(np.float32) * 2 - 1
    apart = (codes.shape[1] - codes @ codes.T) / 2
    rows, others = np.nonzero(np.triu(apart <= distance, k=1))
    return {tuple(sorted((names[a], names[b]))) for a, b in zip(rows.tolist(), others.tolist(), strict=True)}


def scored(pairs: set[tuple[str, ...]], truth: dict[str, tuple[int, str]], each: int) -> dict[str, object]:
    wanted = {tuple(sorted((copy, f"{i:05d}"))): kind for copy, (i, kind) in truth.items()}
    right = Counter(wanted[pair] for pair in pairs if pair in wanted)
    wrong = sorted(pair for pair in pairs if pair not in wanted)
    share = sum(right.values()) / len(wanted)
    by_kind = {kind: right[kind] / each for kind in CHANGES}
    precision = sum(right.values()) / max(1, len(pairs))
    return {"recall": share, "precision": precision, "wrong pairs": len(wrong), "recall by change": by_kind}


def labels() -> list[dict[str, object]]:
    from cleanlab.filter import find_label_issues

    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        index = vitkit.index("digits", out=Path(scratch) / "index")
        for share in (0.05, 0.1, 0.2):
            for kind in ("random", "class-dependent"):
                chance, wrong = np.random.default_rng(0), index.labels.copy()
                flipped = chance.permutation(len(wrong))[: int(share * len(wrong))]
                step = chance.integers(1, 10, len(flipped)) if kind == "random" else 1
                wrong[flipped] = (wrong[flipped] + step) % 10
                probabilities = cross_validated(index.features, wrong, 10)
                ours = confident_learning(probabilities, wrong)
                peer = find_label_issues(wrong, probabilities, return_indices_ranked_by="self_confidence", n_jobs=1)
                row: dict[str, object] = {
                    "data": "digits",
                    "flipped": share,
                    "kind": kind,
                    "same": ours.tolist() == peer.tolist(),
                }
                for name, found in (("vitkit", ours), ("cleanlab", peer)):
                    row |= {f"{name} precision": float(np.isin(found, flipped).mean())}
                    row |= {f"{name} recall": float(np.isin(flipped, found).mean())}
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--photos", type=Path)
    words.add_argument("--count", type=int, default=5000)
    words.add_argument("--each", type=int, default=100, help="copies of each kind of change")
    words.add_argument("--save", type=Path, default=Path(__file__).parent / "results" / "curation.json")
    given = words.parse_args()
    found: dict[str, object] = {"label errors": labels()}
    write_json(given.save, found)
    if given.photos is not None:
        found["near duplicates"] = duplicates(given.photos, given.count, given.each)
        print(found["near duplicates"], flush=True)
        write_json(given.save, found)


if __name__ == "__main__":
    main()
