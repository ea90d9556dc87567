"""A process that hangs: seen by all who wait for it, its stacks on disk, and the end of this attempt.

In a run of many processes one that stands still holds up all others, and none of them fails. Each process
therefore watches itself: after `hang_limit` seconds without a step (or a batch of an evaluation) it writes the
stacks of all its threads to `stacks/rank-N.txt` in the run directory, asks the other processes of its machine to do
the same (SIGUSR1, then SIGCONT for one that was stopped), and ends. torchrun then starts all of them again, and
the run resumes from its last checkpoint.

Seconds are counted by ticks of this process's own: one that was itself suspended does not blame the others for it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vitkit.progress import Progress
from vitkit.world import World, gather

FOLDER = "stacks"
EXIT_CODE = 75  # of sysexits.h: failed for now, try again
_TICK = 0.5  # seconds
_TO_WRITE = 1.0  # seconds that others get for their stacks before this process ends


class Peer(NamedTuple):
    """A process of the run, so that no other one is ever taken for it."""

    machine: str
    pid: int
    started: str


def myself() -> Peer:
    namespace = ""
    with suppress(OSError):  # containers on one machine may use the same numbers
        namespace = os.readlink("/proc/self/ns/pid")
    return Peer(f"{platform.node()} {namespace}", os.getpid(), started(os.getpid()))


def started(pid: int) -> str:
    """When a process started, in the system's ticks; "" when it is gone or the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Watchdog(Progress):
    """Ends this process when it has not been told of progress for `limit` seconds; 0, or a lone process: never."""

    def __init__(self, limit: float, out: Path, world: World) -> None:
        self.limit, self.world = limit, world
        self.path = out / FOLDER / f"rank-{world.rank}.txt"
        self.waited, self.step = 0.0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if not self.limit or self.world.size == 1 or not hasattr(signal, "SIGUSR1"):
            return self
        self._main = threading.current_thread() is threading.main_thread()  # Ray trains in another one
        self.peers = [p for p in gather(myself(), self.world.size) if p.machine == myself().machine and p.started]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")
        if self._main:  # what `unregister` goes back to, with no moment between: another one may still be asking
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, self._file, all_threads=True)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
                self.path.parent.rmdir()  # unless others have written

    def beat(self, step: int) -> None:
        self.waited, self.step = 0.0, step

    def update(self, what: str, done: float, total: float | None = None) -> None:
        """Of an evaluation: a batch is progress too."""
        self.waited = 0.0

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(_TICK):
            now = time.monotonic()
            self.waited += min(now - before, 2 * _TICK)
            before = now
            if self.waited > self.limit:
                self._end()

    def _end(self) -> None:
        rank, limit = self.world.rank, f"{self.limit:g} s, the limit of --hang-limit"
        what = f"process {rank} has waited since step {self.step} for {limit}"
        with suppress(OSError):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {platform.node()}: {what}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
        print(f"{what}; the stacks of all its threads are in {self.path}", file=sys.stderr, flush=True)
        for peer in self.peers:
            if peer.pid != os.getpid() and started(peer.pid) == peer.started:
                with suppress(OSError):
                    os.kill(peer.pid, signal.SIGUSR1)
                    os.kill(peer.pid, signal.SIGCONT)
        time.sleep(_TO_WRITE)
        for child in multiprocessing.active_children():  # that load images; one of them may be what hangs
            child.kill()
        os._exit(EXIT_CODE)  # no clean-up: it would wait for what hangs
