"""Commands killed by SIGKILL at random moments, continued, and killed again: the result is that of a run in peace.

A chain is a command that is killed up to four times, each time continued as its message says, and then left to
finish. After every kill the files are the old ones or the new ones, and at the end those of the undisturbed run:
byte by byte, but for what holds times (`tests/scenarios.py`). Single processes are forked from one that has imported
everything, so that kills meet more than imports. With torchrun all processes are killed at once, as when the power
fails, or one of them, and torchrun starts all of them again.

Finished chains are kept, also when this script itself is killed: it goes on where it was.

    python benchmarks/kills.py                 # until there are as many kills as KILLS says; under an hour
    python benchmarks/kills.py --only predict embed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from forks import Forks
from harness import RESULTS, machine, save, table
from scenarios import PRELOADED, SCENARIOS, TRAIN, Scenario, check_state, leftovers, make_base, resumed, state
from vitkit.training.log import read

LONGER = TRAIN.replace("--steps 4", "--steps 80") + " --set save_every=0.01"
RUN = Scenario(LONGER, ("run",), resumed, together=False)
SINGLE = {k: replace(SCENARIOS[k], arguments=SCENARIOS[k].arguments[:-1] + "1") for k in ("predict", "embed", "index")}
PRETRAIN = LONGER.replace("train set.npz", "pretrain set.npz", 1)
SCENARIOS |= {"pretrain": replace(RUN, arguments=PRETRAIN), **SINGLE}
SCENARIOS |= {"train": RUN, "torchrun": RUN, "torchrun --shard": replace(RUN, arguments=f"{LONGER} --shard")}
KILLS = {"train": 40, "torchrun": 20, "torchrun --shard": 12, "pretrain": 12}  # how many are wanted
KILLS |= {"predict": 30, "embed": 30, "index": 20}
KILLS |= {"tune": 10, "export onnx": 8, "export openvino": 8, "export pt2": 8, "study": 10}
SECONDS = 600.0  # a run that takes longer hangs


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: we killed it
    text: str = ""
    kills: int = 0


Run = Callable[..., Ended]  # (folder, arguments, moments or None for no kill, seconds of a run in peace)


class Job:
    """A scenario, its starting folder, and the states before and after."""

    def __init__(self, name: str, folder: Path, run: Run) -> None:
        self.name, self.scenario, self.folder, self.run = name, SCENARIOS[name], folder, run
        self.arguments, self.start = self.scenario.arguments.split(), folder / "start"
        self.start.mkdir()
        make_base(self.start)
        if self.scenario.together:  # there is an old output, of the other model
            assert self.run(self.start, [a.replace("new", "old") for a in self.arguments], None).code == 0
            if name == "tune":
                (self.start / "old.safetensors.tuned").rename(self.start / "new.safetensors.tuned")
        self.old, self.seconds = state(self.start, self.scenario.outputs), SECONDS  # of the quickest run in peace
        self.finish(done := self.fresh("done"), self.arguments)
        self.new = state(done, self.scenario.outputs)

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return Path(shutil.copytree(self.start, self.folder / name))

    def finish(self, folder: Path, arguments: list[str]) -> None:
        ended = self.timed(folder, arguments, None)
        assert ended.code == 0, f"{self.name}: exit code {ended.code}: {ended.text}"

    def timed(self, folder: Path, arguments: list[str], moments: random.Random | None) -> Ended:
        before, ended = time.monotonic(), self.run(folder, arguments, moments, self.seconds)
        self.seconds = min(self.seconds, time.monotonic() - before) if ended.code == 0 else self.seconds
        return ended

    def chain(self, seed: int) -> int:
        """How many kills there were; an AssertionError when something was lost."""
        moments, folder = random.Random(f"{self.name} {seed}"), self.fresh("trial")
        arguments, kills = self.arguments, 0
        for _ in range(moments.randint(1, 4)):
            ended = self.timed(folder, arguments, moments)
            kills += ended.kills
            where = f"{self.name}, chain {seed}, kill {kills}"
            assert ended.code in (0, None), f"{where}: exit code {ended.code}: {ended.text}"
            code = -9 if ended.code is None else 0
            check_state(where, self.scenario, self.old, self.new, state(folder, self.scenario.outputs), code)
            if code == 0:
                break
            arguments = self.scenario.again(folder, self.arguments)
        else:
            self.finish(folder, arguments)
        assert state(folder, self.scenario.outputs) == self.new, f"{self.name}, chain {seed}: the result is another"
        assert not leftovers(folder), f"{self.name}, chain {seed}: {leftovers(folder)}"
        return kills


def in_one(forks: Forks) -> Run:
    def run(folder: Path, arguments: list[str], moments: random.Random | None, whole: float = 0.0) -> Ended:
        seconds = moments.uniform(0, whole) if moments else SECONDS
        ended = forks("faults:command", str(folder), arguments, seconds=seconds)
        code = ended.value[0] if ended.code == 0 else ended.code  # type: ignore[index]
        return Ended(code, ended.err, 1 if code is None else 0)

    return run


def by_torchrun(folder: Path, arguments: list[str], moments: random.Random | None, whole: float = 0.0) -> Ended:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder.parent / "errors.txt").open("w+b") as errors:
        words = [*launch, "-m", "vitkit", *arguments]
        process = psutil.Popen(words, cwd=folder, env=environment, stdout=errors, stderr=errors)
        try:
            kills = kill_some(process, folder / "run", moments, whole) if moments else 0
            code = process.wait(SECONDS) if kills >= 0 else None
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            kill_all(process)
            code = 124  # it hangs
        errors.seek(0)
        return Ended(code, errors.read().decode(errors="replace")[-3000:], abs(kills))


def kill_some(process: psutil.Popen, out: Path, moments: random.Random, whole: float) -> int:
    """Kill all processes at a moment, or one of the ranks; -1 when all of them are gone, else how many kills."""
    if moments.random() < 0.25:
        time.sleep(moments.uniform(0, whole))
    else:
        wanted = max((line["step"] for line in read(out / "log.jsonl")), default=0) + moments.randint(1, 20)
        while process.poll() is None and not any(line["step"] >= wanted for line in read(out / "log.jsonl")):
            time.sleep(0.005)
    if process.poll() is not None:
        return 0
    with suppress(psutil.NoSuchProcess):
        ranks = process.children()
        if moments.random() < 0.5 and ranks and (out / "config.json").exists():
            moments.choice(ranks).kill()
            return 1
    kill_all(process)
    return -1


def kill_all(process: psutil.Popen) -> None:
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def run_job(name: str, row: dict[str, Any], forks: Forks, keep: Callable[[], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(name, Path(folder), by_torchrun if name.startswith("torchrun") else in_one(forks))
        while row["kills"] < KILLS[name]:
            try:
                row["kills"] += job.chain(row["chains"])
            except AssertionError as e:
                row["lost"].append(str(e)[:2000])
            row["chains"] += 1
            print(f"{name}: {row['kills']} kills in {row['chains']} chains, {len(row['lost'])} lost", flush=True)
            keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KILLS, default=list(KILLS))
    parser.add_argument("--restart", action="store_true", help="forget the chains that were run before")
    parser.add_argument("--save", type=Path, default=RESULTS / "kills.json", help="where the JSON goes")
    args = parser.parse_args()
    about, rows = machine(), {name: {"command": name, "kills": 0, "chains": 0, "lost": []} for name in KILLS}
    if args.save.exists() and not args.restart:
        rows |= {row["command"]: row for row in json.loads(args.save.read_text())["rows"]}
    forks = Forks("faults", *PRELOADED)
    for name in args.only:
        run_job(name, rows[name], forks, lambda: save("kills", args.save, about, list(rows.values()), False))
    forks.close()
    print(table([{**row, "lost": len(row["lost"])} for row in rows.values()]))
    sys.exit(1 if any(row["lost"] for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
