"""Small checkpoints of every format, and hundreds of ways to damage each, all from a seed."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import peers
import vitkit
from vitkit.checkpoints import native, writing
from vitkit.checkpoints import timm as timm_family
from vitkit.checkpoints.family import Checkpoint
from vitkit.model.base import Outputs

TINY = {"width": 16, "heads": 2, "mlp_width": 32, "depth": 2, "image_size": 16, "classes": 3}
CANARY = "VITKIT_PICKLE_WAS_EXECUTED"  # an environment variable that no one else sets


def spring() -> None:
    os.environ[CANARY] = "1"


class Trap:
    """A pickle that does something when it is loaded: it sets an environment variable."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return spring, ()


class Payload:
    """The classic: a pickle that calls the shell. The command would be found in the working folder."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.system, (f"touch {CANARY}",)


def tiny_checkpoint() -> Checkpoint:
    model = peers.randomize(vitkit.create("mu", **TINY))
    return Checkpoint(model.config, dict(model.state_dict()), Outputs(names=("a", "b", "c")))


def write_all(folder: Path) -> dict[str, Path]:
    """One good checkpoint of each format."""
    checkpoint = tiny_checkpoint()
    paths = {
        "native": folder / "native.safetensors",
        "google": folder / "google.npz",
        "big_vision": folder / "big_vision.npz",
        "timm": folder / "timm.safetensors",
        "torchvision": folder / "torchvision.pth",
        "huggingface": folder / "huggingface",
    }
    for to, path in paths.items():
        writing.write(checkpoint, path, to)
    timm = {k: v.clone() for k, v in timm_family.write(checkpoint).tensors.items()}
    paths["facebook"] = folder / "facebook.pth"
    torch.save({"teacher": {f"backbone.{k}": v for k, v in timm.items()}, "epoch": 1}, paths["facebook"])
    paths["legacy"] = folder / "legacy.pth"
    torch.save({"model": timm}, paths["legacy"], _use_new_zipfile_serialization=False)
    paths["clip"] = folder / "clip.pt"
    torch.save(clip_tensors(), paths["clip"])
    return paths


def clip_tensors() -> dict[str, torch.Tensor]:
    from vitkit.checkpoints.clip import NAMES

    changes = {"pre_norm": True, "projection": 8, "classes": 0, "activation": "quick-gelu", "norm_eps": 1e-5}
    model = peers.randomize(vitkit.create("mu", **{**TINY, **changes}))
    tensors = {f"visual.{NAMES.theirs(k) or k}": v.clone() for k, v in model.state_dict().items()}
    del tensors["visual.patches.bias"]
    tensors["visual.class_embedding"] = tensors["visual.class_embedding"][0].clone()
    tensors["visual.proj"] = tensors["visual.proj"].T.contiguous()
    return tensors


def header_bytes(raw: bytes) -> range | list[int]:
    """Where a file describes its weights: only these bytes are flipped. All of an .npz is under checksums."""
    if raw[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            infos = archive.infolist()
            directory = list(range(archive.start_dir, len(raw)))
        if infos[0].filename.endswith(".npy"):
            return range(len(raw))
        pickled = infos[0].header_offset + 30 + len(infos[0].filename)
        return [*range(pickled + infos[0].file_size), *directory]
    if raw[8:9] == b"{":
        return range(8 + struct.unpack("<Q", raw[:8])[0])
    with io.BytesIO(raw) as file:  # PyTorch's old format: five pickles, then the weights
        for _ in range(5):
            for _ in pickletools.genops(file):
                pass
        return range(file.tell())


def damaged_bytes(raw: bytes, count: int, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Cut short, flipped in the header, filled with noise or zeros, grown."""
    header = header_bytes(raw)
    digits = [j for j in header if raw[j] in b"0123456789"]
    for i in range(count):
        kind = i % 6
        at = rng.choice(header)
        if kind in (0, 1):
            cut = rng.randrange(len(raw))
            yield f"cut at {cut}", raw[:cut]
        elif kind in (2, 3):
            bit = 1 << rng.randrange(8)
            yield f"bit {bit} flipped at {at}", raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :]
        elif kind == 4:
            size = min(rng.randrange(1, 24), header[-1] + 1 - at)
            yield f"noise of {size} at {at}", raw[:at] + rng.randbytes(size) + raw[at + size :]
        else:
            at = rng.choice(digits)
            new = str((raw[at] - ord("0") + rng.randrange(1, 10)) % 10).encode()
            yield f"a digit changed at {at}", raw[:at] + new + raw[at + 1 :]
    yield "empty", b""
    yield "wrong magic", b"GIF89a" + raw[6:]
    yield "text", b"version https://git-lfs.github.com/spec/v1\n"
    yield "a web page", b"<!DOCTYPE html><html></html>"
    yield "zeros", bytes(len(raw))


def damaged_tensors(tensors: dict[str, torch.Tensor], count: int, rng: random.Random) -> Iterator[tuple[str, dict]]:
    """Well-formed files with the wrong content: renamed, missing, extra, other shapes and dtypes."""
    names = list(tensors)
    for i in range(count):
        changed, name = dict(tensors), rng.choice(names)
        tensor = changed.pop(name)
        kind = i % 6
        if kind == 0:
            yield f"{name} missing", changed
        elif kind == 1:
            at = rng.randrange(len(name))
            new = name[:at] + rng.choice("xyz_9") + name[at + 1 :]
            if new == name:
                continue
            yield f"{name} renamed {new}", {**changed, new: tensor}
        elif kind == 2:
            yield f"{name} as integers", {**changed, name: tensor.to(rng.choice([torch.int32, torch.uint8]))}
        elif kind == 3:
            yield f"{name} grown", {**changed, name: torch.cat([tensor, tensor])}
        elif kind == 4:
            if tensor.ndim > 1 and tensor.shape != tensor.mT.shape:
                yield f"{name} transposed", {**changed, name: tensor.mT.contiguous()}
            else:
                yield f"{name} with an axis more", {**changed, name: tensor[..., None]}
        else:
            yield f"extra beside {name}", {**tensors, f"{name}_extra": tensor.clone()}


def bombs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files that declare far more than they hold, and pickles that would run something."""
    huge = {"dtype": "F32", "shape": [1 << 40, 4], "data_offsets": [0, 1 << 44]}
    for name, header in {
        "huge shape": {"patches.weight": huge},
        "huge shape, small data": {"patches.weight": {**huge, "data_offsets": [0, 16]}},
        "overflowing shape": {"x": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]}},
        "negative offsets": {"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
    }.items():
        text = json.dumps(header).encode()
        yield name, _put(folder, f"{name}.safetensors", struct.pack("<Q", len(text)) + text + bytes(16))
    for size in (1 << 30, (1 << 63) + 5, 0):
        yield f"header of {size}", _put(folder, f"h{size}.safetensors", struct.pack("<Q", size) + b"{}" + bytes(32))
    deep = b"[" * 100_000
    yield "deep header", _put(folder, "deep.safetensors", struct.pack("<Q", len(deep) + 5) + b'{"a":' + deep)
    yield from _npz_bombs(folder)
    yield from _pickles(folder)


def _put(folder: Path, name: str, raw: bytes) -> Path:
    path = folder / name.replace(" ", "-").replace(",", "")
    path.write_bytes(raw)
    return path


def _npz_bombs(folder: Path) -> Iterator[tuple[str, Path]]:
    path = folder / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        block = io.BytesIO()
        np.save(block, np.zeros(16 << 20, dtype=np.float32))
        archive.writestr("embedding/kernel.npy", block.getvalue())
    yield "zip bomb", path
    for name, shape in {"giant": "(1099511627776, 4)", "negative": "(-4, 4)", "not a tuple": "'x'"}.items():
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64)
        path = folder / f"{name.replace(' ', '-')}.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("embedding/kernel.npy", npy)
            archive.writestr("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel.npy", npy)
        yield f"npz with a {name} shape", path
    path = folder / "objects.npz"
    np.savez(path, **{"embedding/kernel": np.array([Payload(), Trap()], dtype=object)})
    yield "npz of pickled objects", path


def _pickles(folder: Path) -> Iterator[tuple[str, Path]]:
    for kind in (Payload, Trap):
        for protocol in (2, 3, 4, 5):
            raw = pickle.dumps({"model": kind()}, protocol=protocol)
            yield f"bare pickle {kind.__name__} {protocol}", _put(folder, f"{kind.__name__}{protocol}.pth", raw)
        for zipped in (True, False):
            path = folder / f"{kind.__name__}-{zipped}.pth"
            content = {"model": {"patch_embed.proj.weight": torch.zeros(2, 3, 4, 4), "x": kind()}}
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
            yield f"torch file {kind.__name__} {zipped}", path


__all__ = ["CANARY", "bombs", "damaged_bytes", "damaged_tensors", "native", "write_all"]
