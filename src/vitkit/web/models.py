"""A model that is served: loaded, named, described, and ready to be asked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.checkpoints.load import load
from vitkit.data.preprocess import normalise
from vitkit.errors import ConfigError
from vitkit.explain.filters import as_tiles, patch_filters
from vitkit.explain.positions import position_offsets, position_similarity
from vitkit.model.build import Model
from vitkit.model.summary import summarize
from vitkit.model.vit import ViT
from vitkit.runtime import Runtime, open_runtime
from vitkit.web.problems import Problem


@dataclass(frozen=True, eq=False)
class Served:
    name: str  # what clients call it
    model: Model
    runtime: Runtime
    notes: tuple[str, ...]  # what a user should know, such as that the weights are fresh

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def classes(self) -> list[str]:
        names = getattr(self.model, "class_names", None) or range(self.config.classes)
        return [str(name) for name in names]

    def class_of(self, word: str) -> int:
        """A class by its name or number. Names win, as in a set whose classes are called 3, 5 and 8; #3 is a number."""
        if word in self.classes:
            return self.classes.index(word)
        number = word.removeprefix("#")
        if number.isascii() and number.isdecimal() and len(number) < 9 and int(number) < len(self.classes):
            return int(number)
        raise Problem(422, "no_class", f"class={word[:60]!r} does not exist; GET /api/model lists the classes")

    def normalised(self, pictures: Sequence[Tensor]) -> Tensor:
        device = next(self.model.parameters()).device
        return normalise(torch.stack(list(pictures)).to(device), self.config.preprocessing)

    def probabilities(self, pictures: Sequence[Tensor]) -> np.ndarray:
        """uint8 pictures -> one row of probabilities for each."""
        logits = self.runtime.run(self.normalised(pictures))
        return logits.float().softmax(dim=-1).cpu().numpy()

    def describe(self, models: Sequence[str]) -> dict[str, Any]:
        config, counted = self.config, self.summary
        about: dict[str, Any] = {"name": self.name, "models": list(models), "notes": list(self.notes)}
        about |= {"runtime": self.runtime.name, "classes": self.classes, "channels": config.channels}
        about |= {"image_size": list(config.preprocessing.size), "params": counted["params"]}
        about |= {"gmacs": counted["gmacs"], "explainable": isinstance(self.model, ViT)}
        if isinstance(self.model, ViT):
            about |= {key: getattr(config, key) for key in ("width", "depth", "heads", "pooling", "positions")}
            about |= {"patch_size": list(config.patch_size), "grid": list(config.grid)}
        return about

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summarize(self.config, self.name)

    @cached_property
    def filters(self) -> dict[str, Any]:
        """Tiles of 0..255 and the share of the variance that each explains."""
        found = patch_filters(self.vit)
        tiles = (as_tiles(found) * 255).round().astype(int)
        return {
            "shape": list(tiles.shape),
            "tiles": tiles.tolist(),
            "explained": [round(float(share), 5) for share in found.explained],
            "of_pixels": found.of_pixels,
        }

    @cached_property
    def positions(self) -> dict[str, Any]:
        """Cosine similarity by pairs of positions, or the bias by offset where there are no vectors."""
        kind = self.vit.config.positions
        if kind == "none":
            raise Problem(404, "no_positions", "the model has no positions (positions='none')")
        relative = kind == "relative"
        values = position_offsets(self.vit) if relative else position_similarity(self.vit)
        axes = (
            ["layer", "head", "row_offset", "column_offset"] if relative else ["row", "column", "to_row", "to_column"]
        )
        told = "offsets" if relative else "similarity"
        return {"kind": kind, "shows": told, "axes": axes, "values": np.round(values, 4).tolist()}

    @cached_property
    def vit(self) -> ViT:
        """For looking inside: a twin with the same weights, so that nothing it does meets a prediction on its way."""
        if isinstance(self.model, ViT):
            return copy.deepcopy(self.model, {id(t): t for t in (*self.model.parameters(), *self.model.buffers())})
        kind = type(self.model).__name__
        raise Problem(422, "no_attention", f"{self.name} is a {kind}: it has no attention to look at, only predictions")


def load_served(sources: Sequence[str], runtime: str) -> list[Served]:
    """Load every model that was named, and run each once: what cannot work fails here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: list[Served] = []
    for source in sources:
        model = load(source).to(device)
        if model.config.channels not in (1, 3):
            raise ConfigError(
                f"{source} wants {model.config.channels} channels, and pictures have 1 or 3; ask it from Python instead"
            )
        notes = tuple(getattr(model, "load_report", ()))
        if "fresh weights" in notes:
            notes = ("a name of the zoo: its weights are fresh and not trained",)
        served = Served(
            _name(source, [s.name for s in found]), model, open_runtime(model, runtime, source=source), notes
        )
        served.probabilities([torch.zeros(model.config.channels, *model.config.preprocessing.size, dtype=torch.uint8)])
        found.append(served)
    return found


def _name(source: str, taken: Sequence[str]) -> str:
    """runs/demo -> demo, weights/best.safetensors -> best, vit-b/16 -> vit-b/16; the second of a name gets a number."""
    path = Path(source)
    name = source
    if path.exists():
        name = path.resolve().name if path.is_dir() else path.stem
    number, wanted = 2, name
    while name in taken:
        name, number = f"{wanted} ({number})", number + 1
    return name


def find_model(models: Sequence[Served], name: str | None) -> Served:
    for served in models:
        if name is None or served.name == name:
            return served
    known = ", ".join(served.name for served in models)
    raise Problem(422, "no_model", f"model={str(name)[:60]!r} is not served here; there is {known}")
