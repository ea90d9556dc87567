"""A run on several nodes, agents of torchrun on loopback or in network namespaces, and what it has learned from."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from vitkit.training import attempts
from vitkit.training.log import read

WORKER = Path(__file__).parent / "elastic_worker.py"
IMAGES, BATCH, STEPS = 120, 12, 60  # 10 steps an epoch; 1, 2, 3 and 4 ranks share a batch evenly
LIMIT = 240.0  # seconds for any state to be reached; seen: under 30 on an idle machine


class Cluster:
    """Nodes that train one run together."""

    def __init__(self, folder: Path, data: str, endpoint: str = "", read_timeout: int = 10) -> None:
        self.out, self.samples, self.data = folder / "run", folder / "samples", data
        self.samples.mkdir()
        self.read_timeout = read_timeout
        self.pace(0.2)
        self.nodes: list[subprocess.Popen] = []
        self.store = None if endpoint else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.endpoint = endpoint or f"127.0.0.1:{self.store.port}"
        self.errors = (folder / "errors.txt").open("w+")

    def add(self, processes: int, *more: str, prefix: tuple[str, ...] = (), at: str = "127.0.0.1", **env: str):
        patience = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=4,is_host=0"
        patience += f",read_timeout={self.read_timeout}"
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", f"--nproc-per-node={processes}"]
        words += ["--max-restarts=9", "--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint={self.endpoint}"]
        words += [f"--rdzv-conf={patience}", f"--local-addr={at}", "--monitor-interval=0.2", str(WORKER)]
        words += ["train", self.data, "--out", str(self.out), "--model", "vit-8px/2", "--steps", str(STEPS)]
        words += ["--batch-size", str(BATCH), "--lr", "0.003", "--augment", "light", "--set", "optimizer=adamw"]
        words += ["--set", "log_every=1", "--set", "evaluations=2", "--set", "model.depth=2"]
        words += ["--set", "save_every=0.01", *more]
        settings = {"SAMPLES": str(self.samples), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        settings |= env
        node = subprocess.Popen(
            [*prefix, *words],
            env={**os.environ, **settings},
            stderr=self.errors,
            stdout=self.errors,
            start_new_session=True,
        )
        self.nodes.append(node)
        return node

    def pace(self, seconds: float) -> None:
        """Of every step from now on."""
        (self.samples / "new").write_text(f"{seconds}")
        (self.samples / "new").replace(self.samples / "pace")

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not holds():
            assert time.monotonic() < deadline, f"after {LIMIT:g} s not yet: {what}\n{self.text()[-4000:]}"
            assert any(n.poll() is None for n in self.nodes), f"ended before: {what}\n{self.text()[-4000:]}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(
            f"step {step}", lambda: max((line["step"] for line in read(self.out / "log.jsonl")), default=0) >= step
        )

    def until_world(self, processes: int, starts: int) -> None:
        """Until there are so many processes in the attempt of that number."""

        def holds() -> bool:
            lines = [line for line in attempts.read(self.out) if "step" in line]
            return len(lines) >= starts and lines[-1]["processes"] == processes

        self.until(f"{processes} processes", holds)
        last = attempts.read(self.out)[-1]["step"]
        self.until_step(int(last) + 3)  # type: ignore[call-overload]

    def finish(self) -> None:
        self.pace(0)
        for node in self.nodes:
            if node.returncode != -signal.SIGKILL:
                assert node.wait(LIMIT) == 0, self.text()[-6000:]

    def text(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text(errors="replace")

    def ranks(self, node: subprocess.Popen) -> list[int]:
        found = subprocess.run(["pgrep", "-P", f"{node.pid}"], capture_output=True, text=True, check=False)
        return [int(p) for p in found.stdout.split()]

    def kill(self, node: subprocess.Popen) -> None:
        """The agent and all of its ranks, as when a machine loses power."""
        for pid in (node.pid, *self.ranks(node)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                self.kill(node)
        self.errors.close()


def counted(cluster: Cluster) -> dict[int, list[list]]:
    """What the ranks wrote down of every step, in the attempt that counts: the last that took the step."""
    lines = [json.loads(t) for p in cluster.samples.glob("*.jsonl") for t in p.read_text().splitlines()]
    found = {}
    for step in range(STEPS):
        of_step = [line for line in lines if line[0] == step]
        last = max(of_step, key=lambda line: line[4])[5]
        found[step] = sorted(line for line in of_step if line[5] == last)
    return found


def seen(cluster: Cluster) -> dict[int, list[int]]:
    """The samples of every step."""
    return {step: sorted(i for line in lines for i in line[3]) for step, lines in counted(cluster).items()}


def check_samples(cluster: Cluster) -> None:
    """All steps, and every sample once in every epoch."""
    steps = seen(cluster)
    assert [len(samples) for samples in steps.values()] == [BATCH] * STEPS
    for epoch in range(STEPS * BATCH // IMAGES):
        own = range(epoch * IMAGES // BATCH, (epoch + 1) * IMAGES // BATCH)
        assert sorted(i for step in own for i in steps[step]) == list(range(IMAGES))
    logged = [line["step"] for line in read(cluster.out / "log.jsonl") if "loss" in line]
    assert logged == list(range(1, STEPS + 1))
    result = json.loads((cluster.out / "result.json").read_text())
    assert (result["steps"], result["epochs"]) == (STEPS, STEPS * BATCH / IMAGES)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read(out / "log.jsonl") if "loss" in line]


def check_bits(cluster: Cluster, peace: Cluster) -> None:
    check_samples(cluster)
    assert losses(cluster.out) == losses(peace.out)
    ours, theirs = ((c.out / "model.safetensors").read_bytes() for c in (cluster, peace))
    assert ours == theirs
