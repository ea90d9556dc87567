"""Planted truths: flipped labels against cleanlab, changed copies of photographs against imagehash's pHash; search
beside faiss and usearch; what an index costs when it grows.

    python benchmarks/curation.py                                        # all that needs no photographs
    python benchmarks/curation.py labels --features cifar10=RUN          # one part; see `labels`
    python benchmarks/curation.py duplicates --photos cats=FOLDER --photos clothes=FOLDER

A FOLDER holds photographs (.jpg, .JPEG) of any names. Each part is written to `results/curation.json` when it is done,
with the machine, the day, the commit and the seeds; the same command goes on after a stop, and does not measure again
what was measured at this commit on this day (`--restart` does). The map is measured by `map_frames.py`.
"""

from __future__ import annotations

import argparse
import functools
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

import vitkit
from harness import RESULTS, machine
from vitkit.curation.labels import confident_learning, cross_validated
from vitkit.data.descriptor import describe
from vitkit.io import parse_json, write_json


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
    count = min(count, len(files))
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


def duplicates(photos: Path, count: int, each: int, work: Path) -> dict[str, object]:
    """The set is planted once in `work`, and its index kept there."""
    if not (work / "truth.json").exists():
        write_json(work / "truth.json", plant(photos, work / "set", count, each))
    truth = {copy: (int(i), str(kind)) for copy, (i, kind) in parse_json((work / "truth.json").read_text()).items()}
    index = vitkit.index(work / "set", out=work / "index")
    names = [Path(p).stem for p in index.paths]
    index.looks()
    start = time.process_time()
    groups = index.duplicates()
    seconds = time.process_time() - start
    ours = {tuple(sorted((names[a], names[b]))) for g in groups for a in g.rows for b in g.rows if a != b}
    leaked = {names[row] for g in groups if g.leaks for row in g.rows if index.splits[row] == "test"}
    found = {"vitkit": scored(ours, truth, each)}
    about = {"photographs": len(names) - len(truth), "copies": len(truth), "seed": 0, "seconds of CPU": seconds}
    about |= {"copies in groups across splits": len(leaked & set(truth)) / len(truth)}
    about["wrong pairs"] = sorted(map(list, ours - {tuple(sorted((c, f"{i:05d}"))) for c, (i, _) in truth.items()}))
    for distance in (4, 8, 12):
        found[f"pHash, distance up to {distance}"] = scored(by_hash(index.paths, names, distance), truth, each)
    return {**about, "found": found}


@functools.cache
def hashes(paths: tuple[str, ...]) -> np.ndarray:
    import imagehash

    def bits(path: str) -> np.ndarray:
        with Image.open(path) as image:
            return np.asarray(imagehash.phash(image).hash).ravel()

    return np.stack([bits(path) for path in paths]).astype(np.float32) * 2 - 1


def by_hash(paths: list[str], names: list[str], distance: int) -> set[tuple[str, ...]]:
    codes = hashes(tuple(paths))
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


SETS = {"digits": (1347, 450), "cifar10": (5000, 2000)}  # images to find flipped labels in, and to test on
SEEDS = (0, 1, 2)  # of the flips


def flips(labels: np.ndarray, share: float, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a share is wrong, to any other class or to the next one, and which these are."""
    chance, wrong = np.random.default_rng(seed), labels.copy()
    flipped = chance.permutation(len(wrong))[: int(share * len(wrong))]
    step = chance.integers(1, 10, len(flipped)) if kind == "random" else 1
    wrong[flipped] = (wrong[flipped] + step) % 10
    return wrong, flipped


def labels(name: str, run: Path | None = None) -> list[dict[str, object]]:
    """Found in the training part. Heads learn from it as it was, with flips, and cleaned; a test says how well.

    run  makes the features, of images of the test split: it may have been trained on the others
    """
    trained, tested = SETS[name]
    features, truth = described(name, trained + tested, run)
    known, asked = slice(0, trained), slice(trained, None)
    clean = accuracy(features[known], truth[known], features[asked], truth[asked])
    rows: list[dict[str, object]] = []
    for share in (0.05, 0.1, 0.2):
        for kind in ("random", "class-dependent"):
            of_seeds = [one_flip(features, truth, trained, flips(truth[known], share, kind, seed)) for seed in SEEDS]
            row: dict[str, object] = {
                "train": trained,
                "test": tested,
                "flipped": share,
                "kind": kind,
                "accuracy": clean,
            }
            row["seeds"], row["same as cleanlab"] = list(SEEDS), all(one.pop("same") for one in of_seeds)
            rows.append(row | {what: [one[what] for one in of_seeds] for what in of_seeds[0]})
            lost = clean - float(np.mean(rows[-1]["with flips"]))  # type: ignore[arg-type]
            rows[-1]["recovered"] = 1 - (clean - float(np.mean(rows[-1]["cleaned"]))) / lost  # type: ignore[arg-type]
            print(rows[-1], flush=True)
    return rows


def one_flip(
    features: np.ndarray, truth: np.ndarray, trained: int, flip: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    from cleanlab.filter import find_label_issues

    (wrong, flipped), known = flip, features[:trained]
    probabilities = cross_validated(known, wrong, 10)
    ours = confident_learning(probabilities, wrong)
    peer = find_label_issues(wrong, probabilities, return_indices_ranked_by="self_confidence", n_jobs=1)
    row: dict[str, Any] = {"same": ours.tolist() == peer.tolist()}
    for engine, found in (("vitkit", ours), ("cleanlab", peer)):
        row |= {f"{engine} precision": float(np.isin(found, flipped).mean())}
        row |= {f"{engine} recall": float(np.isin(flipped, found).mean())}
    kept = np.setdiff1d(np.arange(trained), ours)
    row["with flips"] = accuracy(known, wrong, features[trained:], truth[trained:])
    row["cleaned"] = accuracy(known[kept], wrong[kept], features[trained:], truth[trained:])
    return row


def described(name: str, count: int, run: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Some images of a set as an index describes them, by a run or without a model, and their labels."""
    source = vitkit.open_data(name).split("all" if run is None else "test")
    rows = np.random.default_rng(0).permutation(len(source))[:count]
    assert source.pixels is not None
    pixels = source.pixels[torch.from_numpy(rows)]
    if run is None:
        features = torch.nn.functional.normalize(describe(pixels.expand(-1, 3, -1, -1)), dim=1)
        return features.numpy(), source.labels[rows]
    with tempfile.TemporaryDirectory() as scratch:
        np.savez(Path(scratch) / "set.npz", images=pixels.permute(0, 2, 3, 1).numpy(), labels=source.labels[rows])
        index = vitkit.index(Path(scratch) / "set.npz", run, out=Path(scratch) / "index")
        return np.array(index.features), index.labels


def accuracy(known: np.ndarray, labels: np.ndarray, asked: np.ndarray, truth: np.ndarray) -> float:
    """Of a linear head that is trained until it fits, as a head on frozen features is."""
    x, y, z = (torch.from_numpy(np.ascontiguousarray(a)) for a in (known, labels, asked))
    mean, std = x.mean(dim=0), x.std(dim=0) + 1e-4
    head = torch.nn.Linear(x.shape[1], 10)
    torch.nn.init.zeros_(head.weight)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head((x - mean) / std), y) + 1e-4 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return float((head((z - mean) / std).argmax(dim=1).numpy() == truth).mean())


ENGINES = ("vitkit", "faiss flat", "usearch exact")


def search(count: int = 1_000_000, width: int = 384, queries: int = 16) -> dict[str, object]:
    """Each engine in a process of its own; vectors of length 1 around 1,000 centres."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, chance = Path(scratch), np.random.default_rng(0)
        base = np.lib.format.open_memmap(folder / "base.npy", "w+", np.float32, (count, width))
        centres = chance.standard_normal((1000, width), dtype=np.float32)
        for low in range(0, count, 50_000):
            some = base[low : low + 50_000]
            some[:] = centres[chance.integers(0, 1000, len(some))]
            some += chance.standard_normal(some.shape, dtype=np.float32)
            some /= np.linalg.norm(some, axis=1, keepdims=True)
        np.save(folder / "queries.npy", base[:: count // queries][:queries] + 0.02)
        del base
        found = {}
        for engine in ENGINES:
            command = [sys.executable, __file__, "search-with", "--engine", engine, "--folder", scratch]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found[engine] = parse_json(done.stdout) if not done.returncode else done.stderr.strip().splitlines()[-1]
            print(engine, found[engine], flush=True)
        rows = {e: np.load(folder / f"{e}.npy") for e in ENGINES if (folder / f"{e}.npy").exists()}
        first = rows["vitkit"]
        same = {
            e: float(np.mean([np.isin(a, b).mean() for a, b in zip(first, r, strict=True)])) for e, r in rows.items()
        }
    return {
        "vectors": count,
        "width": width,
        "queries": queries,
        "seed": 0,
        "engines": found,
        "recall@10 of vitkit's": same,
    }


def search_with(engine: str, folder: Path) -> None:
    """One after the other, as somebody who searches asks; the median."""
    base, queries = np.load(folder / "base.npy"), np.load(folder / "queries.npy")
    held = memory()
    if engine == "vitkit":
        from vitkit.curation.search import nearest

        def ask(query: np.ndarray) -> np.ndarray:
            return nearest(base, query, 10, "exact")[0]

    elif engine == "faiss flat":
        import faiss

        flat = faiss.IndexFlatIP(base.shape[1])
        flat.add(base)

        def ask(query: np.ndarray) -> np.ndarray:
            return flat.search(query, 10)[1]

    else:
        from usearch.index import MetricKind
        from usearch.index import search as brute

        def ask(query: np.ndarray) -> np.ndarray:
            return brute(base, query, 10, MetricKind.IP, exact=True).keys.reshape(1, -1)

    took, rows = [], []
    for query in queries:
        start = time.perf_counter()
        rows.append(ask(query[None])[0])
        took.append(time.perf_counter() - start)
    np.save(folder / f"{engine}.npy", np.array(rows, dtype=np.int64))
    print(f'{{"milliseconds": {1000 * float(np.median(took)):.1f}, "megabytes beyond the vectors": {memory() - held}}}')


def memory() -> int:
    """Megabytes at most so far, of this process; what `getrusage` says may be its parent's."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) // 1024


def growing(model: str = "", count: int = 5000) -> dict[str, object]:
    """Photographs that nobody took, as files; then 1% more of them; then the same command with nothing new.

    model  of the zoo, which makes the features, untrained; "": the descriptor
    """
    made = vitkit.create(model).eval() if model else None
    with tempfile.TemporaryDirectory() as scratch:
        folder, chance = Path(scratch) / "set", np.random.default_rng(0)
        (folder / "a").mkdir(parents=True)

        def add(low: int, high: int) -> None:
            for i in range(low, high):
                small = Image.fromarray(chance.integers(0, 255, (12, 16, 3), dtype=np.uint8))
                small.resize((512, 384), Image.Resampling.BICUBIC).save(folder / "a" / f"{i:06d}.jpg")

        took: dict[str, float] = {}
        for what, low, high in (("all", 0, count), ("1% more", count, count + count // 100), ("nothing", 0, 0)):
            add(low, high)
            start = time.process_time()
            vitkit.index(folder, made, out=Path(scratch) / "index")
            took[what] = time.process_time() - start
    return {"images": count, "seed": 0, "seconds of CPU": took, "1% of all": took["1% more"] / took["all"]}


def many(count: int) -> dict[str, object]:
    """Memory of an index of many tiny images, in a process of its own: a small ViT, sets in shards of arrays."""
    command = [sys.executable, __file__, "many-with", "--count", str(count)]
    return dict(parse_json(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]))


def many_with(count: int) -> None:
    from vitkit.model.config import ViTConfig
    from vitkit.model.vit import ViT

    config = ViTConfig(image_size=(8, 8), patch_size=(4, 4), width=48, depth=1, heads=2, mlp_width=48, classes=0)
    with tempfile.TemporaryDirectory() as scratch:
        chance, folder = np.random.default_rng(0), Path(scratch)
        images = chance.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)
        np.savez(folder / "many.npz", images=images, labels=np.arange(count) % 10)
        del images
        before = memory()
        index = vitkit.index(folder / "many.npz", ViT(config), out=folder / "index")
        print(f'{{"images": {len(index)}, "megabytes before": {before}, "megabytes at most": {memory()}}}')


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    words.add_argument(
        "--photos", action="append", default=[], metavar="NAME=FOLDER", help="a collection; several may be given"
    )
    words.add_argument("--count", type=int, default=5000, help="of its photographs, at most")
    words.add_argument("--each", type=int, default=100, help="copies of each kind of change")
    words.add_argument("--work", type=Path, help="folder for planted sets, kept; default: one that is removed")
    words.add_argument(
        "--features", default="", metavar="cifar10=RUN", help="a run whose features labels are checked by"
    )
    words.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    words.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words.add_argument("--restart", action="store_true", help="measure again what was measured at this commit today")
    words.add_argument("--save", type=Path, default=RESULTS / "curation.json")
    given = words.parse_args()
    if given.parts in (["search-with"], ["many-with"]):  # processes of their own
        return search_with(given.engine, given.folder) if given.engine else many_with(given.count)
    if unknown := [part for part in given.parts if part not in PARTS]:
        words.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        given.work = given.work or Path(scratch)
        for part in given.parts or PARTS:
            for name, run in PARTS[part](given):
                measured(name, run, given.save, given.restart)
    return None


def measured(name: str, run: Callable[[], object], save: Path, restart: bool) -> None:
    """One part, into the file with the others."""
    about, before = machine(), parse_json(save.read_text()) if save.exists() else {}
    there = before.get(name, {}).get("measured", {})
    if not restart and all(there.get(key) == about[key] for key in ("commit", "date", "cpu")):
        return print(f"{name}: measured at this commit today", flush=True)
    found = {"measured": about, "found": run()}
    print(name, found, flush=True)
    before = parse_json(save.read_text()) if save.exists() else {}
    write_json(save, {**before, name: found})
    return None


Parts = Iterator[tuple[str, Callable[[], object]]]


def label_parts(given: argparse.Namespace) -> Parts:
    runs = dict([given.features.split("=", 1)]) if given.features else {}
    for name in SETS:
        yield f"label errors, {name}", partial(labels, name)
        if name in runs:
            yield f"label errors, {name}, features of a run", partial(labels, name, Path(runs[name]))


def duplicate_parts(given: argparse.Namespace) -> Parts:
    for collection in given.photos:
        name, folder = collection.split("=", 1)
        yield f"near duplicates, {name}", partial(duplicates, Path(folder), given.count, given.each, given.work / name)
    if not given.photos:
        print("near duplicates are not measured: name photographs with --photos NAME=FOLDER", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace], Parts]] = {
    "labels": label_parts,
    "duplicates": duplicate_parts,
    "search": lambda given: iter([("search", search)]),
    "index": lambda given: iter(
        [
            ("index that grows", growing),
            ("index that grows, ViT-Ti/16", partial(growing, "vit-ti/16", 2000)),
            ("index, memory", lambda: [many(n) for n in (50_000, 200_000)]),
        ]
    ),
}


if __name__ == "__main__":
    main()
