"""The systems vitkit is compared with, importable beside a CPU-only torch.

torchvision's wheel is built for one torch; beside another its compiled operators cannot be loaded, and
then importing torchvision (hence timm) fails because the operators do not even have names. Nothing here
runs those operators, so their names are all that is needed: `import_torchvision` registers them.

It needs no vitkit: peers also open what vitkit wrote in interpreters that have none (hence the operators are named here
and in `vitkit verify`). Test modules say `import peers`; benchmarks put `tests/` on `sys.path` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

MISSING_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # operators live as long as this object


def _has_own_operators() -> bool:
    """Whether torchvision's compiled operators can be loaded here."""
    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec else None
    for binary in Path(folders[0]).glob("_C.*") if folders else ():
        try:
            torch.ops.load_library(str(binary))
            return True
        except OSError:
            pass
    return False


def _name_operators() -> None:
    global _library
    if hasattr(torch.ops.torchvision, "nms") or _has_own_operators():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for schema in MISSING_OPERATORS:
        _library.define(schema)


def _quietly(name: str) -> ModuleType:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded by a test
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    _name_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def import_torchvision() -> ModuleType:
    _quietly("torchvision.models.vision_transformer")
    return _quietly("torchvision")


def import_timm() -> ModuleType:
    _quietly("timm.layers")
    return _quietly("timm")


def import_transformers() -> ModuleType:
    return _quietly("transformers")


def import_vit_pytorch() -> ModuleType:
    return _quietly("vit_pytorch")


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, scale: float = 0.05) -> nn.Module:
    """Give every parameter and floating-point buffer small random values, so that no zero hides a mistake.

    Scales and variances of norms are drawn around 1. Returns the model, in evaluation mode.
    """
    random = torch.Generator().manual_seed(seed)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    around_one = {id(getattr(norm, name, None)) for norm in norms for name in ("weight", "running_var")}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            centre = 1.0 if id(tensor) in around_one else 0.0
            tensor.copy_(centre + scale * torch.randn(tensor.shape, generator=random))
    return model.eval()
