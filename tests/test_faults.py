"""Every command that writes, with every one of its file operations failing in turn.

After a failure the output is the old one or the new one, the message is a line or two, and the next run works and
leaves nothing behind. A sample runs always, a spread with the slow tests, all of it with `make faults`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import vitkit
from faults import KINDS, Fault
from forks import Ended, Forks
from vitkit.training.log import read

SMALL = {"depth": 1, "width": 16, "heads": 1, "mlp_width": 16, "classes": 2}
PRELOADED = (
    "vitkit.runtime.onnx",
    "vitkit.runtime.openvino",
    "vitkit.evaluation.figures",
    "matplotlib.figure",
    "torch.export",
)
Files = dict[str, object]  # path -> what is compared of it


@dataclass(frozen=True)
class Scenario:
    arguments: str
    outputs: tuple[str, ...]
    again: Callable[[Path, list[str]], list[str]] = lambda folder, arguments: arguments  # after a failure
    together: bool = True  # all files of the output change at once
    gone: bool = False  # the old output may be gone (never mixed with the new) when a kill hits


def resumed(folder: Path, arguments: list[str]) -> list[str]:
    return [*arguments, "--resume"] if (folder / "run" / "config.json").exists() else arguments


def continued(folder: Path, arguments: list[str]) -> list[str]:
    """What the message of a job says: --resume when there are pieces."""
    pieces = any(path.name == "job.json" for path in folder.glob("*.parts/*"))
    return [*(a for a in arguments if a != "--force"), "--resume"] if pieces else arguments


TRAIN = "train set.npz --init new.safetensors --steps 4 --batch-size 16 --set evaluations=2 --out run --set log_every=1"
SCENARIOS = {
    "train": Scenario(TRAIN, ("run",), resumed, together=False),
    "evaluate": Scenario("evaluate new.safetensors set.npz --out ev", ("ev",)),
    "predict": Scenario("predict new.safetensors set.npz --out p.csv --force --batch-size 4", ("p.csv",), continued),
    "embed": Scenario("embed new.safetensors set.npz --out e.npz --force --batch-size 4", ("e.npz",), continued),
    "explain": Scenario("explain new.safetensors --out ex --only filters --only positions", ("ex",)),
    "export onnx": Scenario("export new.safetensors --to onnx --out m.onnx", ("m.onnx",)),
    "export pt2": Scenario("export new.safetensors --to torch-export --out m.pt2", ("m.pt2",)),
    "export openvino": Scenario("export new.safetensors --to openvino --out m.xml", ("m.xml", "m.bin"), gone=True),
    "convert file": Scenario("convert new.safetensors --to timm --force c.pth", ("c.pth",)),
    "convert npz": Scenario("convert new.safetensors --to google --force c.npz", ("c.npz",)),
    "convert folder": Scenario("convert new.safetensors --to huggingface --force hf", ("hf",)),
    "data show": Scenario("data show set.npz --rows 2 --out s.png", ("s.png",)),
    "data check": Scenario("data check set.npz --out s.png", ("s.png",)),
    "tune": Scenario("tune new.safetensors --runtimes onnx --seconds 0", ("new.safetensors.tuned",)),
    "study": Scenario("study dropout --data tiny.npz --steps 1 --seeds 1 --out st", ("st/dropout",)),
}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks("faults", *PRELOADED)
    yield started
    started.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and two sets, of 8 pixels."""
    folder = tmp_path_factory.mktemp("base")
    random = np.random.default_rng(0)
    labels = np.arange(64) % 2
    images = random.integers(0, 60, (64, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, 2:6, 2:6] += 150
    arrays = {"x_train": images[:40], "y_train": labels[:40], "x_val": images[40:], "y_val": labels[40:]}
    np.savez(folder / "set.npz", **arrays)
    np.savez(folder / "tiny.npz", **arrays, x_test=images[40:], y_test=labels[40:])
    for name in ("old", "new"):
        vitkit.save(vitkit.create("vit-8px/2", channels=1, **SMALL), folder / f"{name}.safetensors")
    return folder


def run(
    forks: Forks, folder: Path, arguments: list[str], fault: Fault | None = None, limit: int | None = None
) -> Ended:
    return forks("faults:command", str(folder), arguments, fault, limit, seconds=120)


def code_of(ended: Ended) -> int:
    """The exit code of the command; -9 when it was killed."""
    assert ended.code in (0, -9), f"{ended.code}: {ended.err}"
    return ended.value[0] if ended.code == 0 else -9  # type: ignore[index]


def content(path: Path) -> object:
    """What must be old or new: the bytes, but for what holds times and for logs, which are read; damage raises."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return [{k: v for k, v in line.items() if k != "seconds"} for line in read(path)]
    if path.name in ("result.json", "tuned.json", "config.json", "dropout.json", "evaluation.json"):
        return sorted(json.loads(data))
    if path.suffix in (".npz", ".pth", ".pt2"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            return sorted((i.filename.split("/", 1)[-1], i.CRC) for i in archive.infolist() if path.suffix == ".npz")
    if path.suffix in (".onnx", ".xml", ".bin", ".md", ".csv") and path.stem not in ("p", "bad-files"):
        return len(data) > 0  # times, or names that a tracer counts
    return hashlib.sha256(data).hexdigest()


def state(folder: Path, outputs: tuple[str, ...]) -> Files:
    """All finished files of the outputs; hidden ones are leftovers, and checked by `leftovers`."""
    paths = [p for name in outputs for p in [folder / name, *(folder / name).rglob("*")] if p.is_file()]
    skipped = ("checkpoints", "events.out")  # how many there are depends on when they were written
    return {
        str(p.relative_to(folder)): content(p)
        for p in paths
        if not any(part.startswith((".", *skipped)) for part in p.relative_to(folder).parts)
    }


def leftovers(folder: Path) -> list[str]:
    return [
        str(p.relative_to(folder)) for p in folder.rglob("*") if p.name.startswith(".") or p.name.endswith(".parts")
    ]


class Case:
    """A scenario, its starting folder, and the states before and after."""

    def __init__(self, forks: Forks, name: str, base: Path, folder: Path) -> None:
        self.forks, self.name, self.scenario, self.folder = forks, name, SCENARIOS[name], folder
        self.arguments = self.scenario.arguments.split()
        self.start = folder / "start"
        shutil.copytree(base, self.start)
        if name != "train":  # there is an old output, of the other model or another seed
            old = [a.replace("new", "old") for a in self.arguments]
            changed = [*old, "--seed", "2"] if name == "data show" else old
            assert code_of(run(forks, self.start, changed)) == 0
            if name == "tune":
                (self.start / "old.safetensors.tuned").rename(self.start / "new.safetensors.tuned")
        self.old = state(self.start, self.scenario.outputs)
        done = self.fresh("done")
        ended = run(forks, done, self.arguments)
        assert code_of(ended) == 0, ended.err
        self.new, self.operations = state(done, self.scenario.outputs), len(ended.value[1])  # type: ignore[index]
        assert self.new
        assert not leftovers(done)

    def fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(self.start, folder)

    def check(self, fault: Fault | None = None, limit: int | None = None) -> int:
        """One failure, what it leaves, and the next run; the exit code of the failure."""
        folder = self.fresh("trial")
        where = f"{self.name}: {fault or limit}"
        ended = run(self.forks, folder, self.arguments, fault, limit)
        code = code_of(ended)
        assert "Traceback" not in ended.err, f"{where}: {ended.err}"
        assert code in (0, 2, -9), f"{where}: exit code {code}: {ended.err}"
        self.check_state(where, state(folder, self.scenario.outputs), code)
        again = run(self.forks, folder, self.scenario.again(folder, self.arguments) if code else self.arguments)
        if code or self.name not in ("train",):
            assert code_of(again) == 0, f"{where}, the next run: {again.err}"
        assert state(folder, self.scenario.outputs) == self.new, f"{where}: the next run made something else"
        assert not leftovers(folder), where
        return code

    def check_state(self, where: str, found: Files, code: int) -> None:
        if code == 0:
            assert found == self.new, f"{where}: it said that all went well"
        elif not self.scenario.together:
            logs = [path for path in found if path.endswith((".jsonl", "bad-files.csv"))]  # grow line by line
            assert all(found[p] in (self.old.get(p), self.new[p]) or p in logs for p in found), f"{where}: {found}"
        elif self.scenario.gone and found.keys() != self.old.keys():
            assert not any(path.endswith(".xml") for path in found), where
        else:
            assert found in (self.old, self.new), f"{where}: neither old nor new: {found}"


def faults_of(operations: int) -> Iterator[Fault]:
    """Each operation meets a full disk, a kill before and after it, and one of the others in turn."""
    others = [kind for kind in KINDS if kind not in ("ENOSPC", "kill before")]
    for at in range(operations):
        yield from (Fault(at, kind) for kind in ("ENOSPC", "kill before", others[at % len(others)]))


ALL = "VITKIT_ALL_FAULTS" in os.environ  # set by `make faults`, which takes an hour; otherwise a spread of them


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_operation_fails_once(name: str, base: Path, tmp_path: Path, forks: Forks) -> None:
    case = Case(forks, name, base, tmp_path)
    faults = list(faults_of(case.operations))
    tried = [case.check(fault) for fault in (faults if ALL else faults[:: 1 + len(faults) // 8])]
    assert set(tried) & {2, -9}
    print(f"{name}: {len(tried)} failures at {case.operations} operations")


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="`make faults` runs it")
@pytest.mark.parametrize("name", SCENARIOS)
def test_files_that_may_not_grow(name: str, base: Path, tmp_path: Path, forks: Forks) -> None:
    """The kernel refuses, so that native writers meet it too; until the limit is large enough to succeed."""
    case = Case(forks, name, base, tmp_path)
    codes = []
    for power in count(4):
        codes.append(case.check(limit=2**power))
        if codes[-1] == 0:
            break
    assert len(codes) > 1


@pytest.mark.parametrize("name", ["predict", "convert folder", "data show"])
def test_some_operations_fail(name: str, base: Path, tmp_path: Path, forks: Forks) -> None:
    case = Case(forks, name, base, tmp_path)
    every = list(faults_of(case.operations))
    for fault in every[:: max(1, len(every) // 4)]:
        case.check(fault)
