"""From a configuration to a finished run: `train(config)`."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import PIL
import torch
from torch import nn

from vitkit.checkpoints.write import replacing
from vitkit.data import open_data
from vitkit.errors import ConfigError, MissingPackage, TrainError
from vitkit.train import world as worlds
from vitkit.train.config import TrainConfig
from vitkit.train.loop import Loop, Result, Watcher
from vitkit.train.parts import Parts, assemble
from vitkit.train.recipe import complete


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    watcher: Watcher | None = None,
    started: float | None = None,
    teacher: nn.Module | None = None,
) -> Result:
    """Run a configuration to its end, or go on with the run that its folder holds.

    resume   take the configuration from the folder `config.out` and go on where it was left
    watcher  is told what happens
    started  `time.monotonic()` when the clock of `budget` began
    teacher  a model to learn from, instead of the checkpoint `config.teacher`
    """
    started = time.monotonic() if started is None else started
    watcher = watcher or Watcher()
    # After a lost process torchrun starts the same command again, which then means: go on.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume = resume or (restarted and (Path(config.out) / "config.json").exists())
    world = worlds.join(config.device)
    try:
        resumed = world.share(_claim(config, resume) if world.first else None)
        for line in ignored(config, resumed) if resumed is not None and world.first else ():
            watcher.note(line)
        config = resumed or config
        source = open_data(config.data, "train")
        if resumed is None:
            config, reasons = complete(config, source, world)
            for reason in reasons if world.first else ():
                watcher.note(reason)
        parts = assemble(config, world, source, watcher.note if world.first else lambda _: None, teacher)
        if resumed is None and world.first:
            _write_config(config, parts, reasons)
        loop = Loop(parts, watcher if world.first else Watcher(), started)
        found = loop.resume() if resumed is not None else False
        if resumed is not None and not found and world.first:
            watcher.note("no checkpoint had been written yet: the run begins again with its first step")
        result = loop.go(resumed=found)
        parts.loader.close()
        if world.first:
            _write_result(result)
            _draw_curves(result.out, watcher)
        return result
    finally:
        worlds.leave()


def _claim(config: TrainConfig, resume: bool) -> TrainConfig | None:
    """The configuration of the run in the folder when it is resumed; an error when a new one would overwrite it."""
    path = Path(config.out) / "config.json"
    if not resume:
        if path.exists():
            raise TrainError(
                f"{config.out} already holds a run; go on with it by --resume, or choose another folder with --out"
            )
        return None
    try:
        saved = TrainConfig.from_dict(json.loads(path.read_text())["train"])
    except FileNotFoundError:
        raise TrainError(
            f"{config.out} holds no run to resume; give its folder with --out, or leave out --resume"
        ) from None
    except (ValueError, KeyError, TypeError) as e:
        raise TrainError(f"{path} cannot be read ({e}); restore it, or start anew in another folder") from e
    if config.data and config.data != saved.data:
        raise ConfigError(f"the run in {config.out} was trained on {saved.data}, not on {config.data}")
    return saved.replace(out=config.out)


def ignored(asked: TrainConfig, saved: TrainConfig) -> list[str]:
    """A line for each setting that was given and differs from the run's, which goes on as it was begun."""
    plain = TrainConfig(data=asked.data, out=asked.out).to_dict()
    now, then = asked.to_dict(), saved.to_dict()
    now["changes"] = {**then["changes"], **now["changes"]}  # the recipe may have added some
    given = [name for name, value in now.items() if value not in (plain[name], then[name])]
    if "epochs" in given and then["steps"]:
        given.remove("epochs")  # they became steps when the run was begun
    return [
        f"{name}={now[name]} is not used: the run goes on as it was begun, with {name}={then[name]}" for name in given
    ]


def _write_config(config: TrainConfig, parts: Parts, reasons: list[str]) -> None:
    from vitkit import __version__

    model = parts.model.config
    about: dict[str, Any] = {
        "train": config.to_dict(),
        "model": {"kind": type(parts.model).__name__, **model.to_dict()},
        "classes": list(parts.class_names),
        "splits": parts.loader.source.splits,
        "chosen": reasons,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "vitkit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "pillow": PIL.__version__,
        },
        "machine": {"cores": os.cpu_count(), "device": parts.world.device.type, "processes": parts.world.size},
    }
    with replacing(Path(config.out) / "config.json") as file:
        file.write(json.dumps(about, indent=2, ensure_ascii=False).encode())


def _write_result(result: Result) -> None:
    about = {k: v for k, v in vars(result).items() if k != "out"}
    with replacing(result.out / "result.json") as file:
        file.write(json.dumps(about, indent=2).encode())


def _draw_curves(out: Path, watcher: Watcher) -> None:
    """`curves.png`, where matplotlib is installed."""
    from vitkit.explain.about_model import curves_of
    from vitkit.explain.figures.style import save_png, styled
    from vitkit.explain.training import read_log

    section = curves_of(read_log(out))
    try:
        with styled():
            save_png(section.draw(), out / "curves.png", section.finding, section.alt)
    except MissingPackage as e:
        watcher.note(f"no curves.png: {e}")
