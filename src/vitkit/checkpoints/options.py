"""What a user may state about a model, for Python and for every command, checked once. This module imports no torch.

load("weights.pth", image_size=384, heads=6)  # ModelOptions.of
vitkit predict weights.pth images --image-size 384 --heads 6  # ModelOptions.parse
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Literal, get_args

from vitkit.errors import CheckpointError, ConfigError, did_you_mean
from vitkit.io import parse_json
from vitkit.model.config import ACTIVATIONS, RESIZES, ActivationWord, ResizeWord, Size, ViTConfig, as_size

DType = Literal["float32", "float16", "bfloat16", "float64"]
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ModelOptions:
    """None leaves a thing as the file has it.

    What differs from the file is adapted: `image_size`, `patch_size`, `channels`, `classes`, `dtype`; `resize`
    says how positions are resized. What weights cannot tell is stated: `heads`, `activation`, and in `fields`
    any other field of `ViTConfig`. `map` has the names of a home-made model, a .toml file or its tables.
    """

    image_size: Size | None = None
    patch_size: Size | None = None
    channels: int | None = None
    classes: int | None = None
    resize: ResizeWord | None = None
    dtype: DType | None = None
    heads: int | None = None
    activation: ActivationWord | None = None
    map: str | Mapping[str, object] | None = None
    fields: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, **values: object) -> ModelOptions:
        """From values as Python has them: image_size=224, (224, 448) or "224x448", dtype=torch.float16."""
        return cls._read(values, lambda name, value: f"{name}={value!r}")

    @classmethod
    def parse(cls, fields: Sequence[str] | None = None, **texts: str | int | None) -> ModelOptions:
        """From the words of a command line; `fields` are FIELD=VALUE, as `--set` takes them."""
        values: dict[str, object] = dict(texts)
        for item in fields or ():
            name, equals, text = item.partition("=")
            if not equals or not name:
                raise CheckpointError(f"--set {item!r} is not FIELD=VALUE; write, for example, --set norm_eps=1e-5")
            values[name] = text
            with suppress(ValueError):
                values[name] = parse_json(text)
        return cls._read(values, lambda name, value: f"--{name.replace('_', '-')} {value}")

    @classmethod
    def _read(cls, values: Mapping[str, object], shown: Callable[[str, object], str]) -> ModelOptions:
        """`shown` spells an option as the user gave it."""
        typed: dict[str, object] = {}
        fields = {name: value for name, value in values.items() if name not in _READ}
        for name in fields.keys() - ViTConfig.__dataclass_fields__.keys():
            near = did_you_mean(name, [*_READ, *ViTConfig.__dataclass_fields__])
            raise CheckpointError(f"a model has no option {name!r}, and ViTConfig has no such field.{near}")
        for name, read in _READ.items():
            if (value := values.get(name)) is not None:
                try:
                    typed[name] = read(value)
                except ValueError as e:
                    raise CheckpointError(f"{shown(name, value)} {e}") from None
        return cls(**typed, fields=fields)  # type: ignore[arg-type]  # each was read by its own row of _READ

    @property
    def stated(self) -> dict[str, object]:
        """The fields of `ViTConfig` that are stated rather than adapted."""
        named = {"heads": self.heads, "activation": self.activation}
        return {**self.fields, **{name: value for name, value in named.items() if value is not None}}

    @property
    def changes(self) -> dict[str, object]:
        """Everything but the dtype as fields of `ViTConfig`: for a model that is made, not loaded."""
        named = {name: getattr(self, name) for name in ("image_size", "patch_size", "channels", "classes")}
        named["position_resize"] = self.resize
        return {**self.stated, **{name: value for name, value in named.items() if value is not None}}


def _size(value: object) -> Size:
    try:
        return as_size(value)
    except ConfigError:
        raise ValueError("is not a size; write 224 or 224x448 (height x width)") from None


def _whole(value: object, least: int) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"is not a whole number of at least {least}")
    return number


def _one_of(value: object, words: Sequence[str]) -> str:
    word = str(value).removeprefix("torch.")
    word = _SHORT.get(word, word)
    if word not in words:
        raise ValueError(f"is not known; choose {', '.join(words)}.{did_you_mean(word, words)}")
    return word


def _map(value: object) -> str | Mapping[str, object]:
    if not isinstance(value, (str, PathLike, Mapping)):
        raise ValueError("is no map of names; give a .toml file, or its tables as a dictionary")
    return value if isinstance(value, Mapping) else str(value)


_READ: dict[str, Callable[[object], object]] = {
    "image_size": _size,
    "patch_size": _size,
    "channels": partial(_whole, least=1),
    "classes": partial(_whole, least=0),
    "resize": partial(_one_of, words=RESIZES),
    "dtype": partial(_one_of, words=get_args(DType)),
    "heads": partial(_whole, least=1),
    "activation": partial(_one_of, words=ACTIVATIONS),
    "map": _map,
}
