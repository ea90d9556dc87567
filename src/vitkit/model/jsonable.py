"""What every configuration is made of: a frozen dataclass that checks its fields and goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, TypeVar, get_args, get_type_hints

from vitkit.errors import ConfigError, did_you_mean

C = TypeVar("C", bound="Jsonable")


class Jsonable:
    """JSON in and out for a dataclass; unknown and misspelt keys are errors."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls: type[C], values: dict[str, Any]) -> C:
        if not isinstance(values, dict):
            raise ConfigError(f"{cls.__name__} wants a JSON object, not {type(values).__name__}")
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"{cls.__name__} has no field {key!r}.{did_you_mean(key, known)} "
                    f"A newer vitkit may have written it: pip install -U vitkit"
                )
        try:
            return cls(**values)
        except TypeError as e:  # a required field is absent, or a value is of a strange type
            raise ConfigError(f"{cls.__name__}: {e}; give every required field") from e

    @classmethod
    def from_json(cls: type[C], text: str) -> C:
        try:
            values = json.loads(text)
        except ValueError as e:
            raise ConfigError(f"{cls.__name__} is not valid JSON ({e}); write it with to_json()") from e
        return cls.from_dict(values)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check_fields(self) -> None:
        """Every Literal field holds one of its words, every int and float field a number."""
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if words := get_args(kind) if str(kind).startswith("typing.Literal") else ():
                if value not in words:
                    hint = did_you_mean(str(value), words)
                    raise ConfigError(
                        f"{name}={value!r} is not known.{hint} Choose one of: {', '.join(filter(None, words))}"
                    )
            elif kind is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name}={value!r} must be a whole number")
            elif kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be true or false")
            elif kind is float:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                    raise ConfigError(f"{name}={value!r} must be a finite number")
                self._set(name, float(value))
