"""facebookresearch's DeiT, DINO, MAE and DINOv2 (.pth) -> vitkit.

Their tensors have timm's names, inside `model`, `teacher` or `state_dict`, often with prefixes such as
`module.` and `backbone.`. `unwrapped` takes the wrapping off; the rest is timm's reader.
"""

from __future__ import annotations

import re
from typing import Any

from vitkit.checkpoints import timm
from vitkit.checkpoints.layout import IMAGENET, Checkpoint, LazyTensors, Tensors, of, renamed, within

# Where a state dict may be inside a training checkpoint, and what may stand before its names.
CONTAINERS = ("teacher", "model_ema", "state_dict_ema", "ema", "model", "state_dict", "encoder")
PREFIXES = ("module.", "backbone.", "_orig_mod.", "encoder.", "visual.trunk.", "model.", "student.", "teacher.")
# Parts of pre-training that are no part of the ViT: projection heads, decoders, mask tokens.
_LEFT_OUT = re.compile(
    r"(mask_token|decoder_.*|decoder\..*|head\.(mlp|last_layer)\..*|dino_head\..*|ibot_head\..*|"
    r"projector.*|predictor.*|text\..*|logit_scale|logit_bias)"
)


def unwrapped(tensors: LazyTensors, notes: list[str]) -> LazyTensors:
    """The state dict inside a training checkpoint, without prefixes."""
    top = {name.split("/", 1)[0] for name in tensors if "/" in name}
    inside = next((c for c in CONTAINERS if c in top), None)
    if inside is not None:
        notes.append(
            f"read from {inside!r} inside the file" + (f" (beside {_others(top, inside)})" if len(top) > 1 else "")
        )
        tensors = within(tensors, f"{inside}/")
        if any("/" in name for name in tensors):
            return unwrapped(tensors, notes)
    while prefix := _common_prefix(tensors):
        kept = _without(tensors, prefix)
        if len(kept) < len(tensors):
            notes.append(f"left out: {len(tensors) - len(kept)} tensors whose names do not begin with {prefix!r}")
        tensors = kept
    return tensors


def _others(top: set[str], inside: str) -> str:
    return ", ".join(sorted(top - {inside})[:4])


def _common_prefix(tensors: LazyTensors) -> str | None:
    """The prefix before 'patch_embed.proj.weight' and its like, when there is one to take off."""
    for anchor in ("patch_embed.proj.weight", "conv_proj.weight", "conv1.weight"):
        for prefix in PREFIXES:
            if any(name.startswith(prefix) and name.endswith(anchor) for name in tensors) and anchor not in tensors:
                return prefix
    return None


def _without(tensors: LazyTensors, prefix: str) -> LazyTensors:
    return renamed(tensors, lambda n: n.removeprefix(prefix) if n.startswith(prefix) or "head" in n else None)


def read(tensors: Tensors, about: Any = None, given: dict[str, Any] | None = None) -> Checkpoint:
    """`tensors` as `unwrapped` returns them."""
    source, notes = of(tensors), []
    given = dict(given or {})
    v2 = "mask_token" in source and any(".ls1.gamma" in name for name in source)
    source = renamed(source, _timm_name)
    if left_out := [name for name in source if _LEFT_OUT.fullmatch(name)]:
        notes.append(f"left out: {len(left_out)} tensors of pre-training, such as {left_out[0]!r}")
    source = renamed(source, lambda name: None if name in left_out else name)
    fields: dict[str, Any] = {"position_resize": "huggingface"}
    if v2:
        # With registers DINOv2 resizes with antialiasing and without its offset, as timm does.
        fields["position_resize"] = "timm" if "reg_token" in source else "dinov2"
    elif "head.weight" not in source and "fc_norm.weight" not in source:
        fields["position_resize"] = "dinov2"  # DINO's own code, where the offset comes from
    fields["preprocessing"] = {**IMAGENET, "crop": 0.875, "fit": "crop", "interpolation": "bicubic"}
    result = timm.read(source, None, {**fields, **given})
    result.notes = notes + [n for n in result.notes if not n.startswith("preprocessing")]
    result.notes.append("preprocessing: not in the file, ImageNet statistics and crop 0.875 are assumed")
    result.format = "facebook"
    return result


def _timm_name(name: str) -> str:
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # DINOv2's chunks of blocks
    name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
    return "reg_token" if name == "register_tokens" else name
