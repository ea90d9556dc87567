"""How many threads a run on a CPU computes with: measured before it, and with a budget again when steps slow down.

Beside a busy neighbour several threads wait for the one that shares its core, and may be slower than a single one; for
a small model they may be so on an idle machine too. The last bits of a run depend on the number, so config.json has it
and a run that is resumed keeps it. Those of a run with a budget depend on the clock anyway: it may change the number.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from vitkit.training.config import TrainConfig
from vitkit.world import World

ROUNDS = 4  # of measuring, the first of which starts threads and is not counted
ALIKE = 1.05  # times the fastest: then fewer threads are taken, and the other cores left to others
WINDOW, SLOWER = 20, 1.5  # steps whose median is so many times what was measured: measure again
TRIED = 5  # steps with each number, the first of which is not counted; twice, in turns
AGAIN = 100  # steps until more threads are tried again; twice as many after each time that they were no faster
CROWDED = 0.5  # cores: with less left over, and more taken by others, these are missing here
EVERY = 2.0  # seconds between two looks at what the cores do


def numbers() -> list[int]:
    """Of threads to choose from here: one, half, all. OMP_NUM_THREADS leaves no choice."""
    most = torch.get_num_threads()
    return [most] if "OMP_NUM_THREADS" in os.environ else sorted({1, max(1, most // 2), most})


def apply(config: TrainConfig, world: World) -> None:
    """The recorded number, as far as the processes of this machine leave room for it."""
    if config.threads:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        room = max(1, (os.cpu_count() or 1) // here)
        torch.set_num_threads(config.threads if world.size == 1 else min(config.threads, room))


def timed(
    work: Callable[[], object], choices: Sequence[int], seconds: float, clock: Callable[[], float] = time.monotonic
) -> dict[int, float]:
    """Median seconds of `work` with each number of threads, in turns; a new round begins only within `seconds`."""
    before, started = torch.get_num_threads(), clock()
    took: dict[int, list[float]] = {number: [] for number in choices}
    try:
        for turn in range(ROUNDS):
            if turn and clock() - started > seconds:
                break
            for number in choices:
                torch.set_num_threads(number)
                start = clock()
                work()
                took[number].append(clock() - start)
    finally:
        torch.set_num_threads(before)
    return {number: median(found[1:] or found) for number, found in took.items()}


def fastest(took: Mapping[int, float]) -> int:
    """The fewest threads that are about as fast as any."""
    return min(number for number, seconds in took.items() if seconds <= ALIKE * min(took.values()))


def in_words(took: Mapping[int, float]) -> str:
    def text(seconds: float) -> str:
        return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"

    return ", ".join(f"{text(seconds)} with {number}" for number, seconds in sorted(took.items()))


class Pace:
    """Changes the threads of a run: `note` hears how long every step took.

    When the median of the last steps is clearly above what is expected, the next steps are made with each number in
    turn, and the fastest stays; they are steps as any other. With fewer threads than there could be, more are tried now
    and then: one thread does not become faster when a neighbour leaves.
    """

    def __init__(
        self, now: int, choices: Sequence[int], expected: float, use: Callable[[int], object] = torch.set_num_threads
    ) -> None:
        self.now, self.choices, self.expected, self.use = now, sorted(choices), expected, use
        self.recent = deque[float](maxlen=WINDOW)
        self.turns, self.tried = list[int](), dict[int, list[float]]()  # numbers still to try, the present one first
        self.since, self.wait = 0, AGAIN

    @classmethod
    def of(cls, config: TrainConfig) -> Pace | None:
        """In a run with a budget, whose bits depend on the clock anyway, and where the number was measured."""
        took, step = config.costs.get("threads"), float(str(config.costs.get("step", 0.0)))
        return cls(config.threads, [int(n) for n in took], step) if config.budget and isinstance(took, dict) else None

    def take(self, number: int) -> None:
        self.now = number
        self.use(number)

    def note(self, seconds: float) -> str:
        """What was found out with this step, in words; mostly nothing."""
        if self.turns:
            return self._try(seconds)
        self.recent.append(seconds)
        self.since += 1
        slow = len(self.recent) == WINDOW and median(self.recent) > SLOWER * self.expected
        if slow or (self.now < self.choices[-1] and self.since >= self.wait):
            self.turns, self.tried, self.since = 2 * self.choices, {number: [] for number in self.choices}, 0
            self.use(self.turns[0])
        return ""

    def _try(self, seconds: float) -> str:
        self.since += 1
        if self.since % TRIED != 1:
            self.tried[self.turns[0]].append(seconds)
        if self.since % TRIED:
            return ""
        del self.turns[0]
        if self.turns:
            self.use(self.turns[0])
            return ""
        return self._decide({number: median(found) for number, found in self.tried.items()})

    def _decide(self, took: dict[int, float]) -> str:
        before, usual = self.now, median(self.recent) if self.recent else 0.0
        slower = usual / max(1e-9, self.expected)
        self.take(fastest(took))
        self.expected = took[self.now]
        self.wait, self.since = AGAIN if self.now > before else 2 * self.wait, 0
        self.recent.clear()
        if self.now != before:
            return f"threads: {self.now} from here on, in place of {before}; a step takes {in_words(took)}"
        slow = f"steps take {slower:.1f} times as long as expected, by no fault of the threads"
        return f"{slow}: {in_words(took)}" if slower > SLOWER else ""


# --- neighbours --------------------------------------------------------------------------------------


class Used(NamedTuple):
    """Seconds: on the clock, of the cores that this process may use, and of itself and the processes it started."""

    clock: float
    cores: float
    own: float


class Neighbours:
    """What other processes take of the cores that this one may use; nothing where the system does not tell."""

    def __init__(self, read: Callable[[], Used | None] | None = None) -> None:
        self.read = read or used
        self.last, self.taken, self.free = self.read(), 0.0, 0.0
        self.count = len(usable())

    def cores(self, every: float = EVERY) -> float:
        """How many they take, of the time since it was asked before."""
        now = self.read()
        if now is not None and self.last is not None and now.clock - self.last.clock >= every:
            seconds, busy, own = (a - b for a, b in zip(now, self.last, strict=True))
            self.last, self.taken = now, round(max(0.0, busy - own) / max(1e-9, seconds), 1)
            self.free = self.count - busy / max(1e-9, seconds)
        return self.taken

    def missing(self) -> float:
        """The same, where too few cores are left over; else 0."""
        return taken if (taken := self.cores()) >= CROWDED and self.free < CROWDED else 0.0


def usable() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def used() -> Used | None:
    """From Linux's /proc: all but idle and waiting for disks. What a hypervisor gave to others counts as theirs."""
    try:
        lines, tick = Path("/proc/stat").read_text().splitlines(), os.sysconf("SC_CLK_TCK")
        ours = {f"cpu{number}" for number in usable()}
        busy = sum(busy_ticks(words) for line in lines if (words := line.split())[:1] and words[0] in ours)
        children = sum(map(ticks_of, (child.pid for child in active_children())))
    except (OSError, ValueError, IndexError):
        return None
    return Used(time.monotonic(), busy / tick, time.process_time() + children / tick)


def busy_ticks(words: Sequence[str]) -> int:
    """cpuN user nice system idle iowait irq softirq steal ..."""
    user, nice, system, _, _, *more = map(int, words[1:9])
    return user + nice + system + sum(more)


def ticks_of(process: int | None) -> int:
    """Of a process that may have ended meanwhile."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])
