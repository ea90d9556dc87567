"""PyTorch as it is, which every other runtime is compared with; torch.compile, PyTorch's own compiler; and its own
exported program, .pt2, which PyTorch runs without the code of the model."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.io import sha256
from vitkit.runtime.base import Choice, Runtime, Spec, axes_of, example_of, reduced
from vitkit.runtime.table import METADATA, compiler
from vitkit.world import using_threads


class Eager(Runtime):
    def __init__(self, model: nn.Module, choice: Choice = Choice()) -> None:  # noqa: B008
        first = next(model.parameters())
        super().__init__(choice.name, first.device)
        self.model, self.dtype = reduced(model.eval(), choice.merge, choice.scale), first.dtype
        if choice.bf16:
            self.model, self.dtype = copy.deepcopy(self.model).to(torch.bfloat16), torch.bfloat16
        self.threads = choice.threads

    @torch.inference_mode()
    def compute(self, images: Tensor) -> Tensor:
        with using_threads(self.threads):
            return self.model(images.to(self.dtype))


def build(model: nn.Module, choice: Choice, spec: Spec) -> Eager:
    runtime = Eager(model, choice)
    if choice.runtime == "compiled":
        if runtime.device.type == "cpu" and compiler() is None:
            raise ConfigError("torch.compile needs a C++ compiler; install g++ or clang, or choose another --runtime")
        runtime.model = cast(nn.Module, torch.compile(runtime.model))
    return runtime


class Exported(Runtime):
    """A .pt2 file. PyTorch unpickles parts of it and evaluates expressions in it: whoever made it can run code here,
    so the user has to name its SHA-256 with `trust`. The very bytes that were compared are opened."""

    def __init__(
        self, path: Path, name: str = "torch-export", threads: int | None = None, trust: str | None = None
    ) -> None:
        metadata = dict.fromkeys(METADATA, "")
        content = path.read_bytes()
        check_trust(path, sha256(content), trust)
        try:
            self.module = torch.export.load(io.BytesIO(content), extra_files=metadata).module()
        except Exception as e:  # zip, pickle and schema errors alike
            raise ConfigError(f"{path} is no exported program ({str(e).splitlines()[0]}); export it again") from e
        super().__init__(name, metadata={key: text for key, text in metadata.items() if text})

    @torch.no_grad()
    def compute(self, images: Tensor) -> Tensor:
        return self.all_outputs(images)[0]

    @torch.no_grad()
    def all_outputs(self, images: Tensor) -> list[Tensor]:
        found: Tensor | tuple[Tensor, ...] = self.module(images)
        return [found] if isinstance(found, Tensor) else list(found)


open_file = Exported


def check_trust(path: Path, found: str, trust: str | None) -> None:
    if trust is None:
        why = f"opening {path} may run code that is inside (PyTorch unpickles parts of a .pt2), so it was not opened"
        raise ConfigError(f"{why}. Its SHA-256 is {found}; if you trust who made it, add --trust {found}")
    if trust.strip().lower() != found:
        raise ConfigError(f"{path} was not opened: --trust names SHA-256 {trust}, and the file has {found}")


def write(model: nn.Module, path: Path, metadata: Mapping[str, str], spec: Spec) -> None:
    shapes = (axes_of(model, spec),)
    with torch.no_grad():
        program = torch.export.export(model, (example_of(model, spec),), dynamic_shapes=shapes, strict=False)
    whole = io.BytesIO()  # PyTorch's writer ends the process when the disk is full
    torch.export.save(program, whole, extra_files=dict(metadata))
    path.write_bytes(whole.getbuffer())
