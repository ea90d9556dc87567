"""What is behind elastic runs, each part by itself: the watchdog, the list of attempts, a log on a full disk."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from vitkit.errors import CheckpointError, WriteError
from vitkit.locks import InUse, only_one
from vitkit.training import attempts, watchdog
from vitkit.training.checkpoint import Keeper
from vitkit.training.log import Log, read
from vitkit.training.watchdog import EXIT_CODE, Watchdog
from vitkit.world import World

CPU = torch.device("cpu")
PAIR = World(0, 2, CPU)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the process would have ended; its threads then wait for the end of the test."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit  # of the thread

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "gather", lambda value, size: [value])
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    monkeypatch.setattr(watchdog, "_TO_WRITE", 0.0)
    return codes


def until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_does_not_move_ends_with_its_stacks_on_disk(tmp_path: Path, ended: list[int]) -> None:
    with Watchdog(0.05, tmp_path, PAIR) as dog:
        dog.beat(7)
        until(lambda: ended)
    assert ended == [EXIT_CODE]
    text = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert "has waited since step 7 for 0.05 s, the limit of --hang-limit" in text
    assert "test_who_does_not_move" in text
    assert text.count("hread 0x") >= 2  # all threads, not only its own


def test_who_moves_is_left_alone_and_leaves_nothing(tmp_path: Path, ended: list[int]) -> None:
    with Watchdog(1000, tmp_path, PAIR) as dog:
        for step in range(10):
            dog.beat(step)
            dog.update("evaluating", step)
            time.sleep(0.01)
        assert dog.waited < 1000
    assert not ended
    assert not (tmp_path / "stacks").exists()


HANGING = """
import sys, torch
from pathlib import Path
from vitkit.training import watchdog
from vitkit.world import World

watchdog.gather = lambda value, size: [value]
for _ in range(2):  # registered, let go, and registered again
    with watchdog.Watchdog(1000, Path(sys.argv[1]), World(0, 2, torch.device("cpu"))):
        print("watched", flush=True)
        sys.stdin.readline()  # hangs until it is told to go on
    print("left", flush=True)
    sys.stdin.readline()
"""


def test_another_process_can_ask_for_the_stacks(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, str(tmp_path)], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "watched\n"
            process.send_signal(signal.SIGUSR1)
            until(lambda: (tmp_path / "stacks" / "rank-0.txt").stat().st_size)
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "left\n"
            process.send_signal(signal.SIGUSR1)  # too late, and no reason to die
            print(file=process.stdin, flush=True)
        assert process.wait() == 0
    assert "most recent call first" in (tmp_path / "stacks" / "rank-0.txt").read_text()


@pytest.mark.parametrize(("limit", "world"), [(0.0, PAIR), (0.001, World(0, 1, CPU))], ids=["no limit", "alone"])
def test_without_a_limit_or_others_nobody_watches(tmp_path: Path, ended: list[int], limit: float, world: World) -> None:
    threads = threading.active_count()
    with Watchdog(limit, tmp_path, world):
        assert threading.active_count() == threads


def test_a_launch_continues_what_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    attempts.record(tmp_path, PAIR)
    assert not (tmp_path / attempts.FILE).exists()  # not torchrun's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-1")
    assert not attempts.continues(tmp_path)
    attempts.record(tmp_path, PAIR, step=3)
    attempts.record(tmp_path, World(1, 2, CPU), step=3)  # one line for all
    assert not attempts.continues(tmp_path)  # no run there yet
    (tmp_path / "config.json").touch()
    assert attempts.continues(tmp_path)
    assert [(line["launch"], line["processes"], line["step"]) for line in attempts.read(tmp_path)] == [("job-1", 2, 3)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-2")
    assert not attempts.continues(tmp_path)  # another launch must say --resume
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's own word says nothing
    assert not attempts.continues(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert attempts.continues(tmp_path)


def test_lines_of_a_log_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    log = Log(tmp_path)
    real, full = log._file._file, [True]

    class Disk:
        def write(self, content: bytes) -> int:
            if full[0]:
                real.write(content[:5])  # a part fits
                full.append(True)
                return 5 if len(full) == 2 else self.refuse()
            return real.write(content)

        def refuse(self) -> int:
            real.truncate(5)
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            real.close()

    log._file._file = Disk()
    log.write({"step": 1, "loss": 0.5})
    log.write({"step": 2, "loss": 0.25})
    assert read(tmp_path / "log.jsonl") == []
    full[0] = False
    log.write({"step": 3, "loss": 0.125})
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_log_whose_end_is_missing_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log._file._file.close()
    log._file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    log.write({"step": 1})
    with pytest.raises(WriteError, match="disk is full"):
        log.close()


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    with only_one(tmp_path / ".lock", "the run", "choose another"):
        start = time.monotonic()
        with pytest.raises(InUse), only_one(tmp_path / ".lock", "the run", "choose another", patience=0.3):
            pass
        assert time.monotonic() - start >= 0.3


def test_several_checkpoints_in_a_row_must_fail_to_end_a_run(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from vitkit.training.loop import MISSED, Loop

    (tmp_path / "checkpoints").write_text("not a folder")
    notes: list[str] = []
    loop = SimpleNamespace(missed=0, watcher=SimpleNamespace(note=notes.append))
    keeper = Keeper(tmp_path / "checkpoints")
    for failed in range(1, MISSED + 1):
        keeper.save(1, {}, background=True)
        if failed < MISSED:
            with Loop.may_miss(loop, True):  # type: ignore[arg-type]
                keeper.finish()
            assert "goes on" in notes[-1]
            continue
        with pytest.raises(CheckpointError, match="earlier ones are intact"), Loop.may_miss(loop, True):  # type: ignore[arg-type]
            keeper.finish()
    with Loop.may_miss(loop, True):  # type: ignore[arg-type]
        pass
    assert loop.missed == 0
