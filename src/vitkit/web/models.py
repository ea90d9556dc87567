"""A model that is served: loaded, named, described, and ready to be asked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitkit.data.preprocess import normalise
from vitkit.errors import ConfigError, InputError
from vitkit.explanation.inside import as_vit
from vitkit.explanation.weights import as_tiles, patch_filters, position_offsets, position_similarity, score_biases
from vitkit.model.base import VisionModel, find_class
from vitkit.model.config import ViTConfig
from vitkit.model.summary import Summary, summarize
from vitkit.model.vit import ViT
from vitkit.prediction.opened import load_for
from vitkit.runtime import open_runtime
from vitkit.runtime.base import Runtime
from vitkit.tasks import Task, task_of
from vitkit.web.answers import Problem
from vitkit.web.settings import ServeSettings

Part = dict[str, object]  # of a model, as JSON


@dataclass(frozen=True, eq=False)
class Served:
    name: str  # what clients call it
    model: VisionModel
    runtime: Runtime
    notes: tuple[str, ...]  # what a user should know, such as that the weights are fresh

    @cached_property
    def task(self) -> Task:
        return task_of(self.model)

    @cached_property
    def names(self) -> list[str]:
        """Of the outputs: classes, labels or values; their numbers where nobody named them."""
        return list(self.task.names)

    def find_output(self, word: str) -> int:
        try:
            return find_class(word, self.names, len(self.names))
        except InputError:
            message = f"class={word[:60]!r} does not exist; GET /api/model lists the {self.model.outputs.kind}"
            raise Problem(422, "no_class", message) from None

    def logits(self, images: Sequence[Tensor]) -> Sequence[Tensor]:
        """uint8 images, or what was made of them, -> a row of outputs each, by the runtime, on the device it takes."""
        pre = self.model.config.preprocessing
        if any(image.is_floating_point() for image in images):  # a client prepared it
            images = [image if image.is_floating_point() else normalise(image[None], pre)[0] for image in images]
            return self.runtime.run(torch.stack(images).to(self.runtime.device)).unbind()
        return self.runtime.run(normalise(torch.stack(list(images)).to(self.runtime.device), pre)).unbind()

    def describe(self) -> Part:
        config, outputs = self.model.config, self.model.outputs
        answer: Part = {"name": self.name, "notes": list(self.notes), "runtime": self.runtime.name}
        answer |= {"classes": [] if outputs.kind == "values" else self.names}
        answer |= {"outputs": {"kind": outputs.kind, "names": self.names}, "channels": config.channels}
        pre = config.preprocessing
        answer |= {"image_size": list(pre.size), "fit": pre.fit, "crop": pre.crop, "params": self.layers["params"]}
        answer |= {"trained": self.model.pretrained}
        answer |= {"gmacs": self.layers["gmacs"], "explainable": isinstance(config, ViTConfig)}
        if isinstance(config, ViTConfig):
            shown = ("width", "depth", "heads", "pooling", "patch_size", "grid")
            answer |= {name: getattr(config, name) for name in shown} | {"positions": config.position_words}
        return answer

    @cached_property
    def layers(self) -> Summary:
        return summarize(self.model.config, self.name)

    @cached_property
    def filters(self) -> Part:
        """Tiles of 0..255 and the share of the variance that each explains."""
        filters = patch_filters(self.vit)
        tiles = (as_tiles(filters) * 255).round().astype(int)
        shares = [round(float(share), 5) for share in filters.explained]
        about = {"explained": shares, "of_pixels": filters.of_pixels}
        return {"shape": list(tiles.shape), "tiles": tiles.tolist(), **about}

    @cached_property
    def positions(self) -> Part:
        """Cosine similarity by pairs of positions, or the bias by offset where there are no vectors."""
        kind = self.vit.config.position_words
        if kind == "none":
            raise Problem(404, "no_positions", "the model has no positions (positions='none')")
        if score_biases(self.vit):
            values, shows = position_offsets(self.vit), "offsets"
            axes = ["layer", "head", "row_offset", "column_offset"]
        else:
            values, shows = position_similarity(self.vit), "similarity"
            axes = ["row", "column", "to_row", "to_column"]
        return {"kind": kind, "shows": shows, "axes": axes, "values": np.round(values, 4).tolist()}

    @cached_property
    def vit(self) -> ViT:
        """For looking inside: a twin with the same weights, so that nothing it does meets a prediction on its way."""
        try:
            model = as_vit(self.model)
        except InputError:
            message = f"{self.name} is a {type(self.model).__name__}: it has no attention to look at, only predictions"
            raise Problem(422, "no_attention", message) from None
        return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def load_served(sources: Sequence[str], settings: ServeSettings) -> list[Served]:
    """Load every model that was named, and run each once: what cannot work fails here."""
    models: list[Served] = []
    for source in sources:
        model = load_for(source, settings.runtime, settings.device, settings.model)
        if model.config.channels not in (1, 3):
            wanted = f"{model.config.channels} channels"
            raise ConfigError(f"{source} wants {wanted}, and images have 1 or 3; ask it from Python instead")
        notes = model.load_report if model.pretrained else ("a name of the zoo: its weights are fresh and not trained",)
        path = Path(source)  # runs/demo -> demo, weights/best.safetensors -> best, vit-b/16 -> vit-b/16
        name = source if not path.exists() else path.resolve().name if path.is_dir() else path.stem
        name += " (2)" * any(served.name == name for served in models)
        served = Served(name, model, open_runtime(model, settings.runtime, source=source), notes)
        served.logits([torch.zeros(model.config.channels, *model.config.preprocessing.size, dtype=torch.uint8)])
        models.append(served)
    return models
