"""The image tower of OpenAI's CLIP and of open_clip -> vitkit.

A LayerNorm before the blocks, no bias in the patch embedding, and a projection at the end: the model
returns the image embedding (not yet divided by its length). OpenAI's models use QuickGELU; open_clip's
say so in `open_clip_config.json`, and without that file QuickGELU is assumed.
"""

from __future__ import annotations

from torch import Tensor

from vitkit.checkpoints import reading
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Table
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import NameMap, block
from vitkit.errors import CheckpointError

BLOCK = "transformer.resblocks.{i}."
NAMES = NameMap(  # each after the prefix visual.
    ("conv1.weight", "patches.weight"),
    ("class_embedding", "class_token"),
    ("positional_embedding", "positions.learned"),
    ("ln_pre.*", "pre_norm.*"),
    *block(BLOCK, norm1="ln_1.*", qkv="attn.in_proj_*", out="attn.out_proj.*", scale1="ls_1.gamma"),
    *block(BLOCK, norm2="ln_2.*", up="mlp.c_fc.*", down="mlp.c_proj.*", scale2="ls_2.gamma"),
    ("ln_post.*", "norm.*"),
    ("proj", "head.projection.weight"),
)
STATISTICS = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


def matches(opened: Opened) -> bool:
    """True with and without the prefixes `module.` and `visual.`."""
    ends = ("class_embedding", "transformer.resblocks.0.ln_1.weight")
    return all(any(name.endswith(end) for name in opened.tensors) for end in ends)


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    images = opened.tensors.tower(("visual.", "module.visual.", "model.visual."), "class_embedding", notes)
    if "proj" not in images and options.fields.get("projection") != 0:
        stated = "if the tower really has no projection, pass projection=0 (--set projection=0)"
        raise CheckpointError(f"the tensor 'proj' is missing; {stated}")
    images.need("class_embedding", 1)
    tensors = images.renamed(NAMES.ours).converted(_convert)
    patch, width, body = reading.body_of(tensors)
    fields = {
        **body,
        **_numerics(opened.table("open_clip_config.json"), width, options, notes),
        "image_size": reading.image_size_of(tensors, [1], patch, options.image_size)[0],
        "position_resize": "timm",  # as open_clip resizes: bicubic with antialiasing
        "norm_eps": 1e-5,
        "preprocessing": {**STATISTICS, "fit": "crop", "interpolation": "bicubic"},
    }
    return reading.make_checkpoint(tensors, options, notes, NAMES.theirs, **fields)


def _convert(name: str, tensor: Tensor) -> Tensor:
    if name == "class_token":
        return tensor.reshape(1, -1)
    return tensor.T.contiguous() if name == "head.projection.weight" else tensor


def _numerics(about: Table, width: int, options: ModelOptions, notes: list[str]) -> Fields:
    """Heads and activation: from open_clip's file, or as OpenAI's code has them."""
    if about:
        model = about.table("model_cfg") or about
        heads = width // max(1, model.table("vision_cfg").whole("head_width", 64))
        return {"heads": heads, "activation": "quick-gelu" if model.get("quick_gelu") else "gelu"}
    heads = options.heads or max(1, width // 64)
    if options.heads is None:
        notes.append(f"{heads} heads: not in the file, OpenAI's code has 64 channels in each")
    if options.activation is None:
        notes.append("activation: not in the file, OpenAI's quick-gelu is assumed (most open_clip models: gelu)")
    return {"heads": heads, "activation": "quick-gelu"}
