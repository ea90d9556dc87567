"""The image tower of Meta's Perception Encoder, as Meta's own code saves it (.pt) -> vitkit.

CLIP's names; rotary positions beside the learned ones leave no tensor. Core models end with attention pooling of
8 heads and a projection; Lang and Spatial models return their tokens, without a last norm.
"""

from __future__ import annotations

from torch import Tensor

from vitkit.checkpoints import clip, reading
from vitkit.checkpoints.family import Checkpoint, Fields, Opened
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors, NameMap
from vitkit.errors import CheckpointError
from vitkit.model.config import RotaryConfig

POOL = {"attn.out_proj": "out", "layernorm": "norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
NAMES = NameMap(  # each after the prefix visual.
    *clip.NAMES.rows,
    ("attn_pool.probe", "head.pool.probe"),
    ("attn_pool.attn.in_proj_weight", "head.pool.in.weight"),
    ("attn_pool.attn.in_proj_bias", "head.pool.in.bias"),
    *((f"attn_pool.{theirs}.*", f"head.pool.{ours}.*") for theirs, ours in POOL.items()),
)
HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1536: 16}  # of the published models, by width
PREFIXES = ("", "visual.", "module.visual.", "model.visual.")


def matches(opened: Opened) -> bool:
    """Towers with CLIP's names that are no CLIP: pooled by a probe, or not at all."""
    for prefix in PREFIXES:
        if (
            f"{prefix}conv1.weight" in opened.tensors
            and f"{prefix}transformer.resblocks.0.ln_1.weight" in opened.tensors
        ):
            probed = f"{prefix}attn_pool.probe" in opened.tensors
            return probed or not any(f"{prefix}{part}" in opened.tensors for part in ("ln_post.weight", "proj"))
    return False


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    images = opened.tensors.tower(PREFIXES[1:], "conv1.weight", notes)
    tensors = reading.pool_apart(images.renamed(NAMES.ours).converted(_convert))
    patch, width, fields = reading.body_of(tensors)
    size, _ = reading.image_size_of(tensors, [int("class_token" in tensors)], patch, options.image_size)
    pre: Fields = {"mean": (0.5,), "std": (0.5,), "fit": "squash", "interpolation": "bilinear"}
    fields |= {"image_size": size, "norm_eps": 1e-5, "position_resize": "timm-npz", "preprocessing": pre}
    fields |= {"heads": _heads(width, options), "patch_bias": False, **_pooling(tensors, notes)}
    fields["rotary"] = RotaryConfig("grid", axes="xy", offset=1.0 if "class_token" in tensors else 0.0)
    return reading.make_checkpoint(tensors, options, notes, NAMES.theirs, **fields)


def _convert(name: str, tensor: Tensor) -> Tensor:
    if name in ("class_token", "head.pool.probe"):
        return tensor.reshape(-1, tensor.shape[-1])
    return tensor.T.contiguous() if name == "head.projection.weight" else tensor


def _heads(width: int, options: ModelOptions) -> int:
    if heads := options.heads or HEADS.get(width):
        return heads
    unknown = f"no published Perception Encoder has a width of {width}, and the file does not say its heads"
    raise CheckpointError(f"{unknown}: pass heads=N (--heads N)")


def _pooling(tensors: LazyTensors, notes: list[str]) -> Fields:
    if "head.pool.probe" in tensors:
        mlp, own = (tensors.need(f"{part}.mlp.down.weight", 2)[1] for part in ("encoder.blocks.0", "head.pool"))
        return {"pooling": "map", "map_heads": 8, "map_mlp_width": 0 if own == mlp else own}
    pooling = "cls" if "class_token" in tensors else "mean"
    notes.append(
        f"the model returns tokens and pools nothing; here pooling is {pooling!r}, and tokens() gives them all"
    )
    return {"pooling": pooling}
