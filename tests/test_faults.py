"""Every command that writes, with every one of its file operations failing in turn.

After a failure the output is the old one or the new one, the message is a line or two, and the next run works and
leaves nothing behind. A sample runs always, a spread with the slow tests, all of it with `make faults`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from faults import KINDS, Fault
from forks import Ended, Forks
from scenarios import PRELOADED, SCENARIOS, check_state, leftovers, make_base, state


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks("faults", *PRELOADED)
    yield started
    started.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def run(
    forks: Forks, folder: Path, arguments: list[str], fault: Fault | None = None, limit: int | None = None
) -> Ended:
    return forks("faults:command", str(folder), arguments, fault, limit, seconds=120)


def code_of(ended: Ended) -> int:
    """The exit code of the command; -9 when it was killed."""
    assert ended.code in (0, -9), f"{ended.code}: {ended.err}"
    return ended.value[0] if ended.code == 0 else -9  # type: ignore[index]


class Case:
    """A scenario, its starting folder, and the states before and after."""

    def __init__(self, forks: Forks, name: str, base: Path, folder: Path) -> None:
        self.forks, self.name, self.scenario, self.folder = forks, name, SCENARIOS[name], folder
        self.arguments = self.scenario.arguments.split()
        self.start = folder / "start"
        shutil.copytree(base, self.start)
        if self.scenario.together:  # there is an old output, of the other model or another seed
            old = [a.replace("new", "old") for a in self.arguments]
            changed = [*old, "--seed", "2"] if name == "data show" else old
            assert self.code_of(run(forks, self.start, changed)) == 0
            if name == "tune":
                (self.start / "old.safetensors.tuned").rename(self.start / "new.safetensors.tuned")
        self.old = state(self.start, self.scenario.outputs)
        done = self.fresh()
        ended = run(forks, done, self.arguments)
        assert self.code_of(ended) == 0, ended.err
        self.new, self.operations = state(done, self.scenario.outputs), len(ended.value[1])  # type: ignore[index]
        assert self.new
        assert not leftovers(done)

    def code_of(self, ended: Ended) -> int:
        """0 when the command did all."""
        code = code_of(ended)
        return 0 if code == self.scenario.success else code if code else 1

    def fresh(self) -> Path:
        """Always at one place: some outputs name the folders they are about."""
        folder = self.folder / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(self.start, folder)

    def check(self, fault: Fault | None = None, limit: int | None = None) -> int:
        """One failure, what it leaves, and the next run; the exit code of the failure."""
        folder = self.fresh()
        where = f"{self.name}: {fault or limit}"
        ended = run(self.forks, folder, self.arguments, fault, limit)
        code = self.code_of(ended)
        assert "Traceback" not in ended.err, f"{where}: {ended.err}"
        assert code in (0, 2, -9), f"{where}: exit code {code}: {ended.err}"
        check_state(where, self.scenario, self.old, self.new, state(folder, self.scenario.outputs), code)
        again = run(self.forks, folder, self.scenario.again(folder, self.arguments) if code else self.arguments)
        if code or self.scenario.together:
            assert self.code_of(again) == 0, f"{where}, the next run: {again.err}"
        assert state(folder, self.scenario.outputs) == self.new, f"{where}: the next run made something else"
        assert not leftovers(folder), where
        return code


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
