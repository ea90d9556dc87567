"""The server's own memory: what was loaded is not searched for garbage, what was freed goes back to the system.

Both are measured (`benchmarks/soak.py`). A full garbage collection visits every object that importing and loading made:
0.15 seconds of CPU in which nobody is answered, several times that where other programs want the cores. And
glibc learns from the first large upload to keep such blocks in its heaps, where one small object above them holds
all of them: 300 half-sent bodies made a server of 360 MB one of 540 for good.
"""

from __future__ import annotations

import ctypes
import gc
import sys


def freeze_loaded() -> None:
    """Before the first request."""
    gc.collect()
    gc.freeze()


def return_freed() -> None:
    """Free pages of all heaps go back to the system; where the C library is not glibc, nothing happens. Blocks."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
