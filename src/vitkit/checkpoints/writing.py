"""Write a checkpoint in the format of any family that has a writer: all or nothing, and the same way every time.

After that what the writers share: which models a format can hold, and what it cannot say about them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from vitkit.checkpoints.families import ENDINGS, FAMILIES, family, formats
from vitkit.checkpoints.family import Checkpoint, Fields, Written
from vitkit.checkpoints.tensors import WITH_LEADING_AXIS, NameMap, Tensors
from vitkit.errors import CheckpointError, did_you_mean
from vitkit.io import canonical, replacing, replacing_folder, write_json, write_text
from vitkit.model.base import Outputs
from vitkit.model.config import Preprocessing, Size, StemConfig, ViTConfig
from vitkit.model.patches import linear_to_conv
from vitkit.model.words import VARIANTS

_WHOLE = ("native", "huggingface_code")  # formats that hold all there is to say of a model
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write(checkpoint: Checkpoint, path: str | Path, to: str) -> list[str]:
    """Write, and return one line for each thing that the format cannot hold."""
    path = Path(path)
    check_to(path, to)
    written = family(to).write(checkpoint)
    if folder := path.suffix not in ENDINGS:
        with replacing_folder(path) as new:
            for name, value in written.beside.items():
                write_json(new / name, value)
            for name, text in written.texts.items():
                write_text(new / name, text)
            write_file(new / "model.safetensors", written)
    else:
        write_file(path, written)
    return [*written.notes, *([] if to in _WHOLE else _words_lost(checkpoint.outputs, to, folder))]


def check_to(path: Path, to: str) -> None:
    """The format exists, and the name's ending does not belong to another one, which is most likely a mistake."""
    if to not in formats():
        known = f"{did_you_mean(to, formats())} Choose: {', '.join(formats())}"
        raise CheckpointError(f"no format is called {to!r}.{known}")
    endings = FAMILIES[to].endings
    if path.suffix not in endings and not ("" in endings and path.suffix not in ENDINGS):
        files = " or ".join(filter(None, endings))
        what = f"a file ending in {files}" if files else "a folder"
        raise CheckpointError(f"--to {to} writes {what}, not {path.name!r}")


def _words_lost(outputs: Outputs, to: str, folder: bool) -> list[str]:
    """A bare file of tensors has no place for words, and a folder not for all of them."""
    kind = f"that the outputs are {outputs.kind} is not kept: readers of the format take them for classes"
    statistics = f"mean {outputs.mean} and std {outputs.std} of the values are not kept: value = output * std + mean"
    lost = {
        "class names are not kept: the format has no place for them": outputs.names and not folder,
        kind: outputs.kind != "classes" and to != "huggingface",
        statistics: outputs.mean,
        "the preprocessing is not kept: readers of the format assume that of its family": not folder,
    }
    return [line for line, is_lost in lost.items() if is_lost]


def write_file(path: Path, written: Written) -> None:
    """One file; its kind follows from its ending."""
    tensors = written.tensors
    with replacing(path) as file:
        if path.suffix == ".npz":
            np.savez(file, **{name: _to_numpy(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]
        elif path.suffix in (".pth", ".pt", ".bin"):
            # clone: a view would drag its whole storage into the file
            torch.save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, file)
        else:
            write_safetensors(file, tensors, safetensors_header(tensors, written.header))


def _to_numpy(tensor: Tensor) -> object:
    """bfloat16 as the two unnamed bytes that JAX saves."""
    tensor = tensor.detach().cpu()
    half = tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.int16).numpy().view("V2") if half else tensor.numpy()


def safetensors_header(tensors: Tensors, metadata: Mapping[str, str]) -> Fields:
    """The header as a table; the tensors follow it widest dtype first, so that each is aligned to its own size."""
    header: Fields = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}; a checkpoint holds floating-point weights")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def write_safetensors(file: BinaryIO, tensors: Tensors, header: Fields) -> None:
    """Nothing depends on time, path or machine; one tensor at a time is in memory twice at most."""
    text = canonical(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in list(header)[1:]:
        flat = tensors[name].detach().to("cpu").contiguous().view(-1)
        if flat.numel():
            file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]


# What formats for the paper's own model can hold; those that hold more say so after it.
PAPER: Fields = {"positions": "learned", "positioned_prefix": ("all", "class"), "activation": ("gelu", "gelu-tanh")}
PAPER |= {"class_token": True, "distillation_token": False, "registers": 0, "pooling": "cls", "projection": 0}
PAPER |= {"pre_norm": False, "norm_after_pooling": False, "layer_scale": None, "qkv_bias": True}


def held(checkpoint: Checkpoint, format: str, **wanted: object) -> tuple[ViTConfig, dict[str, Tensor]]:
    """The configuration, if its fields have `wanted` values, and the tensors with the patches as a convolution."""
    config, tensors = vit_of(checkpoint, format)
    paper = {name: (getattr(ViTConfig, name),) for name in VARIANTS}  # what a format does not state, it cannot hold
    for name, value in (paper | wanted).items():
        values = value if isinstance(value, tuple) else (value,)
        if (found := getattr(config, name)) not in values:
            only = f"(only {' or '.join(map(repr, values))}); --to native holds every model"
            raise CheckpointError(f"{format} cannot hold a model with {name}={found!r} {only}")
    return config, tensors


def vit_of(checkpoint: Checkpoint, format: str) -> tuple[ViTConfig, dict[str, Tensor]]:
    """A ViT of any kind, with the patches as a convolution."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    if not isinstance(config, ViTConfig) or not isinstance(config.stem, StemConfig | None):
        what = "a stem of plain convolutions" if isinstance(config, ViTConfig) else "a ResNet"
        raise CheckpointError(f"{format} cannot hold {what}; write it with --to native, or --to huggingface_code")
    if config.patch_embedding == "linear":
        tensors["patches.weight"] = linear_to_conv(tensors["patches.weight"], config.patch_kernel)
    return config, tensors


def fold_class_row(tensors: dict[str, Tensor], rows: int) -> str:
    """Add the position of the class token to the token, for formats whose table has no `rows` before the patches."""
    table = tensors["positions.learned"]
    tensors["positions.learned"] = table[rows:]
    if rows:
        tensors["class_token"] = tensors["class_token"] + table[:1]
    return "the class token's position is added to the class token, as the format has no row for it"


def under(names: NameMap, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors as other PyTorch systems name and hold them."""
    return {names.theirs(name): t[None] if name in WITH_LEADING_AXIS else t for name, t in tensors.items()}


def per_channel(values: tuple[float, ...], channels: int) -> list[float]:
    return list(values) * (channels if len(values) == 1 else 1)


def one_or_both(size: Size) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def theirs(table: Mapping[str, str], ours: str) -> str:
    """The first of their words for one of ours."""
    return next(word for word, meaning in table.items() if meaning == ours)


def interpolation(pre: Preprocessing) -> str:
    """In the words of libraries that resize with Pillow."""
    return pre.interpolation.removesuffix("-plain")


def not_kept(config: ViTConfig, format: str, meant: Fields, numerics: str = "", pillow: bool = True) -> list[str]:
    """One line for each field that changes results and that the format cannot state; `meant` is what it implies."""
    found = {name: getattr(config, name) for name in meant}
    lines = [f"{k}={found[k]!r} is not kept: {format} means {v!r}" for k, v in meant.items() if found[k] != v]
    if numerics and isinstance(config.stem, StemConfig) and config.stem.numerics != numerics:
        difference = f"{format} means {numerics!r} (logits differ by about 1e-4)"
        lines.append(f"stem.numerics={config.stem.numerics!r} is not kept: {difference}")
    if pillow and interpolation(config.preprocessing) != config.preprocessing.interpolation:
        lines.append(f"interpolation='bilinear-plain' is not kept: {format} means images resized with antialiasing")
    return lines
