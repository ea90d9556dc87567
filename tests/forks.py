"""A process that has imported vitkit once and forks a child for each call: a kill, a limit or a fault costs one child.

`Forks()` starts it; calling it runs a function of a test module in a new child and tells how the child ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
PRELOAD = ("vitkit.cli.main", "vitkit.api", "vitkit.training.run", "vitkit.prediction.job", "vitkit.explanation.build")


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code, or minus the signal; None when its time was over."""

    code: int | None
    out: str
    err: str
    value: object  # what the function returned, if it did


class Forks:
    def __init__(self, *modules: str) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS / "fuzz"), str(TESTS / "web"), *sys.path])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MPLBACKEND": "Agg"}
        command = [sys.executable, "-c", "import sys, forks; forks.serve(sys.argv[1:])", *PRELOAD, *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def __call__(self, function: str, *args: object, seconds: float = 60.0, memory: int | None = None) -> Ended:
        """`function` is "module:name"; `memory` in bytes, beyond what the process has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((function, args, seconds, memory), self._process.stdin)
        self._process.stdin.flush()
        ended: Ended = pickle.load(self._process.stdout)
        return ended

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)


def serve(modules: list[str]) -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            function, args, seconds, memory = pickle.load(requests)
        except EOFError:
            return
        with tempfile.TemporaryDirectory(prefix="vitkit-fork-") as folder:
            pipes = [os.pipe(), os.pipe()]  # not files: a child may be forbidden to write those
            if not (pid := os.fork()):
                _child(Path(folder), [end for _, end in pipes], function, args, memory)
            for start, end in pipes:
                os.close(end)
                os.set_blocking(start, False)
            pickle.dump(_wait(pid, Path(folder), [start for start, _ in pipes], seconds), answers)
            answers.flush()
            for start, _ in pipes:
                os.close(start)


def _child(folder: Path, ends: list[int], function: str, args: tuple[object, ...], memory: int | None) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(ends[0], 1)
        os.dup2(ends[1], 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, -1))
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(*args)
        sys.stdout.flush()
        sys.stderr.flush()
        handle = os.open(folder / "value", os.O_WRONLY | os.O_CREAT)
        os.write(handle, pickle.dumps(value))
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(pid: int, folder: Path, starts: list[int], seconds: float) -> Ended:
    end, status, texts = time.monotonic() + seconds, None, [b"", b""]
    while status is None and time.monotonic() < end:
        done, found = os.waitpid(pid, os.WNOHANG)
        status = found if done else None
        texts = [text + _drain(start) for text, start in zip(texts, starts, strict=True)]
        time.sleep(0 if done else 0.002)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # and whoever it has started
    if status is None:
        os.waitpid(pid, 0)
    value = (folder / "value").read_bytes() if (folder / "value").exists() else b""
    code = None if status is None else os.waitstatus_to_exitcode(status)
    out, err = (text.decode(errors="replace") for text in texts)
    return Ended(code, out, err, pickle.loads(value) if value else None)


def _drain(handle: int) -> bytes:
    text = b""
    with contextlib.suppress(BlockingIOError):
        while block := os.read(handle, 1 << 16):
            text += block
    return text
