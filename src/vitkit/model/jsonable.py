"""What every configuration is made of: a frozen dataclass that checks its fields and goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping
from typing import ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vitkit.errors import ConfigError, did_you_mean
from vitkit.io import parse_json

Json = Union[None, bool, int, float, str, list["Json"], dict[str, "Json"]]  # noqa: UP007 - recursive
C = TypeVar("C", bound="Jsonable")


class Jsonable:
    """JSON in and out for a dataclass; unknown and misspelt keys are errors."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]
    later: ClassVar[Collection[str]] = ()  # fields that version 0.1 had not

    def to_dict(self) -> dict[str, Json]:
        """Fields that came later are left out while they say nothing: the same text, and 0.1 can read it."""
        values = dataclasses.asdict(self)
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name in self.later and value == one.default:
                del values[one.name]
            elif isinstance(value, Jsonable):
                values[one.name] = value.to_dict()
        return values

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, object]) -> C:
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__} wants a JSON object, not {type(values).__name__}")
        cls.check_names(values, " A newer vitkit may have written it: pip install -U vitkit")
        try:
            return cls(**values)
        except TypeError as e:  # a required field is absent, or a value is of a strange type
            raise ConfigError(f"{cls.__name__}: {e}; give every required field") from e

    @classmethod
    def from_json(cls: type[C], text: str) -> C:
        try:
            values = parse_json(text)
        except ValueError as e:
            raise ConfigError(f"{cls.__name__} is not valid JSON ({e}); write it with to_json()") from e
        return cls.from_dict(values)

    @classmethod
    def check_names(cls, names: Collection[str], advice: str = "") -> None:
        known = [f.name for f in dataclasses.fields(cls)]
        for name in names:
            if name not in known:
                raise ConfigError(f"{cls.__name__} has no field {name!r}.{did_you_mean(name, known)}{advice}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def check_fields(self) -> None:
        """Every field of given words holds one of them, every number field a number; JSON's types become ours."""
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if get_origin(kind) is tuple:
                if not isinstance(value, (tuple, list)):
                    raise ConfigError(f"{name}={value!r} must be a list")
                if get_args(kind)[0] is str and not all(isinstance(one, str) and _is_text(one) for one in value):
                    raise ConfigError(f"{name}={value!r} must be a list of texts without a NUL")
                self._set(name, tuple(value))
            elif get_origin(kind) is dict and not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be a table of names and values")
            elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Jsonable):
                self._set(name, kind.from_dict(value))
            elif words := _words(kind):
                if value not in words:
                    hint, choices = did_you_mean(str(value), words), ", ".join(filter(None, words))
                    raise ConfigError(f"{name}={value!r} is not known.{hint} Choose one of: {choices}")
            elif kind is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name}={value!r} must be a whole number")
            elif kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be true or false")
            elif kind is float:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
                    raise ConfigError(f"{name}={str(value)[:60]} must be a finite number")
                self._set(name, float(value))
            elif kind in (str, str | None) and not _is_text(value):
                raise ConfigError(f"{name}={value!r} must be text without a NUL")


def _is_text(value: object) -> bool:
    """Or a path, or nothing."""
    return value is None or (isinstance(value, (str, os.PathLike)) and "\0" not in str(value))


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _words(kind: object) -> Collection[str]:
    """The words of a Literal, or of a table: Annotated[str, TABLE]; none for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return kind.__metadata__[0] if hasattr(kind, "__metadata__") else ()
