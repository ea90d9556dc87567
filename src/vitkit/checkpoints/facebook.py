"""facebookresearch's DeiT, DINO, MAE and DINOv2 (.pth) -> vitkit.

Their tensors have timm's names, inside `model`, `teacher` or `state_dict`, often with prefixes such as
`module.` and `backbone.`, which `source.py` takes off; the rest is timm's reader.
"""

from __future__ import annotations

import re

from vitkit.checkpoints import timm
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Table
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.reading import IMAGENET

# Projection heads, decoders, mask tokens.
_LEFT_OUT = r"mask_token|decoder[_.].*|head\.(mlp|last_layer)\..*|(dino|ibot)_head\..*|projector.*|predictor.*"
_LEFT_OUT += r"|text\..*|logit_scale|logit_bias"


def matches(opened: Opened) -> bool:
    chunked = any(name.startswith("blocks.0.0.") for name in opened.tensors)
    return timm.has_names(opened) or ("patch_embed.proj.weight" in opened.tensors and chunked)


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    kept = opened.tensors.renamed(_timm_name, notes, "of pre-training")
    dinov2 = "mask_token" in opened.tensors and any(".ls1.gamma" in name for name in kept)
    bare = "head.weight" not in kept and "fc_norm.weight" not in kept  # DINO, whose code adds the offset
    # With registers DINOv2 resizes with antialiasing and without the offset, as timm does.
    with_offset = "timm" if dinov2 and "register_tokens" in kept else "dinov2"
    resize = with_offset if dinov2 or bare else "huggingface"
    shown: Fields = {"pooling": "mean"} if "fc_norm.weight" in kept else {}  # MAE, fine-tuned
    if "linear_head.weight" in kept:
        shown |= timm.linear_head(kept)
    shown["preprocessing"] = {**IMAGENET, "crop": 0.875, "fit": "crop", "interpolation": "bicubic"}
    notes.append("preprocessing: not in the file, ImageNet statistics and crop 0.875 are assumed")
    return timm.read_names(kept, Table(), options, notes, timm.PLAIN, position_resize=resize, **shown)


def _timm_name(name: str) -> str | None:
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # DINOv2's chunks of blocks
    return None if re.fullmatch(_LEFT_OUT, name) else name
