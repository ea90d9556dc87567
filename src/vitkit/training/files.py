"""A run from a file: settings in .toml or .json, or the config.json of a run, which reproduces it; and their schema.

The keys are the fields of `TrainConfig`. Unknown ones are errors with a suggestion; what an option or `--set` says
wins over the file. A run's own config.json holds nothing that is left open, so it gives the same run bit for bit; its
folder is not taken over, nor the name of a recipe, whose values it holds already.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

from vitkit.data.augment import PRESETS, Augment
from vitkit.errors import ConfigError, did_you_mean
from vitkit.io import parse_json, read_regular
from vitkit.model.jsonable import Jsonable
from vitkit.training.config import TABLES, TrainConfig, parse_duration

Settings = dict[str, object]
_NAME = "config.json"


def read_settings(path: str | Path) -> Settings:
    """The settings that a file, or the config.json of a run, holds; checked by name."""
    path = Path(path) / _NAME if Path(path).is_dir() else Path(path)
    values = _parse(path)
    if isinstance(run := values.get("train"), dict):  # a run wrote it; the rest says how it went
        values = {key: value for key, value in run.items() if key not in ("out", "recipe")}
    return checked(values, f"{path}: ")


def _parse(path: Path) -> Settings:
    hint = "give a .toml or .json file, or the folder of a run"
    if path.suffix.lower() not in (".toml", ".json"):
        raise ConfigError(f"--config {path} is no configuration; {hint}")
    try:
        text = read_regular(path).decode("utf-8-sig")
        values = tomllib.loads(text) if path.suffix.lower() == ".toml" else parse_json(text)
    except FileNotFoundError:
        raise ConfigError(f"--config {path} is not there; {hint}") from None
    except (OSError, ValueError, RecursionError) as e:  # TOML that is nested too deeply
        raise ConfigError(f"--config {path} cannot be read ({e}); correct it, or {hint}") from e
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold settings by name, not {type(values).__name__}; {hint}")
    return values


def checked(settings: Mapping[str, object], where: str = "") -> Settings:
    """The same settings, once every name is known; a budget may be written as 5m, an augmentation by its name."""
    known = TrainConfig.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise ConfigError(f"{where}training has no setting {name!r}.{did_you_mean(name, known)}")
    found = dict(settings)
    if isinstance(budget := found.get("budget"), str):
        found["budget"] = parse_duration(budget)
    if isinstance(augment := found.get("augment"), dict):
        for name in augment:
            if name not in Augment.__dataclass_fields__:
                hint = did_you_mean(name, Augment.__dataclass_fields__)
                raise ConfigError(f"{where}augment has no knob {name!r}.{hint}")
    return found


def as_toml(settings: Mapping[str, object]) -> str:
    """Settings as a file that `read_settings` reads again; tables last, as TOML wants them; None is left out."""
    plain = [f"{key} = {_toml(value)}" for key, value in settings.items() if not isinstance(value, dict | None)]
    tables = [(key, value) for key, value in settings.items() if isinstance(value, dict) and value]
    for key, table in tables:
        plain += ["", f"[{key}]", *(f"{_key(k)} = {_toml(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(plain) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = re.sub(r'[\x00-\x1f"\\\x7f]', lambda c: f"\\u{ord(c[0]):04x}", value)
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(k)} = {_toml(v)}' for k, v in value.items())}}}"
    return repr(value)


# --- the schema ----------------------------------------------------------------------------------------


def schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of a configuration file, for editors: types, words, defaults, meanings."""
    fields = _properties(TrainConfig)
    fields["budget"] = {**fields["budget"], "type": ["number", "string"]}
    knobs = {"type": "object", "properties": _properties(Augment), "additionalProperties": False}
    note = {key: value for key, value in fields["augment"].items() if key == "description"}
    fields["augment"] = {"anyOf": [{"enum": list(PRESETS)}, knobs, {"type": "null"}], **note}
    for name, table in TABLES.items():
        fields[name] = {**fields[name], "enum": ["", *table]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training run of vitkit",
        "type": "object",
        "properties": fields,
        "additionalProperties": False,
    }


def _properties(of: type[Jsonable] | type[Augment]) -> dict[str, dict[str, object]]:
    hints, notes = get_type_hints(of), _comments(of)
    found = {}
    for one in dataclasses.fields(of):
        plain = one.default is not dataclasses.MISSING and one.default is not None
        default = one.default if plain else None
        default = list(default) if isinstance(default, tuple) else default
        found[one.name] = {
            **_kind(hints[one.name]),
            **({"description": notes[one.name]} if one.name in notes else {}),
            **({"default": default} if plain else {}),
        }
    return found


def _kind(hint: object) -> dict[str, object]:
    simple = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}
    origin = get_origin(hint) or hint
    if origin is Literal:
        return {"enum": list(get_args(hint))}
    if origin is tuple:
        return {"type": "array"} if Ellipsis in get_args(hint) else {"type": ["array", "integer"]}  # sizes: 224
    if origin is Union or type(hint).__name__ == "UnionType":
        return {"anyOf": [_kind(part) for part in get_args(hint)]}
    return {"type": simple[origin]} if origin in simple else {}


def _comments(of: type) -> dict[str, str]:
    """What stands behind a field in its class: the words that readers of the code have."""
    return dict(re.findall(r"^    (\w+): [^\n]*?  # ([^\n]+)$", inspect.getsource(of), re.M))
