"""Reading, embedding and training from servers on loopback beside local disk.

    python benchmarks/storage.py                            # some minutes
    python benchmarks/storage.py --images 160 --rounds 1    # to try it

The S3 server is moto's, which is Python, and nginx serves the same shards by HTTP (where it is installed). Both share
the cores with what is measured, as a real server does not: the seconds of processor time that the server takes are
kept, and how fast whole shards arrive when nothing else is done. The set is tar shards of JPEG files, packed to disk
and to S3 by `vitkit data pack`. Each round opens the set anew:

  reading    every image decoded and resized, and no model: nothing hides the transfer
  embedding  features of every image by ViT-Ti/16 at 64 pixels
  training   two epochs of two blocks of ViT-Ti/16 at 64 pixels; the second finds everything in the cache

from disk, from a server with an empty cache, and from S3 with what the round before left in the cache. Places take
turns; medians and the spread from the lowest to the highest are kept, and ratios to local disk within a round.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
from PIL import Image

import vitkit
from harness import RESULTS, machine
from vitkit.data import ImageBatches, open_data
from vitkit.data.pack import pack
from vitkit.io import write_json
from vitkit.model.zoo import config
from vitkit.prediction.job import cut
from vitkit.storage import cache

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from remote_servers import has_nginx, nginx

SIDE, SHARD, BATCH = 256, "8MB", 32


def make_shards(folder: Path, images: int, shards: int = 2) -> None:
    rng = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as tar:
            for number in range(images // shards):
                coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                noise = rng.integers(-20, 21, (SIDE, SIDE, 3))
                pixels = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) + noise
                encoded = io.BytesIO()
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=90)
                for name, content in (("jpg", encoded.getvalue()), ("cls", f"{number % 4}".encode())):
                    info = tarfile.TarInfo(f"{number:06d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def start_server() -> subprocess.Popen[bytes]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
        time.sleep(0.1)


def read_all(data: str) -> int:
    source = open_data(data).split("all")
    batches = ImageBatches(source, config("vit-s/16")).batches(cut(range(len(source)), 32))
    return sum(len(batch.indices) for batch in batches)


def embed(data: str) -> int:
    return len(vitkit.embed(MODEL[0], data))


MODEL: list[vitkit.VisionModel] = []  # made once


def train(data: str, steps: int) -> int:
    """A small model: the faster it learns, the less it hides of what reading costs."""
    with tempfile.TemporaryDirectory() as out:
        small = {"model": "vit-ti/16", "image_size": 64, "changes": {"depth": 2}, "optimizer": "adamw"}
        how = {"batch_size": BATCH, "evaluations": 1, "workers": 1, "steps": steps}
        vitkit.train(vitkit.TrainConfig(data=data, out=f"{out}/run", **small, **how))
    return steps * BATCH


def fetch_all(data: str) -> int:
    """Bytes of shards that arrive while nothing else is done."""
    source = open_data(data).samples
    source.soon(np.arange(len(source)))
    return sum(os.path.getsize(cache.local(url)) for url in source.files)


def empty_cache() -> None:
    for handle in cache._held.values():
        os.close(handle)
    cache._held.clear()
    cache._known.clear()
    shutil.rmtree(cache.folder(), ignore_errors=True)


Call = tuple[
    Callable[[], int], Callable[[], None], psutil.Process | None
]  # the work, what is done before it, the server


def seconds_of(process: psutil.Process | None) -> float:
    return sum(process.cpu_times()[:2]) if process is not None else 0.0


def rows(calls: dict[str, Call], rounds: int, unit: str = "images_per_second") -> list[dict[str, object]]:
    """Speed of each, in turns; the ratio of a round is to local disk in the same round."""
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (work, before, server) in calls.items():
            before()
            start, own, its = time.perf_counter(), time.process_time(), seconds_of(server)
            done = work()
            took = time.perf_counter() - start
            speeds[name].append(done / took)
            seconds[name].append((took, time.process_time() - own, seconds_of(server) - its))
    first = next(iter(calls))
    found: list[dict[str, object]] = []
    for name, each in speeds.items():
        ratios = [a / b for a, b in zip(each, speeds[first], strict=True)]
        took, own, its = (round(statistics.median(column), 2) for column in zip(*seconds[name], strict=True))
        row: dict[str, object] = {"from": name, f"{unit}_median": round(statistics.median(each), 1)}
        row[f"{unit}_spread"] = [round(min(each), 1), round(max(each), 1)]
        if unit == "images_per_second":
            row["ratio_to_disk_median"] = round(statistics.median(ratios), 3)
            row["ratio_to_disk_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
        found.append({**row, "seconds": took, "seconds_of_cpu": own, "seconds_of_cpu_of_the_server": its})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--save", type=Path, default=RESULTS / "storage.json")
    chosen = parser.parse_args()
    MODEL.append(vitkit.create("vit-ti/16", image_size=64, classes=4).eval())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        work = Path(name)
        os.environ["VITKIT_CACHE"] = f"{work}/cache"
        (work / "made").mkdir()
        make_shards(work / "made", chosen.images)
        places = stage(work, stack)
        measure(places, chosen, sum(p.stat().st_size for p in (work / "set").glob("*.tar")))


def stage(work: Path, stack: ExitStack) -> dict[str, tuple[str, psutil.Process | None]]:
    """The set on disk and on servers: name -> address, server."""
    import boto3

    server = start_server()
    stack.callback(server.wait)
    stack.callback(server.terminate)
    boto3.client("s3").create_bucket(Bucket="bucket")
    for out in (str(work / "set"), "s3://bucket/set"):
        pack(str(work / "made"), out, shard_size=SHARD)
    places = {"local disk": (str(work / "set"), None), "S3": ("s3://bucket/set", psutil.Process(server.pid))}
    if has_nginx():
        before = {p.pid for p in psutil.Process().children()}
        port = stack.enter_context(nginx(work / "set", work / "nginx"))
        (other,) = [p for p in psutil.Process().children() if p.pid not in before]
        last = max(p.stem for p in (work / "set").glob("train-*.tar"))[6:]
        places["nginx"] = (f"http://127.0.0.1:{port}/train-{{{'0' * len(last)}..{last}}}.tar", other)
    return places


def measure(places: dict[str, tuple[str, psutil.Process | None]], chosen: argparse.Namespace, size: int) -> None:
    steps = 2 * (open_data(places["local disk"][0]).splits["train"] // BATCH)

    def calls(job: Callable[[str], int], cached: bool = True) -> dict[str, Call]:
        found: dict[str, Call] = {}
        for name, (data, server) in places.items():
            empty = "" if server is None else ", empty cache"
            found[f"{name}{empty}"] = (partial(job, data), empty_cache if empty else (lambda: None), server)
            if cached and name == "S3":
                found["S3, cached"] = (partial(job, data), lambda: None, server)
        return found

    kinds = {
        "reading": calls(read_all),
        "embedding": calls(embed),
        "training": calls(partial(train, steps=steps), False),
    }
    fetching = {name: call for name, call in calls(fetch_all, False).items() if call[2] is not None}
    rows(kinds["reading"], 1)  # the first round imports and allocates
    about = {"images": chosen.images, "bytes": size, "steps": steps, "rounds": chosen.rounds}
    found: dict[str, object] = {"machine": machine(), "set": about}
    found["fetching"] = rows(fetching, chosen.rounds, "bytes_per_second")
    for kind, these in kinds.items():
        found[kind] = rows(these, chosen.rounds)
        found["load_average"] = [round(load, 1) for load in os.getloadavg()]
        write_json(chosen.save, found)
        print(kind, *found[kind], sep="\n", flush=True)
    print(*found["fetching"], sep="\n")


if __name__ == "__main__":
    main()
