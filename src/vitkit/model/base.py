"""What every model offers, and what models are made of: parts that start with proper weights, alone or inside one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import vitkit  # for the public functions that a model offers as methods; each is looked up when it is called
from vitkit.errors import ConfigError, InputError, as_text, did_you_mean
from vitkit.model.config import AnyConfig
from vitkit.model.jsonable import Jsonable
from vitkit.model.merge_plan import MergePlan

OutputKind = Literal["classes", "labels", "values"]
Layers = Sequence[int] | None  # by number, -1 for the last; None: all

P = TypeVar("P", bound="Part")
_making = threading.local()  # .depth: how many parts are being made, one inside the other


class _Outermost(type):
    """Making a part also initialises it, once: the outermost part does it for all within, in its own order."""

    def __call__(cls: type[P], *args: object, **kwargs: object) -> P:  # type: ignore[misc]
        _making.depth = getattr(_making, "depth", 0) + 1
        try:
            part: P = type.__call__(cls, *args, **kwargs)
            if _making.depth == 1:
                with torch.no_grad():
                    part.init_weights()
        finally:
            _making.depth -= 1
        return part


class Part(nn.Module, metaclass=_Outermost):
    """A model or a part of one. The order of `init_weights` decides what a seed gives: never change it."""

    __call__: Callable[..., Tensor]  # runs `forward`

    def init_weights(self) -> None:
        """Give every parameter its first value."""


def lecun_normal_(weight: Tensor) -> None:
    """As jax.nn.initializers: cut at two standard deviations, and widened so that the variance is 1 / inputs."""
    std = weight[0].numel() ** -0.5 / 0.87962566103423978  # what is left of a normal deviate that is cut at 2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@dataclass(frozen=True)
class Outputs(Jsonable):
    """What the numbers of the last layer mean; those of values are (value - mean) / std."""

    kind: OutputKind = "classes"  # exactly one is right; "labels": any number of them; "values": regression
    names: tuple[str, ...] = ()  # in the order of the outputs; () when nobody said
    mean: tuple[float, ...] = ()  # of each value in the training data
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.check_fields()
        object.__setattr__(self, "names", tuple(as_text(name) for name in self.names))


def find_class(word: str, names: Sequence[str] | None, count: int) -> int:
    """The index of a class: a name if there is such a name, else an index ("3", or "#3" which is never a name).

    Names match exactly, then whatever their case, then by one of their synonyms ("tabby, tabby cat").
    """
    exact = [(str(name), i) for i, name in enumerate(names or ())]
    known: dict[str, int] = {}
    synonyms = [(part, i) for name, i in exact for part in name.split(",")]
    for name, i in exact + [(name.strip().lower(), i) for name, i in exact + synonyms]:
        known.setdefault(name, i)  # the first of equal ones counts
    for key in (word, word.strip().lower()):
        if key in known:
            return known[key]
    number = word.strip().removeprefix("#")
    if number.isascii() and number.isdecimal():
        if len(number) < 9 and int(number) < count:
            return int(number)
        raise InputError(f"class {word[:60]} does not exist; the model has classes 0 to {count - 1}")
    if not known:
        raise InputError(f"the model has no class names, so {word[:60]!r} is unknown; give 0 to {count - 1}")
    hint = did_you_mean(word.lower(), known)
    raise InputError(f"no class is called {word[:60]!r}.{hint} Give one of the model's {count} classes, or its index")


def layer_numbers(layers: Layers, count: int) -> list[int]:
    for layer in layers or ():
        if not -count <= layer < count:
            raise InputError(f"layer {layer} does not exist; the model has layers 0 to {count - 1} (or -1 for last)")
    return list(range(count)) if layers is None else [layer % count for layer in layers]


class VisionModel(Part):
    """A ViT, a hybrid or a ResNet."""

    config: AnyConfig
    outputs: Outputs = Outputs()
    load_report: tuple[str, ...] = ()  # what loading assumed or changed, for the user to read
    pretrained: bool = False  # False: the weights are fresh
    mergeable: bool = False  # whether patches can be merged or dropped on their way through the blocks
    gradient_checkpointing: bool = False  # recompute each block in the backward pass: far less memory, 1/3 more time
    _merge: MergePlan = MergePlan()

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the outputs, or None when nobody said."""
        return self.outputs.names or None

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        self.outputs = replace(self.outputs, names=tuple(names or ()))

    @property
    def blocks(self) -> list[nn.Module]:
        """The equal layers that training can freeze, shard or recompute one by one; a ResNet has none."""
        return []

    @property
    def merge(self) -> int | str:
        """Patches that each block merges into others when evaluating (`vitkit.model.merging`); shapes stay as usual.

        8, or with a method and a schedule "pitome:8", "prune:8:late", "tome:0+4+8" (`vitkit.model.merge_plan`).
        """
        return self._merge.spec

    @merge.setter
    def merge(self, spec: int | str) -> None:
        plan = MergePlan.of(spec)
        if plan.per_block and not self.mergeable:
            reason = f"{type(self).__name__} has no tokens that could be merged"
            if kind := getattr(self.config, "position_words", ""):
                reason = f"with positions={kind!r} a merged token has no one place"
            raise ConfigError(f"{reason}; leave merging out for this model")
        if plan.method == "prune" and not getattr(self.config, "class_token", False):
            raise ConfigError("prune asks the class token, and this model has none; use tome or pitome")
        if plan.by_block:
            plan.counts(len(self.blocks))  # or an error why not
        self._merge = plan

    @property
    def merge_plan(self) -> MergePlan | None:
        """None: nothing vanishes."""
        return self._merge if self._merge.per_block else None

    @property
    @abstractmethod
    def classifiers(self) -> list[nn.Linear]:
        """The last layers: none with classes=0, two with a distillation token."""

    @abstractmethod
    def pooled(self, images: Tensor, pad: bool = False) -> Tensor:
        """B C H W -> B D, what the classifier sees."""

    @abstractmethod
    def features(
        self, images: Tensor, layers: Sequence[int] = (-1,), norm: bool = False, grid: bool = False, pad: bool = False
    ) -> list[Tensor]:
        """The states after the given layers (blocks of a ViT, stages of a ResNet; -1 is the last).

        Each is B T D, all tokens; with `grid` B D h w, the patches in their places. `norm` applies the norm
        that follows the last block to each; where the norm comes after pooling instead (or there is none),
        tokens have no norm, and the states stay as they are. Images of any size that the patches divide; with
        `pad` of any size. Nothing behind the deepest of `layers` is computed.
        """

    # --- the public functions, as methods of a model; vitkit/__init__.py knows where they are --------------

    def predict(self, images: object, **options: object) -> vitkit.Prediction | vitkit.Predictions:
        """What is on an image (path, URL, bytes, Pillow, NumPy, tensor), or on each of a list, batch, folder or set.

        One image gives one `Prediction` with `.label`, `.probability` and `.top(5)`; several give a list of them. The
        options are those of `vitkit.predict`.
        """
        found = vitkit.predict(self, images, **options)  # type: ignore[arg-type]  # it checks what it is given
        return found[0] if found.one else found

    def embed(self, images: object, **options: object) -> np.ndarray:
        """The features of images, a row for each; images and options as in `vitkit.embed`."""
        return vitkit.embed(self, images, **options)  # type: ignore[arg-type]

    # --- the three methods of huggingface_hub's mixin -------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name: str, *, revision: str | None = None, **options: object) -> VisionModel:
        """A model of the hub, owner/name, or from a folder that `save_pretrained` wrote; options of `vitkit.load`."""
        local = Path(name).expanduser().exists()
        return vitkit.load(name if local else f"hf:{name}" + (f"@{revision}" if revision else ""), **options)  # type: ignore[arg-type]

    def save_pretrained(self, folder: str | Path) -> None:
        """Weights, configuration and a model card in a folder, as they are pushed."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        import_module("vitkit.hub").write_files(self, Path(folder))

    def push_to_hub(self, repo: str, **options: object) -> str:
        """Upload to owner/name; options as in `vitkit.push`."""
        return vitkit.push(self, repo, **options)  # type: ignore[arg-type]
