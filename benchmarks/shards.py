"""A million tiny images in 200 shards: memory for each sample, time to open, who reads which shard, and how fast.

Every figure about memory or opening comes from a process of its own. Memory for each sample is what a process that has
opened the set and its training split holds more than one that has opened a single shard of it. An epoch is read
by 1, 2 and 4 real processes (the bytes of every sample, nothing decoded), which count the shards that they open.
The new order of an epoch and the old one (four shards at a time, every rank through all) are read in turn, with the
files in the page cache and without.

    python benchmarks/shards.py            # some minutes, 2 GB of disk
    python benchmarks/shards.py --quick    # 20,000 images
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from harness import arguments, machine, megabytes_in_use, save

SHARDS, EACH, BATCH, READ = 200, 5_000, 256, 10_000
TIMES = 3
LIMITS = {"bytes for each sample": 40, "seconds to open": 0.3}


def write_shards(folder: Path, each: int) -> None:
    """Copies of one image; only the names and labels differ, and are put in place for a whole shard at once."""
    out = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(out, "PNG")
    members = []
    for suffix, data in (("png", out.getvalue()), ("cls", b"0")):
        info = tarfile.TarInfo(f"000000000.{suffix}")
        info.size = len(data)
        members.append(info.tobuf(tarfile.USTAR_FORMAT) + data.ljust(512, b"\0"))
    sums = [int(member[148:154], 8) for member in members]
    starts = (0, len(members[0]))
    template = np.frombuffer(b"".join(members), np.uint8)
    for shard in range(SHARDS):
        blocks, numbers = np.tile(template, (each, 1)), np.arange(shard * each, (shard + 1) * each)
        digits = (numbers[:, None] // 10 ** np.arange(8, -1, -1)) % 10
        for start, total in zip(starts, sums, strict=True):
            blocks[:, start : start + 9] += digits.astype(np.uint8)
            octal = ((total + digits.sum(axis=1))[:, None] // 8 ** np.arange(5, -1, -1)) % 8
            blocks[:, start + 148 : start + 154] = octal + ord("0")
        blocks[:, starts[1] + 512] = ord("0") + numbers % 10
        (folder / f"train-{shard:05d}.tar").write_bytes(blocks.tobytes() + bytes(1024))
    (folder / "val-00000.tar").write_bytes((folder / "train-00000.tar").read_bytes())


# --- in processes of their own -----------------------------------------------------------------------


def opening(data: str) -> dict[str, float]:
    from vitkit.data import open_data

    before, start, busy = megabytes_in_use(), time.perf_counter(), time.process_time()
    dataset = open_data(data)
    source = dataset.split("train")
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return {"seconds": seconds, "cpu": busy, "megabytes": megabytes_in_use() - before, "samples": len(source)}


def epoch(data: str, rank: int, world: int) -> dict[str, object]:
    """Read one rank's part of an epoch."""
    from vitkit.data import open_data
    from vitkit.data.order import epoch_order
    from vitkit.data.sources import shards

    before = megabytes_in_use()
    source = open_data(data).split("train")
    opened: dict[str, int] = {}
    read = shards.read_range

    def counted(path: str, start: int, size: int) -> bytes:
        opened[path] = opened.get(path, 0) + 1
        return read(path, start, size)

    shards.read_range = counted
    order, start, length = epoch_order(source, 0, 0, shuffle=True), time.perf_counter(), 0
    for step in range(len(source) // BATCH):
        for index in order.part(step, BATCH, rank, world).indices.tolist():
            length += len(source.encoded(index))
    samples = sum(opened.values())
    seconds = time.perf_counter() - start
    return {
        "megabytes": megabytes_in_use() - before,
        "samples": samples,
        "seconds": seconds,
        "shards": sorted(Path(path).name for path in opened),
    }


def orders(data: str, count: int) -> dict[str, dict[str, float]]:
    """Samples per second in the new order and in the old one, chunk by chunk in turn."""
    from vitkit.data import open_data
    from vitkit.data.order import _by_blocks, epoch_order

    source = open_data(data).split("train")
    found = {}
    for cache in ("warm", "cold"):
        rates: dict[str, list[float]] = {"new": [], "old": []}
        for turn in range(6):
            chosen = {"new": epoch_order(source, 0, turn, shuffle=True), "old": _by_blocks(source.shards(), 0, turn)}
            for name in ("new", "old") if turn % 2 else ("old", "new"):
                steps = range(min(count, len(source)) // BATCH)
                wanted = [chosen[name].part(step, BATCH, 0, 1).indices.tolist() for step in steps]
                if cache == "cold":
                    forget(Path(data))
                else:
                    for batch in wanted:
                        for index in batch:
                            source.encoded(index)
                start = time.perf_counter()
                for batch in wanted:
                    for index in batch:
                        source.encoded(index)
                rates[name].append(len(wanted) * BATCH / (time.perf_counter() - start))
        found[cache] = {name: statistics.median(values) for name, values in rates.items()}
        found[cache]["new / old"] = statistics.median(
            new / old for new, old in zip(rates["new"], rates["old"], strict=True)
        )
    return found


def forget(folder: Path) -> None:
    """Drop the shards out of the page cache."""
    for path in folder.glob("*.tar"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ask(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--child", *map(str, words)], stdout=subprocess.PIPE)


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    found = process.communicate()[0]
    if process.returncode:
        raise SystemExit("a process of the benchmark failed")
    return dict(json.loads(found))


def child(words: list[str]) -> None:
    jobs = {"opening": opening, "epoch": epoch, "orders": orders}
    print(json.dumps(jobs[words[0]](words[1], *map(int, words[2:]))))


# --- the whole ---------------------------------------------------------------------------------------


def open_it(folder: Path) -> dict[str, object]:
    """The first opening makes the index."""
    first = answer(ask("opening", folder))
    one = folder / "alone"
    one.mkdir(exist_ok=True)
    for split in ("train", "val"):
        (one / f"{split}-00000.tar").write_bytes((folder / f"{split}-00000.tar").read_bytes())
    answer(ask("opening", one))
    small = [answer(ask("opening", one)) for _ in range(TIMES)]
    whole = [answer(ask("opening", folder)) for _ in range(TIMES)]
    samples = int(whole[0]["samples"])
    more = [w["megabytes"] - s["megabytes"] for w, s in zip(whole, small, strict=True)]
    return {
        "what": "opening",
        "samples": samples,
        "shards": SHARDS,
        "bytes for each sample": round(statistics.median(more) * 2**20 / samples, 1),
        "seconds to open": round(statistics.median(w["seconds"] for w in whole), 3),
        "seconds of CPU to open": round(statistics.median(w["cpu"] for w in whole), 3),
        "seconds to make the index": round(first["seconds"], 1),
        "index megabytes": round((folder / "shards.index").stat().st_size / 1e6, 1),
    }


def read_it(folder: Path, world: int) -> dict[str, object]:
    """An epoch on so many ranks, each a process."""
    ranks = [answer(p) for p in [ask("epoch", folder, rank, world) for rank in range(world)]]
    readers = Counter(shard for rank in ranks for shard in rank["shards"])
    return {
        "what": f"an epoch, ranks: {world}",
        "megabytes of each process": [round(rank["megabytes"], 1) for rank in ranks],
        "samples": sum(rank["samples"] for rank in ranks),
        "shards opened": len(readers),
        "shards opened by more than one rank": sum(count > 1 for count in readers.values()),
        "samples per second": round(sum(rank["samples"] / rank["seconds"] for rank in ranks)),
    }


def compare(folder: Path) -> list[dict[str, object]]:
    found = answer(ask("orders", folder, READ))
    return [{"what": f"reading, page cache {cache}, samples per second", **rates} for cache, rates in found.items()]


def measure(folder: Path, each: int) -> list[dict[str, object]]:
    write_shards(folder, each)
    return [open_it(folder), *(read_it(folder, world) for world in (1, 2, 4)), *compare(folder)]


def main() -> None:
    options = arguments(__doc__ or "", (), ()).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), 100 if options.quick else EACH)
    for row in rows:
        print(row)
    save("shards", options.save, {**machine(), "limits": LIMITS}, rows, options.quick)


if __name__ == "__main__":
    child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
