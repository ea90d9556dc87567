"""The image tower of OpenAI's CLIP and of open_clip -> vitkit.

A LayerNorm before the blocks, no bias in the patch embedding, and a projection at the end: the model
returns the image embedding (not yet divided by its length). OpenAI's models use QuickGELU; open_clip's
say so in `open_clip_config.json`, and without that file QuickGELU is assumed.
"""

from __future__ import annotations

from typing import Any

import torch

from vitkit.checkpoints.layout import (
    Checkpoint,
    LazyTensors,
    NameMap,
    Tensors,
    count,
    find_grid,
    make_config,
    need,
    tower,
)
from vitkit.errors import CheckpointError

BLOCK = "transformer.resblocks.{i}"
NAMES = NameMap(  # each after the prefix visual.
    ("conv1.weight", "patches.weight"),
    ("class_embedding", "class_token"),
    ("positional_embedding", "positions.learned"),
    ("ln_pre.*", "pre_norm.*"),
    (f"{BLOCK}.ln_1.*", "encoder.blocks.{i}.norm1.*"),
    (f"{BLOCK}.attn.in_proj_weight", "encoder.blocks.{i}.attention.qkv.weight"),
    (f"{BLOCK}.attn.in_proj_bias", "encoder.blocks.{i}.attention.qkv.bias"),
    (f"{BLOCK}.attn.out_proj.*", "encoder.blocks.{i}.attention.out.*"),
    (f"{BLOCK}.ls_1.gamma", "encoder.blocks.{i}.scale1"),
    (f"{BLOCK}.ln_2.*", "encoder.blocks.{i}.norm2.*"),
    (f"{BLOCK}.mlp.c_fc.*", "encoder.blocks.{i}.mlp.up.*"),
    (f"{BLOCK}.mlp.c_proj.*", "encoder.blocks.{i}.mlp.down.*"),
    (f"{BLOCK}.ls_2.gamma", "encoder.blocks.{i}.scale2"),
    ("ln_post.*", "norm.*"),
    ("proj", "head.projection.weight"),
)
STATISTICS = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}


def matches(tensors: Tensors) -> bool:
    """True with and without the prefixes `module.` and `visual.`."""
    return any(n.endswith("class_embedding") for n in tensors) and any(
        n.endswith("transformer.resblocks.0.ln_1.weight") for n in tensors
    )


def read(tensors: Tensors, about: dict[str, Any] | None = None, given: dict[str, Any] | None = None) -> Checkpoint:
    """`about` is open_clip_config.json, if there is one."""
    notes: list[str] = []
    given = dict(given or {})
    prefixes = ("visual.", "module.visual.", "model.visual.")
    images = tower(tensors, prefixes, "class_embedding", "of the text tower and beside it", notes)
    if "attn_pool.query" in images or "transformer.resblocks.0.attn.ln.weight" in images:
        raise CheckpointError("not supported: a CLIP image tower with attentional pooling or norms inside attention")
    lazy = NAMES.renamed(images)
    config = make_config(given, **_fields(lazy, about or {}, given, notes))
    converted = {name: lazy[name] for name in lazy}
    converted["class_token"] = converted["class_token"].reshape(1, -1)
    if "head.projection.weight" in converted:
        converted["head.projection.weight"] = converted["head.projection.weight"].T.contiguous()
    converted["patches.bias"] = torch.zeros(config.width, dtype=lazy.dtype("patches.weight"))
    return Checkpoint(config, converted, None, notes, "clip", NAMES.theirs)


def _fields(tensors: LazyTensors, about: dict[str, Any], given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    width, channels, *patch = need(tensors, "patches.weight", 4)
    need(tensors, "class_token", 1)
    size = given.get("image_size")
    grid, _ = find_grid(need(tensors, "positions.learned", 2)[0], [1], (patch[0], patch[1]), size)
    model = about.get("model_cfg", about)
    vision = model.get("vision_cfg") or {}
    if about:
        quick = bool(model.get("quick_gelu"))
        heads = width // max(1, int(vision.get("head_width", 64)))
    else:
        quick, heads = True, given.get("heads") or max(1, width // 64)
        if "heads" not in given:
            notes.append(f"{heads} heads: not in the file, OpenAI's code has 64 channels in each")
        if "activation" not in given:
            notes.append("activation: not in the file, OpenAI's quick-gelu is assumed (most open_clip models: gelu)")
    projection = "head.projection.weight"
    if projection not in tensors and given.get("projection") != 0:
        raise CheckpointError("the tensor 'proj' is missing; if the tower really has no projection, pass projection=0")
    return {
        "image_size": (grid[0] * patch[0], grid[1] * patch[1]),
        "patch_size": (patch[0], patch[1]),
        "channels": channels,
        "width": width,
        "depth": count(tensors, "encoder.blocks.{i}.norm1.weight"),
        "heads": heads,
        "mlp_width": need(tensors, "encoder.blocks.0.mlp.up.weight", 2)[0],
        "classes": 0,
        "position_resize": "timm",  # as open_clip resizes: bicubic with antialiasing
        "pre_norm": True,
        "norm_eps": 1e-5,
        "activation": "quick-gelu" if quick else "gelu",
        "layer_scale": 1e-5 if "encoder.blocks.0.scale1" in tensors else None,
        "projection": need(tensors, projection, 2)[1] if projection in tensors else 0,
        "preprocessing": {**STATISTICS, "fit": "crop", "interpolation": "bicubic"},
    }
