"""Weights & Biases, by its own client: WANDB_PROJECT or "vitkit"; WANDB_MODE=offline keeps all in the run's folder.

What was sent is remembered in the run's folder; the service itself ignores steps that it has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import MissingPackage, TrainError
from vitkit.io import parse_json, write_json
from vitkit.training.trackers.base import About, Numbers, Tracker

if TYPE_CHECKING:
    import wandb

SENT = "wandb-sent.json"  # metric -> last step


class WandB(Tracker):
    run: wandb.Run

    @classmethod
    def check(cls) -> None:
        try:
            import wandb
        except ImportError as e:
            raise MissingPackage("wandb", "--track wandb", "wandb") from e
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            hint = "run `wandb login`, or set WANDB_MODE=offline and send it later with `wandb sync`"
            raise TrainError(f"--track wandb: nobody is logged in to Weights & Biases; {hint}")

    def open(self, about: About, id: str | None) -> str:
        import wandb

        self.memory = about.folder / SENT
        quiet = wandb.Settings(silent=True, console="off", init_timeout=30, x_disable_stats=True)
        self.run = wandb.init(
            id=id,
            resume="allow",
            settings=quiet,
            project=os.environ.get("WANDB_PROJECT", "vitkit"),
            dir=str(about.folder),
            name=about.name,
            config={**about.settings},
            tags=["vitkit"],
        )
        return str(self.run.id)

    def sent(self) -> Mapping[str, int]:
        with suppress(OSError, ValueError, AttributeError):
            return {str(k): int(v) for k, v in parse_json(self.memory.read_text(encoding="utf-8")).items()}
        return {}

    def log(self, lines: Sequence[tuple[int, Numbers]]) -> None:
        known = dict(self.sent())
        for step, numbers in lines:
            self.run.log(numbers, step=step)
            known |= dict.fromkeys(numbers, step)
        write_json(self.memory, known)

    def close(self, state: str, summary: Numbers, files: Sequence[Path]) -> None:
        self.run.summary.update({f"vitkit/{name}": value for name, value in summary.items()})
        for file in files:
            self.run.save(str(file), base_path=str(file.parent), policy="now")
        self.run.finish(exit_code=0 if state == "finished" else 1)
