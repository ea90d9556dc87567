"""Loading processes: bounded memory, no leaks, a clean end, and no hanging when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import making
import pytest

from vitkit.data import Loader, open_data, preset
from vitkit.errors import DataError
from vitkit.model.config import Preprocessing

psutil = pytest.importorskip("psutil")
PRE = Preprocessing(size=(64, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return making.write_folder(tmp_path_factory.mktemp("set"), {"a": 40, "b": 40})


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.status() == psutil.STATUS_ZOMBIE or "tracker" not in " ".join(p.cmdline())]


def wait_until(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_closing_ends_the_processes(folder: Path) -> None:
    before = set(children())
    loader = Loader(open_data(folder).split("all"), PRE, 8, preset("none"), workers=2)
    next(iter(loader))
    assert len(set(children()) - before) == 2
    loader.close()
    assert wait_until(lambda: not set(children()) - before)
    assert len(list(loader)) == 9  # it can be used again, from where it was
    loader.close()


def test_a_process_that_dies_is_named(folder: Path) -> None:
    before = set(children())
    loader = Loader(open_data(folder).split("all"), PRE, 4, preset("none"), workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = set(children()) - before
    state = loader.state_dict()
    worker.send_signal(signal.SIGKILL)
    assert wait_until(lambda: worker.status() == psutil.STATUS_ZOMBIE)  # dead, and nothing raised in between
    with pytest.raises(DataError, match="a loading process died") as caught:
        list(batches)
    assert str(worker.pid) in str(caught.value)
    assert loader.state_dict()["step"] >= state["step"]  # what a checkpoint needs is still there
    assert wait_until(lambda: not set(children()) - before)


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from vitkit.data import Loader, open_data, preset
from vitkit.model.config import Preprocessing
loader = Loader(open_data(sys.argv[1]).split("all"), Preprocessing(size=(64, 64)), 4, preset("none"), workers=2)
try:
    for batch in loader:
        print("batch", flush=True)
        time.sleep(0.2)
except KeyboardInterrupt:
    print("stopped", loader.state_dict(), flush=True)
"""


@pytest.mark.parametrize(
    "stop",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_clean_end_on_signals(folder: Path, stop: signal.Signals) -> None:
    """Ctrl-C goes to the whole group, as in a terminal; nothing is left behind and no traceback is printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "batch"
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        if stop == signal.SIGINT:
            os.killpg(process.pid, stop)
        else:
            process.send_signal(stop)
        out, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    if stop == signal.SIGINT:
        assert "stopped {'epoch': 0" in out
        assert "Traceback" not in errors
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


LATE = """
import time
from vitkit.data import loader
at_once = loader.begin
loader.begin = lambda number: (time.sleep(2 * number), at_once(number))  # the second process is slow to start
"""


def test_a_process_that_starts_after_its_parent_ended_ends_too(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LATE + SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "batch"
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    for worker in alive:
        worker.kill()
    assert not alive


def test_memory_stays_the_same_over_twenty_epochs(folder: Path) -> None:
    before = set(children())
    source = open_data(folder).split("all")
    with Loader(source, PRE, 8, preset("medium"), workers=2) as loader:
        used, open_files = [], []
        for _ in range(20):
            for _ in loader:
                pass
            workers = set(children()) - before
            assert len(workers) == 2
            used.append(sum(p.memory_full_info().uss for p in workers))
            open_files.append(psutil.Process().num_fds())
    # Bytes, both processes together. A leak grows with every epoch, so the least of the last ones is above the most of
    # the earlier ones; single values move by megabytes, as pages stop being shared with this process.
    assert min(used[15:]) - max(used[5:10]) < 8 * 2**20
    assert open_files[-1] - open_files[4] <= 4


def test_memory_is_bounded_when_nobody_takes_the_batches(folder: Path) -> None:
    """Each process keeps two batches ready and then waits."""
    source = open_data(folder).split("all")
    with Loader(source, PRE, 8, preset("none"), workers=1) as loader:
        next(iter(loader))
        running = loader._processes._iterator  # type: ignore[union-attr]
        assert running._tasks_outstanding <= 3
