"""torch.compile: PyTorch's own compiler. The first batch of each size takes a minute, and needs a C++ compiler."""

from __future__ import annotations

import os
import shutil
from typing import cast

import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.runtime.base import described, merged
from vitkit.runtime.eager import Eager


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on a CPU."""
    return next((c for c in (os.environ.get("CXX"), "g++", "clang++", "cl") if c and shutil.which(c)), None)


class Compiled(Eager):
    def __init__(self, model: nn.Module, merge: int = 0, threads: int | None = None) -> None:
        if compiler() is None and next(model.parameters()).device.type == "cpu":
            raise ConfigError("torch.compile needs a C++ compiler; install g++ or clang, or choose another --runtime")
        super().__init__(model, threads=threads)
        self.model = cast(nn.Module, torch.compile(merged(model, merge)))
        self.name = described("compiled", merge=merge)
