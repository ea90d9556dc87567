"""Reading and training from an S3 server on loopback beside local disk.

    python benchmarks/storage.py --images 400 --rounds 5

The server is moto's, in a process of its own; it shares the cores with what is measured, which a real one
does not. The set is tar shards of JPEG files. Each round opens the set anew and reads every image of it, decoded and
resized: from disk, from S3 with an empty cache, and from S3 with what the round before left in the cache. Training is
a short run with an empty cache. Rounds are interleaved; medians and the spread from the lowest to the highest are kept.
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
from pathlib import Path

import numpy as np
from PIL import Image

import vitkit
from harness import RESULTS, machine
from vitkit.data import ImageBatches, open_data
from vitkit.io import write_json
from vitkit.model.zoo import config
from vitkit.prediction.job import cut
from vitkit.storage import cache, exists, remote

SIDE = 256


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


def train(data: str, steps: int) -> int:
    with tempfile.TemporaryDirectory() as out:
        vitkit.train(
            vitkit.TrainConfig(
                data=data,
                out=f"{out}/run",
                model="vit-ti/16",
                image_size=64,
                steps=steps,
                batch_size=32,
                evaluations=1,
                workers=1,
            )
        )
    return steps * 32


def empty_cache() -> None:
    for handle in cache._held.values():
        os.close(handle)
    cache._held.clear()
    cache._known.clear()
    shutil.rmtree(cache.folder(), ignore_errors=True)


def timed(work: Callable[[], int], before: Callable[[], None]) -> float:
    before()
    start = time.perf_counter()
    return work() / (time.perf_counter() - start)


def rows(calls: dict[str, tuple[Callable[[], int], Callable[[], None]]], rounds: int) -> list[dict[str, object]]:
    """img/s of each, interleaved; the ratio of a round is to local disk in the same round."""
    speeds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (work, before) in calls.items():
            speeds[name].append(timed(work, before))
    first = next(iter(calls))
    found: list[dict[str, object]] = []
    for name, each in speeds.items():
        ratios = [a / b for a, b in zip(each, speeds[first], strict=True)]
        found.append(
            {
                "from": name,
                "images_per_second_median": round(statistics.median(each), 1),
                "images_per_second_spread": [round(min(each), 1), round(max(each), 1)],
                "ratio_to_disk_median": round(statistics.median(ratios), 3),
                "ratio_to_disk_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", type=Path, default=RESULTS / "storage.json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "set"
        folder.mkdir()
        os.environ["VITKIT_CACHE"] = f"{work}/cache"
        make_shards(folder, chosen.images)
        server = start_server()
        try:
            import boto3

            boto3.client("s3").create_bucket(Bucket="bucket")
            for shard in sorted(folder.iterdir()):
                remote.put(shard, f"s3://bucket/set/{shard.name}")
            disk, s3 = str(folder), "s3://bucket/set"
            assert exists(f"{s3}/train-0000.tar")
            reading = {
                "local disk": (lambda: read_all(disk), lambda: None),
                "S3, empty cache": (lambda: read_all(s3), empty_cache),
                "S3, cached": (lambda: read_all(s3), lambda: None),
            }
            training = {
                "local disk": (lambda: train(disk, chosen.steps), lambda: None),
                "S3, empty cache": (lambda: train(s3, chosen.steps), empty_cache),
            }
            rows(reading, 1)  # the first round imports and allocates
            size = sum(p.stat().st_size for p in folder.iterdir())
            about = {"images": chosen.images, "bytes": size, "steps": chosen.steps, "rounds": chosen.rounds}
            found: dict[str, object] = {"machine": machine(), "set": about}
            for kind, calls in (("reading", reading), ("training", training)):
                found[kind] = rows(calls, chosen.rounds)
                found["load_average"] = [round(load, 1) for load in os.getloadavg()]
                write_json(chosen.save, found)
                print(kind, found[kind], flush=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
