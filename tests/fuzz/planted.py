"""What a finding looks like, one of each: for the test of the hunt itself."""

from __future__ import annotations

import os
import signal

from targets import check_refusal

from vitkit.errors import DataError


def divide(name: str, case: object) -> float:
    return 1 / 0


def grow(name: str, case: object) -> bytes:
    return bytes(1 << 34)


def crash(name: str, case: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(name: str, case: object) -> None:
    while True:
        pass


def refuse(name: str, case: object) -> None:
    check_refusal(DataError("it is bad; fetch it again"))
