"""PyTorch's own exported program, .pt2: run by PyTorch without the code of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.runtime.example import example_of
from vitkit.runtime.onnx import on_cpu_in_fp32


class Exported:
    """A .pt2 file."""

    def __init__(self, path: str | Path) -> None:
        self.metadata: dict[str, str] = dict.fromkeys(KEYS, "")
        try:
            program = torch.export.load(str(path), extra_files=self.metadata)
        except Exception as e:  # zip, pickle and schema errors alike
            raise ConfigError(f"{path} is no exported program ({str(e).splitlines()[0]}); export it again") from e
        self.module = program.module()
        self.name = "torch-export"

    @torch.no_grad()
    def run(self, images: Tensor) -> Tensor:
        return self.module(images).float()


KEYS = ("vitkit", "config", "preprocessing", "classes")


def to_program(model: nn.Module, raw: bool = False) -> Any:
    batch, height, width = (torch.export.Dim(n) for n in ("batch", "height", "width"))
    shapes = {0: batch, 1: height, 2: width} if raw else {0: batch}
    with torch.no_grad():
        return torch.export.export(
            on_cpu_in_fp32(model), (example_of(model, raw),), dynamic_shapes=(shapes,), strict=False
        )


def save(program: Any, path: Path, metadata: dict[str, str]) -> None:
    torch.export.save(program, str(path), extra_files=metadata)
