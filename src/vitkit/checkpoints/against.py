"""A checkpoint in vitkit and in the library it comes from: the same images through both, compared layer by layer.

The peer builds its own model from the same files. Its blocks are watched from outside, by hooks, so that a peer is a
row of PEERS: how it builds, how it takes another image size, and how it is called.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from vitkit.checkpoints.load import load
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.source import locate
from vitkit.errors import CheckpointError, MissingPackage
from vitkit.model.config import Size, ViTConfig
from vitkit.model.vit import ViT

IMAGES = 2


@dataclass(frozen=True)
class Difference:
    """How far a layer's values are apart: the largest difference, and what range theirs have."""

    size: Size
    layer: str  # "embedding", "block 0" ..., "output"
    largest: float
    range: float
    problem: str = ""  # why it cannot be compared

    def within(self, tolerance: float) -> bool:
        return not self.problem and self.largest <= tolerance * self.range  # false for NaN


@dataclass(frozen=True)
class Comparison:
    rows: list[Difference]
    notes: list[str]  # what could not be compared

    def first(self, tolerance: float) -> Difference | None:
        """The first layer that differs, in the order an image meets them."""
        return next((row for row in self.rows if not row.within(tolerance)), None)


class Peer(NamedTuple):
    package: str
    build: Callable[[Path, str, ViTConfig], nn.Module]  # files, architecture or "", our configuration
    resize: Callable[[nn.Module, Size], None]  # may raise, where it takes one size only
    call: Callable[[nn.Module, Tensor], Tensor | None]  # what is compared with our output; None: nothing like it


def verify(source: str, against: str, options: ModelOptions, architecture: str = "") -> Comparison:
    """At the image size of the checkpoint and at `options.image_size`, or else at a larger one that is not square."""
    peer = PEERS[against]
    other, options = options.image_size, replace(options, image_size=None, dtype="float32")
    model = load(source, options=options).double()
    if not isinstance(model, ViT):
        raise CheckpointError(f"{source} is a {model.config.kind}; verify compares Vision Transformers")
    theirs = build(peer, source, model.config, architecture)
    rows, notes, native = [], list[str](), model.config.image_size
    p, q = model.config.patch_size
    for size in (native, other or (native[0] + p, native[1] + 2 * q)):
        try:
            if size != native:
                peer.resize(theirs, size)
            rows += list(compare(peer, model, theirs, size))
        except CheckpointError:
            raise
        except Exception as e:
            if size == native:
                raise CheckpointError(f"{peer.package} built the model but cannot run it ({_line(e)})") from e
            notes.append(f"{size[0]}x{size[1]} is not compared: {peer.package} does not take it ({_line(e)})")
    return Comparison(rows, notes)


_OPERATORS = ("nms", "qnms")
_library: torch.library.Library | None = None  # operators live as long as this object


def name_operators() -> None:
    """Make torchvision importable (timm needs it) beside a torch that its binary was not built for.

    Its compiled operators cannot be loaded there, and importing fails because they do not even have names. No ViT runs
    them, so that names are enough.
    """
    global _library
    spec = find_spec("torchvision")
    if spec is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for binary in Path((spec.submodule_search_locations or [""])[0]).glob("_C.*"):
        with suppress(OSError):
            torch.ops.load_library(str(binary))
            return
    _library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def build(peer: Peer, source: str, config: ViTConfig, architecture: str) -> nn.Module:
    name_operators()
    try:
        import_module(peer.package)
    except ImportError as e:
        raise MissingPackage(peer.package, f"comparing with {peer.package}", "peers") from e
    try:
        return peer.build(locate(source), architecture, config).double().eval()
    except CheckpointError:
        raise
    except Exception as e:
        action = "give the folder with its config.json, or name its --architecture"
        raise CheckpointError(f"{peer.package} cannot build a model from {source} ({_line(e)}); {action}") from e


def _line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:200]


@torch.no_grad()
def compare(peer: Peer, ours: ViT, theirs: nn.Module, size: Size) -> Iterator[Difference]:
    """The state before the first block, after each, and the output."""
    images = torch.randn(IMAGES, ours.config.channels, *size, generator=torch.Generator().manual_seed(0)).double()
    depth = ours.config.depth
    states, output = _watched(theirs, depth, lambda: peer.call(theirs, images))
    mine = [ours.embedded(images)[0], *ours.features(images, range(depth))]
    if not states:
        raise CheckpointError(f"{peer.package}'s model has no {depth} blocks in a row; is it the same architecture?")
    names = ["embedding", *(f"block {i}" for i in range(depth))]
    for name, our, their in zip(names, mine, states, strict=True):
        yield difference(size, name, our, their)
    if output is not None:
        yield difference(size, "output", ours(images), output)


def difference(size: Size, layer: str, ours: Tensor, theirs: Tensor) -> Difference:
    if ours.shape != theirs.shape:
        return Difference(size, layer, 0.0, 0.0, f"shape {tuple(ours.shape)}, theirs {tuple(theirs.shape)}")
    ours, theirs = ours.double(), theirs.double()
    return Difference(size, layer, float((ours - theirs).abs().max()), float(theirs.abs().max()))


def _watched(model: nn.Module, depth: int, run: Callable[[], Tensor | None]) -> tuple[list[Tensor], Tensor | None]:
    """What goes into the first of `depth` blocks and what comes out of each, beside what `run` returns."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) == depth]
    seen: dict[int, list[Tensor]] = {}

    def watch(blocks: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        states = seen.setdefault(id(blocks), [])
        before = lambda module, args, kwargs: states.append(_tensor(args or tuple(kwargs.values())))  # noqa: E731
        after = lambda module, args, output: states.append(_tensor(output))  # noqa: E731
        first, *_ = children = list(blocks.children())
        return [
            first.register_forward_pre_hook(before, with_kwargs=True),
            *(c.register_forward_hook(after) for c in children),
        ]

    handles = [handle for blocks in lists for handle in watch(blocks)]
    try:
        output = run()
    finally:
        for handle in handles:
            handle.remove()
    whole = (states for states in seen.values() if len(states) == depth + 1 and all(s.ndim == 3 for s in states))
    return next(whole, []), output


def _tensor(value: object) -> Tensor:
    found = (
        value if isinstance(value, Tensor) else next(iter(value), None) if isinstance(value, (tuple, list)) else None
    )
    return found.detach() if isinstance(found, Tensor) else torch.empty(0)


def _build_timm(path: Path, architecture: str, config: ViTConfig) -> nn.Module:
    import timm

    folder = path if path.is_dir() else path.parent
    if not architecture and (folder / "config.json").is_file():
        return cast("nn.Module", timm.create_model(f"local-dir:{folder}", pretrained=True))
    if not architecture:
        raise CheckpointError(f"{path} has no config.json beside it: name timm's model with --architecture NAME")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; with --architecture give the file of weights in it")
    sizes = {"img_size": config.image_size, "in_chans": config.channels, "num_classes": config.classes}
    return cast("nn.Module", timm.create_model(architecture, checkpoint_path=str(path), **sizes))


def _resize_timm(model: nn.Module, size: Size) -> None:
    resize: Callable[..., None] | None = getattr(model, "set_input_size", None)
    if resize is None:
        raise ValueError("it has no set_input_size")
    resize(img_size=size)


def _call_timm(model: nn.Module, images: Tensor) -> Tensor | None:
    output = model(images)
    return output if isinstance(output, Tensor) else None


def _build_hf(path: Path, architecture: str, config: ViTConfig) -> nn.Module:
    import transformers

    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json, without which transformers builds nothing; fetch it too")
    named = architecture or (json.loads((folder / "config.json").read_text()).get("architectures") or ["AutoModel"])[0]
    return cast("nn.Module", getattr(transformers, named).from_pretrained(folder))


def _call_hf(model: nn.Module, images: Tensor) -> Tensor | None:
    """Logits, or an image embedding, or the pooled state where ours returns one."""
    embed = getattr(model, "get_image_features", None)
    call = embed if embed is not None else model
    resizing = "interpolate_pos_encoding" in inspect.signature(call if embed is not None else model.forward).parameters
    output = call(pixel_values=images, **({"interpolate_pos_encoding": True} if resizing else {}))
    if isinstance(output, Tensor):
        return output
    kinds = ("logits", "image_embeds", "pooler_output")
    found = (getattr(output, kind, None) for kind in kinds)
    return next((value for value in found if isinstance(value, Tensor)), None)


PEERS = {
    "timm": Peer("timm", _build_timm, _resize_timm, _call_timm),
    "hf": Peer("transformers", _build_hf, lambda model, size: None, _call_hf),
}
