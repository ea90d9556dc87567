"""EVA's and EVA-02's own files (.pt, also of BEiT's code, from which theirs comes) -> vitkit.

timm's names of the same models, but for the gates and norms of EVA-02, and tables of rotary positions beside them.
What no tensor shows is known from the published models of the same layout, as for timm's own files.
"""

from __future__ import annotations

import re

from vitkit.checkpoints import timm
from vitkit.checkpoints.family import Checkpoint, Opened, Table
from vitkit.checkpoints.options import ModelOptions

# Masked-image pre-training, tables that follow from sizes, and the text tower of EVA-CLIP.
_LEFT_OUT = re.compile(
    r"mask_token|lm_head\..*|.*\brope\.freqs_(cos|sin)|.*relative_position_index|text\..*|logit_scale"
)
_SWAPS = {".mlp.ffn_ln.": ".mlp.norm.", ".attn.inner_attn_ln.": ".attn.norm.", ".mlp.w12.": ".mlp.fc1."}
_SWAPS |= {".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x.", ".mlp.w3.": ".mlp.fc2."}
_OWN = (".mlp.ffn_ln.", ".attn.inner_attn_ln.", "rope.freqs_cos", "lm_head.", "relative_position_index")
PREFIX = "visual."


def matches(opened: Opened) -> bool:
    """Biases of queries alone are EVA's and BEiT's; timm's files have them too, but not what training leaves."""
    names = [name.removeprefix(PREFIX) for name in opened.tensors]
    keyless = "blocks.0.attn.q_bias" in names and "patch_embed.proj.weight" in names
    own = any(part in name for name in names for part in _OWN) or bool(opened.container)
    return keyless and own and not opened.table("config.json")


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    tower = opened.tensors.tower((PREFIX,), "patch_embed.proj.weight", notes)
    apart = "blocks.0.attn.q_proj.weight" in tower
    masked = "mask_token" in tower and "fc_norm.weight" not in tower
    if masked:
        notes.append("the norm of masked pre-training is read as the norm after mean pooling, as timm does")
    kept = tower.renamed(lambda name: _timm_name(name, apart, masked), notes, "of training, or that follow from sizes")
    return timm.read_names(kept, Table(), options, notes, ("Eva", "Beit"))


def _timm_name(name: str, apart: bool, masked: bool) -> str | None:
    if _LEFT_OUT.fullmatch(name):
        return None
    for theirs, timms in _SWAPS.items():
        name = name.replace(theirs, timms)
    if apart:
        name = re.sub(r"\.attn\.([qv])_bias$", r".attn.\1_proj.bias", name)
    return re.sub(r"^norm\.", "fc_norm.", name) if masked else name
