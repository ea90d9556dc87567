"""torchvision's VisionTransformer state dicts <-> vitkit."""

from __future__ import annotations

from vitkit.checkpoints import reading, writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import NameMap, block, without_leading_axis
from vitkit.errors import CheckpointError

LAYER = "encoder.layers.encoder_layer_{i}."
NAMES = NameMap(
    ("conv_proj.*", "patches.*"),
    ("class_token", "class_token"),
    ("encoder.pos_embedding", "positions.learned"),
    *block(LAYER, norm1="ln_1.*", qkv="self_attention.in_proj_*", out="self_attention.out_proj.*"),
    *block(LAYER, norm2="ln_2.*", up="mlp.0.*", down="mlp.3.*"),
    *block(LAYER, up="mlp.linear_1.*", down="mlp.linear_2.*"),  # before torchvision 0.13
    ("encoder.ln.*", "norm.*"),
    ("heads.pre_logits.*", "head.pre_logits.*"),
    ("heads.head.*", "head.classifier.*"),
)


def matches(opened: Opened) -> bool:
    return "encoder.pos_embedding" in opened.tensors and "conv_proj.weight" in opened.tensors


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    tensors = opened.tensors.renamed(NAMES.ours).converted(without_leading_axis)
    patch, width, body = reading.body_of(tensors)
    notes = ["preprocessing: not in the file, torchvision's (resize 256, crop 224, ImageNet statistics) is assumed"]
    fields = {
        **body,
        "image_size": reading.image_size_of(tensors, [1], patch, options.image_size)[0],
        "heads": reading.guess_heads(width, options, notes),
        "position_resize": "torchvision",
        "preprocessing": {**reading.IMAGENET, "crop": 0.875, "fit": "crop", "interpolation": "bilinear"},
    }
    return reading.make_checkpoint(tensors, options, notes, NAMES.theirs, **fields)


def write(checkpoint: Checkpoint) -> Written:
    config, tensors = writing.held(checkpoint, "torchvision's ViT", stem=None, **writing.PAPER)
    if config.image_size[0] != config.image_size[1] or config.patch_size[0] != config.patch_size[1]:
        raise CheckpointError("torchvision's ViT wants square images and patches; use --to native")
    meant: Fields = {"norm_eps": 1e-6, "activation": "gelu", "position_resize": "torchvision"}
    notes = writing.not_kept(config, "torchvision's ViT", meant)
    lost = f"the number of heads is not kept: read it with heads={config.heads} (--heads {config.heads})"
    return Written(writing.under(NAMES, tensors), [*notes, lost])
