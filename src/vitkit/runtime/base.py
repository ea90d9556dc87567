"""What every runtime is: something that turns a batch of prepared images into the outputs of a model."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.data import normalise
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs, VisionModel
from vitkit.model.config import AnyConfig, Size
from vitkit.runtime.raw import FromRaw
from vitkit.runtime.shrunk import Shrunk
from vitkit.runtime.table import RUNTIMES, find
from vitkit.runtime.top import WithTop
from vitkit.world import resolve_device

Calibration = list[Tensor]  # batches of normalised images, for static int8


@dataclass(frozen=True)
class Spec:
    """What is made of a model, in memory or in a file."""

    int8: bool = False
    merge: int | str = 0
    raw: bool = False  # with preprocessing: raw pixels in
    calibration: Calibration | None = None
    dynamic_size: bool = False  # images of any size: positions are resized inside
    top: int = 0  # besides the logits, the probabilities and numbers of so many classes
    scale: float = 1.0  # of the sides of images, which are made smaller inside
    bf16: bool = False  # matrix products in bfloat16
    here: bool = False  # for processors like this one alone: int8 may use all of its 8 bits


@dataclass(frozen=True)
class Choice:
    """A configuration: how a model is run. threads None: as many as PyTorch takes here, whatever the runtime."""

    runtime: str = "eager"
    int8: bool = False
    calibrated: bool = False
    merge: int | str = 0  # as `model.merge` takes it
    batch_size: int = 1
    threads: int | None = None
    scale: float = 1.0  # of the sides of images
    bf16: bool = False
    sure: float = 0.0  # early exit: with this probability an answer at `scale` stands, others are asked in full

    @property
    def name(self) -> str:
        """ "onnx int8 merge 8" """
        words = [self.runtime, "int8" * self.int8, "bf16" * self.bf16, f"merge {self.merge}" * bool(self.merge)]
        words.append(f"scale {self.scale:g}" * (self.scale != 1))
        words.append(f"sure {self.sure:g}" * bool(self.sure))
        return " ".join(word for word in (*words, "calibrated" * self.calibrated) if word)

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else "bf16" if self.bf16 else "fp32"

    @property
    def reduced(self) -> bool:
        return bool(self.merge) or self.scale != 1

    @property
    def exact(self) -> bool:
        """Whether it computes what the model computes, up to rounding in fp32."""
        return self.precision == "fp32" and not self.reduced

    @property
    def looks(self) -> dict[str, Choice]:
        """What is run, each as a model of its own: with early exit the first look and the second, which is `model`."""
        if not self.sure:
            return {"model": self}
        return {"model": replace(self, sure=0.0, scale=1.0), "first": replace(self, sure=0.0, merge=0)}

    def spec(self, calibration: Calibration | None) -> Spec:
        chosen = calibration if self.calibrated else None
        return Spec(self.int8, self.merge, calibration=chosen, scale=self.scale, bf16=self.bf16, here=True)


class Runtime(ABC):
    """A model, ready to run.

    name        what runs: "eager", "onnx int8", ...
    device      where it takes its input; `run` moves images there
    metadata    what an exported file says about itself
    batch_size  the fastest, where `vitkit tune` has measured it
    """

    batch_size: int | None = None

    def __init__(
        self, name: str, device: torch.device | str = "cpu", metadata: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.device, self.metadata = name, torch.device(device), dict(metadata or {})

    def run(self, images: Tensor) -> Tensor:
        """Normalised images (batch, channels, height, width) -> outputs (batch, ...) in float32 on the CPU."""
        return self.compute(images.to(self.device)).float().cpu()

    @abstractmethod
    def compute(self, images: Tensor) -> Tensor:
        """`run` for images that are on `device`."""

    def all_outputs(self, images: Tensor) -> list[Tensor]:
        """What an exported file gives: logits, and with `Spec.top` probabilities and numbers of classes."""
        return [self.compute(images)]


class Cascade(Runtime):
    """Early exit: an answer for smaller images stands where its likeliest class has at least the probability `sure`."""

    def __init__(self, first: Runtime, second: Runtime, sure: float, name: str) -> None:
        super().__init__(name, first.device)
        self.first, self.second, self.sure = first, second, sure

    def compute(self, images: Tensor) -> Tensor:
        found = self.first.run(images).clone()  # B C
        unsure = found.softmax(dim=-1).amax(dim=-1) < self.sure
        if unsure.any():
            found[unsure] = self.second.run(images[unsure.to(images.device)])
        return found


def thread_count(wanted: int | None) -> int:
    """The same for every runtime, or they could not be compared: what PyTorch takes of this process's cores."""
    return wanted or torch.get_num_threads()


def build(model: nn.Module, choice: Choice, calibration: Calibration | None = None) -> Runtime:
    if choice.sure:
        looks = {name: build(model, look, calibration) for name, look in choice.looks.items()}
        return Cascade(looks["first"], looks["model"], choice.sure, choice.name)
    module = find("runtime", choice.runtime, RUNTIMES, "auto").load(f"the runtime {choice.runtime}", choice.int8)
    runtime: Runtime = module.build(model, choice, choice.spec(calibration))
    return runtime


def config_of(model: nn.Module) -> AnyConfig:
    """Of a model, or of what is wrapped around one and keeps its config."""
    return cast(AnyConfig, model.config)


def device_for(kind: str, wanted: str | None) -> torch.device:
    """Where a model belongs that a runtime of this kind, or "auto", is to run."""
    if kind not in RUNTIMES or not RUNTIMES[kind].on_cpu:
        return resolve_device(wanted)
    device = resolve_device(wanted or "cpu")
    if device.type != "cpu":
        raise ConfigError(f"--runtime {kind} computes on the CPU; leave out --device {wanted}, or take --runtime eager")
    return device


def merged(model: nn.Module, merge: int | str) -> nn.Module:
    """The same weights in a model that merges so many tokens per block; the given model stays as it is."""
    if not merge:
        return model
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    next(part for part in twin.modules() if isinstance(part, VisionModel)).merge = merge  # or an error why not
    return twin


def reduced(model: nn.Module, merge: int | str, scale: float) -> nn.Module:
    """The same weights, with fewer tokens and on smaller images."""
    fewer = merged(model, merge)
    return fewer if scale == 1 else Shrunk(cast(VisionModel, fewer), scale)


def prepared(model: nn.Module, spec: Spec) -> nn.Module:
    """What is exported: on the CPU, in fp32, merging and with its preprocessing as asked; the model stays as it is."""
    chosen = reduced(model, spec.merge, spec.scale)
    outputs = getattr(model, "outputs", Outputs())
    if spec.raw:
        chosen = FromRaw(chosen, config_of(model).preprocessing, outputs)
    if spec.top:
        chosen = WithTop(chosen, outputs, spec.top)
    first = next(model.parameters())
    if first.device.type != "cpu" or first.dtype != torch.float32:
        chosen = copy.deepcopy(chosen).to("cpu", torch.float32)
    return chosen.eval()


def made_up(config: AnyConfig, count: int, size: tuple[int, int] | None = None, seed: int = 0) -> Tensor:
    """Images that nobody gave, uint8 (count, C, H, W), the same for the same seed.

    They are smooth coloured noise, which uses a model's range as photographs do far better than white noise does.
    """
    random = torch.Generator().manual_seed(seed)
    size = size or config.preprocessing.size
    total = torch.zeros(count, config.channels, *size)
    for cells in (3, 7, 17):
        noise = torch.rand(count, config.channels, cells, cells, generator=random) - 0.5
        total += F.interpolate(noise, size, mode="bicubic", align_corners=False) * (9 / cells) ** 0.5
    grain = torch.rand(total.shape, generator=random) - 0.5
    return ((total + 0.1 * grain) * 120 + 128).clamp(0, 255).to(torch.uint8)


def example_of(model: nn.Module, spec: Spec, count: int = 2, grid: Size | None = None) -> Tensor:
    """What a model is traced with: two images, so that no exporter takes the batch for a constant."""
    config = config_of(model)
    if spec.raw:
        height, width = config.preprocessing.size
        return made_up(config, count, (height + 5, width + 9)).permute(0, 2, 3, 1).contiguous()
    size = None
    if spec.dynamic_size:  # no side is what it is in the configuration, or as long as another axis
        (h, w), (p, q) = grid_of(config), config.patch_size
        h, w = grid or (h + 3, w + 4 + (h == w + 1))
        size = (h * p, w * q)
    return normalise(made_up(config, count, size), config.preprocessing)


def grid_of(config: AnyConfig) -> Size:
    """Patches, or of a ResNet positions of the last map, down and across."""
    return config.image_size[0] // config.patch_size[0], config.image_size[1] // config.patch_size[1]


def axes_of(model: nn.Module, spec: Spec) -> dict[int, object]:
    """What may differ from one input to the next, as `torch.export` wants it."""
    Dim = torch.export.Dim
    if spec.raw:
        return {axis: Dim(name) for axis, name in enumerate(("batch", "height", "width"))}
    sides: dict[int, object] = {}
    if spec.dynamic_size:
        config = config_of(model)
        for axis, patch, words in (
            (2, config.patch_size[0], "height rows"),
            (3, config.patch_size[1], "width columns"),
        ):
            side, count = words.split()
            whole = config.indivisible == "cut" or patch == 1
            sides[axis] = Dim(side, min=patch) if whole else patch * Dim(count)
    return {0: Dim("batch"), **sides}
