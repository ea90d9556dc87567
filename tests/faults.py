"""File operations that fail: the n-th one of a command ends with an error, a short write or a kill.

Counted are opening for writing, writing, fsync, rename, mkdir and removing, wherever Python code does them. What
native code writes by itself (C++ streams, `ndarray.tofile`) is not seen here; `limit`, the size at which the kernel
refuses to let a file grow, reaches that too.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EINTR": errno.EINTR}
KINDS = (*ERRORS, "short", "kill before", "kill after")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Fault:
    at: int  # which operation, from 0
    kind: str  # of KINDS


class Shim:
    """Stands between Python and the file operations of the system; `done` names each that was asked for."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.done, self.pid, self.over = fault, list[str](), os.getpid(), False

    def install(self) -> None:
        io.open = builtins.open = self._opening(builtins.open)  # type: ignore[assignment]
        os.open = self._os_opening(os.open)
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "ftruncate", "link"):
            setattr(os, name, self._calling(name, getattr(os, name)))

    def meet(self, name: str, call: Callable[[], Any], short: Callable[[], Any] | None = None) -> Any:
        """Count an operation and do it, or what the fault says."""
        if os.getpid() != self.pid or self.over:  # a process that was forked to read data
            return call()
        kind = self.fault.kind if self.fault is not None and len(self.done) == self.fault.at else ""
        self.done.append(name)
        if kind == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ERRORS:
            raise OSError(ERRORS[kind], os.strerror(ERRORS[kind]))
        result = short() if kind == "short" and short is not None else call()
        if kind == "kill after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _calling(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: self.meet(f"{name} {args[0]}", lambda: real(*args, **more))

    def _os_opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def opening(path: Any, flags: int, *args: Any, **more: Any) -> int:
            def call() -> int:
                return real(path, flags, *args, **more)

            seen = flags & _WRITING and not str(path).startswith("/dev/")
            return self.meet(f"open {path}", call) if seen else call()  # type: ignore[no-any-return]

        return opening

    def _opening(self, real: Callable[..., IO[Any]]) -> Callable[..., IO[Any]]:
        shim = self

        class Raw(io.FileIO):
            def write(self, data: Any, /) -> int:
                whole = super().write
                half = memoryview(data).cast("B")[: max(1, len(data) // 2)]
                return shim.meet(f"write {self.name}", lambda: whole(data), lambda: whole(half))  # type: ignore[no-any-return]

        def opening(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> IO[Any]:
            if not set(mode) & set("wxa+") or str(file).startswith("/dev/") or more.get("opener"):
                return real(file, mode, buffering, *args, **more)
            plain = mode.replace("b", "").replace("t", "")
            raw = shim.meet(f"open {file}", lambda: Raw(file, plain, more.get("closefd", True)))
            if buffering == 0:
                return raw  # type: ignore[no-any-return]
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            names = ("encoding", "errors", "newline")
            words = {**dict(zip(names, args, strict=False)), **{k: v for k, v in more.items() if k in names}}
            return io.TextIOWrapper(buffered, **words, line_buffering=buffering == 1)

        return opening


def command(folder: str, arguments: list[str], fault: Fault | None = None, limit: int | None = None) -> Any:
    """Run `vitkit ARGUMENTS` in a folder, in a process of its own: the exit code and the operations."""
    os.chdir(folder)
    os.environ["VITKIT_CACHE"] = os.path.join(folder, "cache")
    sys.argv = ["vitkit", *arguments]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    import torch

    from vitkit.cli.main import run

    torch.set_num_threads(1)
    shim, code = Shim(fault), 0
    shim.install()
    try:
        run()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    shim.over = True
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return code, shim.done
