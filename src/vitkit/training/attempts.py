"""`attempts.jsonl`: every start of a run's processes under torchrun; and whether this one continues an earlier one.

torchrun starts its command again after a lost process, and also when a node joins or leaves. For the latter it does
not count a restart: what it was started as, `--rdzv-id`, tells that the run in the folder is its own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vitkit.io import json_text, locked, parse_json, read_regular
from vitkit.world import World

FILE = "attempts.jsonl"
_UNNAMED = ("", "none")  # torchrun's word for a launch without --rdzv-id


def launch() -> str:
    """The name of this launch of torchrun; "" outside of it or without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name in _UNNAMED else name


def continues(out: Path) -> bool:
    """Whether torchrun has started these processes before, with a run in this folder."""
    if not (out / "config.json").exists():
        return False
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    return bool(launch()) and any(line.get("launch") == launch() for line in read(out))


def record(out: Path, world: World, **more: object) -> None:
    """A line about this attempt, by the first process of a launch; a full disk is no reason to end it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not world.first:
        return
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "launch": launch(), "processes": world.size, **more}
    try:
        with locked(out / FILE) as file:
            file.write((json_text(line) + "\n").encode())
    except OSError:
        return


def read(out: Path) -> list[dict[str, object]]:
    lines = []
    for text in read_regular(out / FILE).decode(errors="replace").splitlines() if (out / FILE).exists() else ():
        try:
            lines.append(parse_json(text))
        except ValueError:  # cut short
            continue
    return [line for line in lines if isinstance(line, dict)]
