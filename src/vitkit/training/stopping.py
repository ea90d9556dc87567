"""SIGTERM and Ctrl-C: a run is saved and says how to resume."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vitkit.errors import TrainError


class Stopped(TrainError):
    """The run was asked to stop, and everything is saved."""

    exit_code = 130


class Stoppable(Protocol):
    stop_asked: bool


@contextmanager
def stop_signals(loop: Stoppable) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and stop; a second Ctrl-C stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: object) -> None:
        if loop.stop_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        loop.stop_asked = True

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
