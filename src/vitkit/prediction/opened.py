"""What `predict` and `embed` ask: a model or an exported file.

Shapes: B images, P prefix tokens, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from vitkit.checkpoints.load import load
from vitkit.checkpoints.options import ModelOptions
from vitkit.errors import ConfigError, check_one_of
from vitkit.io import sha256
from vitkit.model.base import Outputs, VisionModel
from vitkit.model.config import AnyConfig
from vitkit.model.vit import ViT
from vitkit.prediction.tables import Columns, Row
from vitkit.progress import SILENT, Progress
from vitkit.runtime import open_runtime
from vitkit.runtime.base import Runtime, device_for
from vitkit.runtime.export import open_exported
from vitkit.runtime.table import format_of
from vitkit.runtime.tuned import digest_of
from vitkit.tasks import Task
from vitkit.tasks.table import task_for

Loadable = VisionModel | str | Path
FEATURES = ("cls", "mean", "tokens", "pooled")


class Features(nn.Module):
    """Images -> B D ("cls", "mean"; "pooled" with the layers before the classifier) or B N D ("tokens"), normed."""

    def __init__(self, model: VisionModel, kind: str = "") -> None:
        super().__init__()
        self.model, self.config = model, model.config
        by_head = isinstance(model, ViT) and model.config.pooling in ("cls", "cls+mean")
        self.kind = kind or ("cls" if by_head else "mean")  # by default what the model's own head reads
        check_one_of(self.kind, FEATURES, f"there are no features {self.kind!r}")
        if self.kind == "cls" and isinstance(model, ViT) and model.class_token is None:
            raise ConfigError("the model has no class token; take --features mean, or tokens")
        if self.kind not in ("mean", "pooled") and not isinstance(model, ViT):
            raise ConfigError("a ResNet has no tokens; take --features mean")

    def forward(self, images: Tensor) -> Tensor:
        if self.kind == "pooled":
            pooled = self.model.pooled(images)  # B D, with a distillation token B 2 D
            return pooled if pooled.ndim == 2 else pooled.mean(dim=1)
        if not isinstance(self.model, ViT):
            return self.model.features(images, grid=True)[0].mean((-2, -1))  # B D
        tokens = self.model.tokens(images)  # B (P + N) D
        config, norm = self.model.config, self.model.head.norm
        if self.kind == "tokens":
            return tokens[:, config.prefix_tokens :]
        x = tokens[:, 0] if self.kind == "cls" else tokens[:, config.prefix_tokens :].mean(dim=1)
        return norm(x) if norm is not None and config.pooling != "cls+mean" else x


@dataclass(frozen=True)
class Opened:
    """`opened(images)` gives a row per image as the task writes it, or its features."""

    config: AnyConfig
    outputs: Outputs
    runtime: Runtime
    identity: str  # of the weights, or of the exported file
    top: int = 5  # classes in a row
    features: str | None = None  # which of FEATURES; None: predictions

    @cached_property
    def task(self) -> Task:
        return task_for(self.outputs, self.config.classes)

    @property
    def about(self) -> dict[str, str | int]:
        """What a result depends on."""
        wanted = {"top": self.top} if self.features is None else {"features": self.features}
        command = "predict" if self.features is None else "embed"
        return {"command": command, "model": self.identity, **wanted, "runtime": self.runtime.name}

    @cached_property
    def columns(self) -> Columns:
        """Of a row, in order."""
        own: Columns = {"features": list} if self.features is not None else {**self.task.columns(self.top)}
        return {"path": str, **own, "error": str}

    def __call__(self, images: Tensor) -> list[Row]:
        outputs = self.runtime.run(images)
        if self.features is not None:
            return [{"features": features} for features in outputs.numpy()]
        return [{**row} for row in self.task.rows(outputs, self.top)]


def load_for(
    source: Loadable, runtime: str, device: str | None, options: ModelOptions | None, progress: Progress = SILENT
) -> VisionModel:
    """The model on the device that the runtime computes on; one that is loaded already stays where it is."""
    if isinstance(source, VisionModel):
        return source.to(device) if device else source
    model = load(source, options=options)
    if not model.pretrained:
        progress.note(f"note: {source} is a name of the zoo, so its weights are fresh and not trained")
    return model.to(device_for(runtime, device))


def open_model(
    source: Loadable,
    runtime: str = "auto",
    merge: int | str = 0,
    device: str | None = None,
    options: ModelOptions | None = None,
    progress: Progress = SILENT,
    top: int = 5,
    features: str | None = None,
    trust: str | None = None,
) -> Opened:
    """Whatever `load` takes, or a file that `export` has written, for predictions or for features.

    features  cls, mean, tokens, pooled, or "" for what the model's own head reads; None: predictions
    trust     the SHA-256 of an exported file that may run code (.pt2)
    """
    path = None if isinstance(source, VisionModel) else source
    if path is not None and format_of(path) is not None and Path(path).is_file():
        fixed = runtime in ("auto", format_of(path)) and not merge and options in (None, ModelOptions())
        return _open_exported(Path(path), fixed, device, top, features, trust)
    model = load_for(source, runtime, device, options, progress)
    if features is None:
        opened = open_runtime(model, runtime, source=path, merge=merge, progress=progress)
        return Opened(model.config, model.outputs, opened, digest_of(model), top)
    wanted = Features(model, features)
    opened = open_runtime(wanted, runtime, merge=merge)
    return Opened(model.config, model.outputs, opened, digest_of(model), features=wanted.kind)


def _open_exported(
    path: Path, fixed: bool, device: str | None, top: int, features: str | None, trust: str | None
) -> Opened:
    if features is not None:
        raise ConfigError(f"{path} is exported and gives no features; give the checkpoint it was made from")
    if not fixed:
        raise ConfigError(f"{path} is exported: its size and its runtime are fixed; leave the options out")
    if device not in (None, "cpu"):
        raise ConfigError(f"{path} runs on the CPU; leave out --device {device}, or give the checkpoint")
    runtime, about = open_exported(path, trust)
    if about.raw:
        raise ConfigError(f"{path} was exported with --raw, for programs; use the one without, or the checkpoint")
    return Opened(about.config, about.outputs, runtime, sha256(path), top)
