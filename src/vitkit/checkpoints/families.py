"""All families of checkpoints, in the order of recognition. To add one: a file of its name, and its row here.

This module imports no torch, so that `--help` can read the table.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from vitkit.checkpoints.family import Family


class Row(NamedTuple):
    about: str  # for the table in docs/checkpoints.md
    endings: tuple[str, ...] = ()  # of what `--to` writes: "" is a folder; () where there is no writer
    package: str = "vitkit.checkpoints"


FAMILIES = {
    "native": Row("vitkit's own: one `.safetensors` with configuration, class names, preprocessing", (".safetensors",)),
    "huggingface_code": Row(
        "folders of Hugging Face that bring their own code, `modeling_vitkit.py`, for every model of vitkit", ("",)
    ),
    "google": Row("Google vit_jax `.npz`, hybrids, 21k heads with their tanh layer", (".npz",)),
    "big_vision": Row("big_vision `.npz`, layers apart or stacked, MAP head, sin-cos positions", (".npz",)),
    "huggingface": Row(
        "Hugging Face folders: ViT, DeiT, MAE, MSN, I-JEPA, DINOv2, DINOv3, BEiT, Data2Vec, YOLOS, Pixio, InternVL,"
        " AIMv2; the vision towers of CLIP, SigLIP and SigLIP 2, also inside the whole model",
        ("",),
    ),
    "torchvision": Row("torchvision state dicts", (".pth", ".pt", ".safetensors")),
    "vit_pytorch": Row(
        "vit-pytorch's `ViT` and `SimpleViT`, also behind its distillation wrapper (heads must be stated)",
        (".pth", ".pt", ".safetensors"),
    ),
    "perception": Row("Meta's Perception Encoder `.pt`: Core, Lang and Spatial, the image tower"),
    "clip": Row("the image tower of OpenAI's CLIP and open_clip"),
    "dinov3": Row("Meta's own DINOv3 `.pth`"),
    "eva": Row("EVA's and EVA-02's own `.pt`, with and without heads"),
    "timm": Row(
        "timm: a state dict, or a hub folder with `config.json` (ViT, DeiT, EVA, BEiT, DINOv3, PE, RelPos, hybrids)",
        (".safetensors", ".pth", ".pt", ".bin", ""),
    ),
    "facebook": Row("DeiT, DINO, MAE, DINOv2 `.pth`, inside `model`, `teacher` or `state_dict`"),
}
ENDINGS = {ending for row in FAMILIES.values() for ending in row.endings if ending}


def formats() -> list[str]:
    """What `--to` can write."""
    return [name for name, row in FAMILIES.items() if row.endings]


def family(name: str) -> Family:
    return cast("Family", importlib.import_module(f"{FAMILIES[name].package}.{name}".strip(".")))
