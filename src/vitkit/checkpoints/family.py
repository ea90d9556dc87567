"""What a family of checkpoints is: one shape for every reader and writer.

A reader is a pure function: files as they are in, a `Checkpoint` (configuration, tensors under our names)
out. A writer is its inverse. Adding a family: one file with both, and its row in `families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, Tensors
from vitkit.errors import CheckpointError, ConfigError, did_you_mean
from vitkit.io import parse_json
from vitkit.model.base import Outputs
from vitkit.model.config import AnyConfig, Size, as_size

T = TypeVar("T")
Fields = dict[str, object]  # of a configuration, or of a JSON file
# Read where they are beside weights.
COMPANIONS = ("config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json")
MAX_JSON = 32 << 20  # bytes; a configuration is far smaller


@dataclass
class Checkpoint:
    """A model as data: what a reader returns and a writer takes. Tensors have our names; they may be lazy."""

    config: AnyConfig
    tensors: Tensors
    outputs: Outputs = field(default_factory=Outputs)
    notes: list[str] = field(default_factory=list)  # what was assumed, changed or left out, one line each
    in_file: Callable[[str], str] = lambda name: name  # our name -> the name it has in the file
    format: str = "native"  # a name of FAMILIES, or "zoo"
    source: str = "the checkpoint"  # for errors


@dataclass(frozen=True)
class Opened:
    """Files as they are: tensors under their own names, a header's texts, the JSON files beside them."""

    tensors: LazyTensors  # without what training wraps around a state dict
    path: Path
    header: Mapping[str, str] = field(default_factory=dict)  # of safetensors
    beside: Mapping[str, Table] = field(default_factory=dict)
    notes: Sequence[str] = ()  # about the wrapping
    container: str = ""  # where the state dict was inside the file: "model", "teacher", ...

    def table(self, name: str) -> Table:
        return self.beside.get(name, Table())


@dataclass(frozen=True)
class Written:
    """What is to be in the file or folder."""

    tensors: Tensors
    notes: Sequence[str] = ()  # what the format cannot hold
    beside: Mapping[str, Fields] = field(default_factory=dict)  # JSON files, in a folder
    header: Mapping[str, str] = field(default_factory=dict)  # of safetensors
    texts: Mapping[str, str] = field(default_factory=dict)  # other files, in a folder


class Family(Protocol):
    """A module with these functions; `write` only where its row has endings."""

    matches: Callable[[Opened], bool]
    read: Callable[[Opened, ModelOptions], Checkpoint]
    write: Callable[[Checkpoint], Written]


class Table(dict[str, object]):
    """A JSON object of another system: each value is checked when it is read, and the error says which one is wrong."""

    def __init__(self, values: Mapping[str, object] | None = None, name: str = "config.json") -> None:
        super().__init__(values or {})
        self.name = name

    def _checked(self, key: str, default: T | None, kind: type[T], wanted: str) -> T:
        value = default if self.get(key) is None else self[key]
        if type(value) is kind:
            return value
        raise self.wrong(key, wanted)

    def whole(self, key: str, default: int | None = None) -> int:
        return self._checked(key, default, int, "a whole number")

    def text(self, key: str) -> str:
        return self._checked(key, "", str, "a word")

    def one_of(self, key: str, words: Collection[str], default: str = "") -> str:
        """One of the words that vitkit knows."""
        if (word := self.text(key) or default) in words:
            return word
        known = f"{did_you_mean(word, words)} vitkit reads {', '.join(words)}"
        raise CheckpointError(f"not supported: {key} {word!r} in {self.name}.{known}")

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.get(key)
        if isinstance(value, list) and all(isinstance(v, (int, float)) for v in value):
            return tuple(value)
        raise self.wrong(key, "a list of numbers")

    def size(self, key: str, default: int = 0) -> Size:
        """One number for both axes, or (height, width)."""
        try:
            return as_size(self.get(key, default))
        except ConfigError:
            raise self.wrong(key, "a size, such as 224 or [224, 448]") from None

    def table(self, key: str) -> Table:
        return Table(self._checked(key, {}, dict, "a table"), self.name)

    def words(self, key: str, count: int) -> tuple[str, ...]:
        """So many words, from a list or from a table by number; () when there are not."""
        value = self.get(key)
        words = [value.get(str(i)) for i in range(count)] if isinstance(value, dict) else value
        right = isinstance(words, list) and len(words) == count and all(isinstance(word, str) for word in words)
        return tuple(words) if right else ()  # type: ignore[arg-type]

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: {key}={self.get(key)!r} should be {wanted}; fetch it again")


def read_json(path: Path) -> Table:
    try:
        with path.open("rb") as file:
            value = parse_json(file.read(MAX_JSON))
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__} rather than an object")
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a JSON file that can be read ({e}); fetch it again") from e
    return Table(value, path.name)
