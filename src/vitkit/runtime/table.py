"""Every runtime and every export format: one row each, read by open_runtime, export, tune, predict, serve and --help.

To add one: a file with the functions that `Row` names, and a row here. No torch, so that `vitkit --help` answers
at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vitkit.errors import ConfigError, MissingPackage, did_you_mean


@dataclass(frozen=True)
class Row:
    """The module of a runtime has `build(model, choice, spec) -> Runtime`. That of a format, a file that runs without
    vitkit, has `write(model, path, metadata, spec)` and `open_file(path, name, threads) -> Runtime`."""

    module: str  # of this package, or anywhere
    about: str
    packages: tuple[str, ...] = ()  # what running a model imports
    making: tuple[str, ...] = ()  # what making one of ours imports besides
    extra: str = ""  # of vitkit, which installs them
    int8: tuple[str, ...] | None = None  # packages that int8 needs besides; None: it has no int8
    bf16: bool = False  # whether it can multiply in bfloat16
    suffix: str = ""  # of a format
    runs_code: bool = False  # a format whose files may: `open_file` has the argument `trust`, a SHA-256
    compiler: bool = False  # a runtime that needs one for C++
    on_cpu: bool = False  # a runtime that computes there, whatever PyTorch could use

    def missing(self, int8: bool = False, making: bool = True) -> str | None:
        """The first package that is not installed."""
        wanted = (*self.packages, *(self.making if making else ()), *((self.int8 or ()) if int8 else ()))
        return next((p for p in wanted if importlib.util.find_spec(p) is None), None)

    def usable(self, int8: bool = False) -> bool:
        if (int8 and self.int8 is None) or (self.compiler and compiler() is None):
            return False
        return self.missing(int8) is None

    def load(self, what: str, int8: bool = False, making: bool = True) -> ModuleType:
        """The module, or an error with what to choose or to install."""
        if int8 and self.int8 is None:
            able = one_of(name for name, row in RUNTIMES.items() if row.int8 is not None)
            raise ConfigError(f"{what} has no int8; choose {able}")
        if (package := self.missing(int8, making)) is not None:
            raise MissingPackage(package, what, self.extra)
        return importlib.import_module(self.module, "vitkit.runtime")


_COMPILED = "`torch.compile`; fp32 and bf16; the first batch of each size takes a minute"
_ONNX = (("onnxruntime",), ("onnx", "onnxscript"), "onnx", ())  # packages for running, making; extra; packages for int8
_OPENVINO = (("openvino",), (), "openvino", ("nncf",))
RUNTIMES = {
    "eager": Row(".eager", "PyTorch as it is; fp32 and bf16", bf16=True),
    "compiled": Row(".eager", _COMPILED, compiler=True, bf16=True),
    "onnx": Row(".onnx", "ONNX Runtime; fp32 and int8", *_ONNX, on_cpu=True),
    "openvino": Row(".openvino", "OpenVINO; fp32, bf16 and int8", *_OPENVINO, on_cpu=True, bf16=True),
}
METADATA = ("vitkit", "config", "preprocessing", "classes", "outputs")  # what an exported file says of itself, in JSON
FORMATS = {  # `tune` keeps a model for a runtime in the format of the same name
    "onnx": Row(".onnx", "ONNX Runtime, and whatever else reads ONNX", *_ONNX, suffix=".onnx"),
    "openvino": Row(".openvino", "OpenVINO", *_OPENVINO, suffix=".xml"),
    "torch-export": Row(".eager", "PyTorch, without the code of the model", suffix=".pt2", runs_code=True),
}


def find(what: str, name: str, table: Mapping[str, Row], *also: str) -> Row:
    """The row of that name; `also` are names that the user may give besides."""
    if name not in table:
        known = (*also, *table)
        raise ConfigError(f"there is no {what} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    return table[name]


def format_of(path: str | Path) -> str | None:
    """The export format of a file, by its suffix; None: it is no exported file."""
    return next((name for name, row in FORMATS.items() if row.suffix == Path(path).suffix), None)


def need_format(path: str | Path) -> str:
    if (name := format_of(path)) is None:
        raise ConfigError(f"{path} must end with {one_of(row.suffix for row in FORMATS.values())}")
    return name


def one_of(words: Iterable[str]) -> str:
    """a, b or c"""
    *before, last = words
    return f"{', '.join(before)} or {last}" if before else last


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on a CPU."""
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++", "cl") if c and shutil.which(c)), None)
