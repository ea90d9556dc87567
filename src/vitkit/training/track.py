"""A run feeds its trackers: from a thread, so that a slow server holds up no step, and never at the cost of the run.

What a tracker has missed, because it failed or could not be reached, is sent once more at the end, from log.jsonl.
Which run of the tracker belongs to a folder is kept in track.json: a resumed run continues it without gap or
repetition, as it does its own log.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vitkit import __version__
from vitkit.errors import TrainError, check_one_of
from vitkit.io import parse_json, write_json
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.training.result import Result
from vitkit.training.trackers import TRACKERS, About, Tracker
from vitkit.training.trackers.base import Numbers

MEMORY = "track.json"  # tracker -> id of the run
EVERY = 2.0  # seconds between two deliveries
AGAIN = 60.0  # seconds after a failure, until it is tried again
PATIENCE = 60.0  # seconds that the end of a run waits for its trackers
FILES = ("config.json", "result.json", "curves.png")  # that are handed over at the end; weights are not
Line = Mapping[str, object]


class Feed(threading.Thread):
    """One tracker and the lines that it has not got yet."""

    def __init__(self, name: str, tracker: Tracker, about: About, note: Callable[[str], None]) -> None:
        super().__init__(name=f"track-{name}", daemon=True)
        self.tracker_name, self.tracker, self.about, self.note = name, tracker, about, note
        self.waiting: list[Line] = []
        self.changed = threading.Condition()
        self.ending: tuple[str, Numbers] | None = None  # how the run ended
        self.known: dict[str, int] | None = None  # last step of each metric there; None: not open yet
        self.error = ""  # of the last try
        self.delivered = False

    def add(self, lines: Sequence[Line]) -> None:
        with self.changed:
            self.waiting += lines

    def end(self, state: str, summary: Numbers) -> None:
        with self.changed:
            self.ending = (state, summary)
            self.changed.notify()

    def run(self) -> None:
        pause = 0.0
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ending is not None, timeout=pause)
                ending, lines = self.ending, list(self.waiting)
            if self._try(lines, ending):
                with self.changed:
                    del self.waiting[: len(lines)]
            if ending is not None:
                return
            pause = AGAIN if self.error else EVERY

    def _try(self, lines: Sequence[Line], ending: tuple[str, Numbers] | None) -> bool:
        """Everything that a tracker may do wrong ends here, in a note."""
        try:
            self._open()
            self._send(lines)
            if ending is not None:
                files = [self.about.folder / name for name in FILES if (self.about.folder / name).is_file()]
                self.tracker.close(*ending, files)
                self.delivered = True
            self.error = ""
            return True
        except Exception as e:
            failed, self.error = self.error, (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
            if not failed:
                self.note(f"warning: {self.tracker_name} did not take the numbers ({self.error}); the run goes on")
            return False

    def _open(self) -> None:
        if self.known is None:
            memory = self.about.folder / MEMORY
            ids = _ids(memory)
            found = self.tracker.open(self.about, ids.get(self.tracker_name))
            if ids.get(self.tracker_name) != found:
                write_json(memory, {**_ids(memory), self.tracker_name: found})
            self.known = dict(self.tracker.sent())

    def _send(self, lines: Sequence[Line]) -> None:
        """What is new to the tracker; a metric has one value at a step."""
        assert self.known is not None
        fresh: list[tuple[int, Numbers]] = []
        known = dict(self.known)
        for line in lines:
            step = int(str(line["step"]))
            numbers = {k: v for k, v in _numbers(line).items() if step > known.get(k, -1)}
            if numbers:
                fresh.append((step, numbers))
                known |= dict.fromkeys(numbers, step)
        if fresh:
            self.tracker.log(fresh)
            self.known = known


class Trackers:
    """All trackers of a run; none is fine."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        check_trackers(config.track)
        self.folder, self.note = Path(config.out), note
        settings = {k: str(v) for k, v in config.to_dict().items() if v not in (None, "", {}, [])}
        about = About(self.folder, settings, {"vitkit.version": __version__, "vitkit.data": config.data})
        self.feeds = [Feed(name, TRACKERS[name](), about, note) for name in config.track]

    def start(self, kept: Sequence[Line]) -> None:
        """Lines that the run has already, when it is resumed."""
        for feed in self.feeds:
            feed.add(kept)
            feed.start()

    def write(self, line: Line) -> None:
        for feed in self.feeds:
            feed.add([line])

    def close(self, result: Result | None, state: str) -> None:
        """Send what is left, for a while; what then is missing can be sent later."""
        summary = {f"test_{k}": v for k, v in result.test.items()} if result is not None else {}
        summary |= {f"best_{k}": v for k, v in result.best.items()} if result is not None else {}
        begun = [feed for feed in self.feeds if feed.is_alive()]
        for feed in begun:
            feed.end(state, summary)
        until = time.monotonic() + PATIENCE
        for feed in begun:
            feed.join(max(0.0, until - time.monotonic()))
            if not feed.delivered:
                why = feed.error or f"no answer within {PATIENCE:.0f} s"
                again = f"vitkit track {self.folder} {feed.tracker_name}"
                self.note(
                    f"warning: {feed.tracker_name} did not get all of the run ({why}); send it later with: {again}"
                )


def check_trackers(names: Sequence[str]) -> None:
    for name in names:
        check_one_of(name, TRACKERS, f"--track {name} is not known")
        TRACKERS[name].check()


def send_run(folder: Path, name: str, note: Callable[[str], None]) -> int:
    """Hand the log of a run to a tracker; the number of lines. What it has already is not repeated."""
    try:
        about = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        config = TrainConfig.from_dict(about["train"]).replace(out=str(folder), track=(name,))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise TrainError(f"{folder} holds no run ({e}); give the folder of one") from e
    trackers, lines = Trackers(config, note), read(folder / "log.jsonl")
    result = _result(folder / "result.json")
    trackers.start(lines)
    for feed in trackers.feeds:
        feed.end("finished" if result else "stopped", result)
        feed.join(PATIENCE)
        if not feed.delivered:
            raise TrainError(f"{name} did not take the run ({feed.error or 'no answer'}); check its address, try again")
    return len(lines)


def _result(path: Path) -> Numbers:
    with suppress(OSError, ValueError, AttributeError):
        found = parse_json(path.read_text(encoding="utf-8"))
        best = {f"best_{k}": v for k, v in found.get("best", {}).items()}
        return _numbers({**best, **{f"test_{k}": v for k, v in found.get("test", {}).items()}, "step": 0})
    return {}


def _numbers(line: Line) -> Numbers:
    """The finite numbers of a line but its step."""
    found = {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, int | float)}
    return {k: v for k, v in found.items() if math.isfinite(v)}


def _ids(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError, AttributeError):
        return {str(k): str(v) for k, v in parse_json(path.read_text(encoding="utf-8")).items()}
    return {}
