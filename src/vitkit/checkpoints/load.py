"""Recognise a checkpoint -> read it -> adapt size and classes -> load it strictly.

    model = vitkit.load("checkpoint.npz", image_size=384, classes=10)
    print(*model.load_report, sep="\\n")

`open_checkpoint` stops after reading and gives the checkpoint as data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitkit.checkpoints import big_vision, clip, facebook, google, huggingface, native, timm, torchvision
from vitkit.checkpoints.adapt import adapt
from vitkit.checkpoints.files import kind_of, open_tensors, read_json
from vitkit.checkpoints.layout import Checkpoint, LazyTensors
from vitkit.checkpoints.strict import check_fit, to_one_dtype
from vitkit.errors import CheckpointError, ConfigError, did_you_mean
from vitkit.model import zoo
from vitkit.model.build import Model, create
from vitkit.model.config import AnyConfig, ViTConfig

WEIGHTS = (  # the files of a folder that may hold the weights, best first
    "best.safetensors",
    "model.safetensors",
    "last.safetensors",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "open_clip_pytorch_model.bin",
    "model.pth",
    "model.npz",
)
_SOURCE = "a file, a folder, a run directory, hf:owner/name, timm:name, or a name of `vitkit zoo`"


def load(
    source: str | Path,
    image_size: Any = None,
    classes: int | None = None,
    patch_size: Any = None,
    *,
    channels: int | None = None,
    resize: str | None = None,
    dtype: str | torch.dtype | None = None,
    **stated: Any,
) -> Model:
    """A model from a checkpoint of any family, or with fresh weights from a name of the zoo.

    What is asked for and differs is adapted: positions to `image_size` (the family's own way, or
    `resize`), the patch embedding to `patch_size`, the first filters to `channels`, the classifier to
    `classes` (starting at zero). `dtype` None keeps the file's. `stated` are fields of `ViTConfig` that
    a file cannot tell, such as heads=6 or activation="gelu-tanh".

    The model is in evaluation mode; it has `class_names` (or None) and `load_report`, one line for each
    thing that was assumed, left out or adapted.
    """
    if (fresh := _from_zoo(source)) is not None:
        changes = {"image_size": image_size, "classes": classes, "patch_size": patch_size, "channels": channels}
        changes |= {"position_resize": resize, **stated}
        model = create(fresh, **{k: v for k, v in changes.items() if v is not None})
        return _finish(model.to(parse_dtype(dtype)) if dtype is not None else model, None, ["fresh weights"])
    checkpoint = open_checkpoint(source, image_size=image_size, **stated)
    checkpoint = adapt(checkpoint, image_size, patch_size, channels, classes, resize)
    return to_model(checkpoint, str(source), dtype)


def to_model(checkpoint: Checkpoint, where: str, dtype: str | torch.dtype | None = None) -> Model:
    """Strictly: every tensor of the model is in the checkpoint, every tensor of the checkpoint in the model."""
    model = check_fit(checkpoint, where)
    to_one_dtype(checkpoint, None if dtype is None else parse_dtype(dtype))
    model.load_state_dict(checkpoint.tensors, strict=True, assign=True)  # no copy: they take the places
    return _finish(model, checkpoint.class_names, checkpoint.notes)


def _finish(model: Model, class_names: tuple[str, ...] | None, notes: list[str]) -> Model:
    told: Any = model
    told.class_names, told.load_report = class_names, tuple(notes)
    return model.eval()


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    words = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
    words |= {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    found = words.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in words.values():
        raise CheckpointError(f"dtype={dtype!r} is not known; choose float32, float16, bfloat16 or float64")
    return found


def _from_zoo(source: str | Path) -> AnyConfig | None:
    if not isinstance(source, str) or source.startswith(("hf:", "timm:")) or Path(source).exists():
        return None
    try:
        return zoo.config(source)
    except ConfigError:
        return None


def find_config(source: str) -> AnyConfig:
    """The configuration behind a name of the zoo or a checkpoint."""
    if source.startswith(("hf:", "timm:")) or Path(source).exists() or ("/" in source.strip("/") and "." in source):
        return _from_zoo(source) or open_checkpoint(source).config
    return zoo.config(source)


def open_checkpoint(source: str | Path, **stated: Any) -> Checkpoint:
    """Read a checkpoint as data, unadapted: configuration, tensors, class names and notes.

    A name of the zoo gives fresh weights.
    """
    stated = {k: v for k, v in stated.items() if v is not None}
    _check_stated(stated)
    if (fresh := _from_zoo(source)) is not None:
        model = create(fresh, **stated)
        return Checkpoint(model.config, dict(model.state_dict()), None, ["fresh weights"], "zoo")
    path, name = _locate(source)
    try:
        return _read_folder(path, stated) if path.is_dir() else _read_file(path, stated)
    except CheckpointError as e:
        message = str(e)
        raise CheckpointError(message if str(path) in message else f"{name}: {message}") from e
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError, OSError) as e:
        raise CheckpointError(f"{name}: the checkpoint is damaged or of an unknown kind ({e}); fetch it again") from e


def _check_stated(stated: dict[str, Any]) -> None:
    known = list(ViTConfig.__dataclass_fields__)
    for key in stated:
        if key not in known:
            raise CheckpointError(f"load() has no argument {key!r}, nor has ViTConfig.{did_you_mean(key, known)}")


def _locate(source: str | Path) -> tuple[Path, str]:
    if isinstance(source, str) and source.startswith(("hf:", "timm:")):
        from vitkit.checkpoints.hub import fetch

        return fetch(source), source
    path = Path(source).expanduser()
    try:
        if path.exists():
            return path, str(path)
    except OSError as e:  # a name too long for the file system, say
        raise CheckpointError(f"{str(source)[:200]!r} cannot be opened ({e.strerror}); give {_SOURCE}") from e
    if path.parent.is_dir() and path.parent != Path():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()])
    else:
        near = did_you_mean(str(source), zoo.ZOO)
    raise CheckpointError(f"{str(source)!r} is neither an existing path nor a known model.{near} Give {_SOURCE}")


def _read_file(path: Path, stated: dict[str, Any]) -> Checkpoint:
    tensors, metadata = open_tensors(path, kind_of(path))
    if native.is_native(metadata):
        return _native(tensors, metadata, path, stated)
    about: dict[str, Path] = {}
    if path.name in WEIGHTS:  # part of a folder, by its name
        about = {name: p for name in _COMPANIONS if (p := path.with_name(name)).is_file()}
    return read_tensors(tensors, {name: read_json(p) for name, p in about.items()}, stated)


_COMPANIONS = ("config.json", "preprocessor_config.json", "open_clip_config.json")


def _native(tensors: LazyTensors, metadata: dict[str, str], path: Path, stated: dict[str, Any]) -> Checkpoint:
    checkpoint = native.read(tensors, metadata, path)
    changes = {k: v for k, v in stated.items() if k != "image_size"}
    if changes:
        checkpoint.config = checkpoint.config.replace(**changes)
        checkpoint.notes += [f"{k}={v!r}: stated by the caller" for k, v in changes.items()]
    return checkpoint


def _read_folder(path: Path, stated: dict[str, Any]) -> Checkpoint:
    about = {name: read_json(path / name) for name in _COMPANIONS if (path / name).is_file()}
    if (index := path / "model.safetensors.index.json").is_file() and not (path / "model.safetensors").exists():
        return read_tensors(_sharded(path, read_json(index)), about, stated)
    for name in WEIGHTS:
        if (path / name).is_file():
            return _read_file(path / name, stated)
    kinds = (".safetensors", ".npz", ".pth", ".pt", ".bin")
    found = sorted(p for p in path.iterdir() if p.suffix in kinds)
    if len(found) == 1:
        tensors, metadata = open_tensors(found[0])
        if native.is_native(metadata):
            return _native(tensors, metadata, found[0], stated)
        return read_tensors(tensors, about, stated)
    if found:
        raise CheckpointError(f"{path} holds {len(found)} files of weights; give one of them, such as {found[0]}")
    raise CheckpointError(f"{path} holds no weights ({', '.join(WEIGHTS[:3])}, ...); give the folder that does")


def _sharded(folder: Path, index: dict[str, Any]) -> LazyTensors:
    """A large model in several files, with a table of what is where."""
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(f, str) and Path(f).name == f for f in where.values()):
        raise CheckpointError(f"{folder}: model.safetensors.index.json has no usable weight_map; fetch it again")
    opened = {}
    for file in sorted(set(where.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, although the index names it; fetch it too")
        opened[file] = open_tensors(folder / file)[0]
    for name, file in where.items():
        if name not in opened[file]:
            raise CheckpointError(f"{folder / file} does not hold {name!r}, although the index says so; fetch it again")
    return LazyTensors({n: opened[f].table[n] for n, f in where.items()}, lambda n: opened[where[n]][n])


def read_tensors(tensors: LazyTensors, about: dict[str, dict[str, Any]], stated: dict[str, Any]) -> Checkpoint:
    """Recognise foreign tensors by their names, and read them. `about` are the JSON files beside them."""
    notes: list[str] = []
    if google.matches(tensors):
        return google.read(tensors, None, stated)
    if big_vision.matches(tensors):
        return big_vision.read(tensors, None, stated)
    if huggingface.matches(tensors):
        return huggingface.read(tensors, about.get("config.json"), stated, about.get("preprocessor_config.json"))
    plain = facebook.unwrapped(tensors, notes)
    by_timm = any(name.startswith(("state_dict/", "state_dict_ema/")) for name in tensors)  # its training script
    read = _by_names(plain, about, wrapped=bool(notes) and not by_timm)
    if read is None:
        names = list(tensors)
        raise CheckpointError(
            f"the tensors have names of no known family, such as {', '.join(map(repr, names[:3]))}; "
            f"known are Google's, big_vision's, timm's, Hugging Face's, torchvision's, DeiT's, DINO's, MAE's and CLIP's"
        )
    checkpoint = read(plain, stated)
    checkpoint.notes[:0] = notes
    return checkpoint


def _by_names(
    tensors: LazyTensors, about: dict[str, dict[str, Any]], wrapped: bool
) -> Callable[[LazyTensors, dict[str, Any]], Checkpoint] | None:
    if torchvision.matches(tensors):
        return lambda t, s: torchvision.read(t, None, s)
    if clip.matches(tensors):
        return lambda t, s: clip.read(t, about.get("open_clip_config.json"), s)
    config = about.get("config.json", {})
    if timm.matches(tensors) and "mask_token" not in tensors and (config or not wrapped):
        return lambda t, s: timm.read(t, config, s)
    chunked = any(n.startswith("blocks.0.0.") for n in tensors)
    if timm.matches(tensors) or ("patch_embed.proj.weight" in tensors and chunked):
        return lambda t, s: facebook.read(t, None, s)
    return None
