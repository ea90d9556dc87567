"""Write a checkpoint in the format of another system: files and folders, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.checkpoints import big_vision, google, huggingface, native, timm_write, torchvision
from vitkit.checkpoints.layout import Checkpoint, not_kept, only
from vitkit.checkpoints.write import replacing, replacing_folder, write_safetensors
from vitkit.errors import CheckpointError, did_you_mean

FORMATS = ("native", "google", "big_vision", "timm", "huggingface", "torchvision")


def write(checkpoint: Checkpoint, path: str | Path, to: str) -> list[str]:
    """Write, and return one line for each thing that the format cannot hold."""
    path = Path(path)
    check_to(path, to)
    if to == "native":
        native.write(checkpoint, path)
        return []
    if to in ("google", "big_vision"):
        tensors, notes = (google.write if to == "google" else big_vision.write)(checkpoint)
        write_npz(path, tensors)
        return notes + _words_lost(checkpoint)
    if to == "torchvision":
        tensors, notes = torchvision.write(checkpoint)
        write_state_dict(path, tensors)
        return notes + _words_lost(checkpoint)
    if to == "huggingface":
        tensors, about, processor = huggingface.write(checkpoint)
        write_folder(path, tensors, {"config.json": about, "preprocessor_config.json": processor})
        return not_kept(only(checkpoint.config, to), "Hugging Face", position_resize="huggingface")
    tensors, about, notes = timm_write.write(checkpoint)
    if path.suffix in (".safetensors", ".pth", ".pt", ".bin"):
        write_state_dict(path, tensors)
        return notes + _words_lost(checkpoint)
    write_folder(path, tensors, {"config.json": about})
    return notes


def check_to(path: Path, to: str) -> None:
    """The format exists, and the name's ending does not belong to another one, which is most likely a mistake."""
    if to not in FORMATS:
        raise CheckpointError(f"no format is called {to!r}.{did_you_mean(to, FORMATS)} Choose: {', '.join(FORMATS)}")
    endings = {
        "native": (".safetensors",),
        "google": (".npz",),
        "big_vision": (".npz",),
        "torchvision": (".pth", ".pt", ".safetensors"),
        "timm": (".safetensors", ".pth", ".pt", ".bin", ""),
        "huggingface": ("",),
    }[to]
    known = (".safetensors", ".npz", ".pth", ".pt", ".bin")
    if path.suffix in endings or ("" in endings and path.suffix not in known):
        return
    wanted = "a folder" if endings == ("",) else "a file ending in " + " or ".join(e for e in endings if e)
    raise CheckpointError(f"--to {to} writes {wanted}, not {path.name!r}")


def _words_lost(checkpoint: Checkpoint) -> list[str]:
    """A bare file of tensors has no place for words."""
    names = ["class names are not kept: the format has no place for them"] if checkpoint.class_names else []
    return [*names, "the preprocessing is not kept: readers of the format assume that of its family"]


def write_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """As numpy.savez does, one array after the other; bfloat16 as the two unnamed bytes that JAX saves."""
    arrays = {name: _to_numpy(tensor) for name, tensor in tensors.items()}
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.numpy()


def write_state_dict(path: Path, tensors: dict[str, Tensor]) -> None:
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with replacing(path) as file:
        if path.suffix == ".safetensors":
            write_safetensors(file, tensors)
        else:
            # clone: a view would drag its whole storage into the file
            torch.save({name: t.clone() for name, t in tensors.items()}, file)


def write_folder(path: Path, tensors: dict[str, Tensor], about: dict[str, dict[str, Any]]) -> None:
    with replacing_folder(path) as folder:
        for name, value in about.items():
            (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as file:
            write_safetensors(file, tensors)
