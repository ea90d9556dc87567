"""EVA's and EVA-02's own files (.pt, also of BEiT's code, from which theirs comes) -> vitkit.

timm's names of the same models, but for the gates and norms of EVA-02, and tables of rotary positions beside them,
which tell heads and frequencies. What else no tensor shows is known from the published models of the same layout, as
for timm's own files.
"""

from __future__ import annotations

import math
import re

import torch

from vitkit.checkpoints import timm
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Table
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import LazyTensors
from vitkit.errors import CheckpointError

# Masked-image pre-training, tables that follow from sizes, and the text tower of EVA-CLIP.
_LEFT_OUT = re.compile(
    r"mask_token|lm_head\..*|.*\brope\.freqs_(cos|sin)|.*relative_position_index|text\..*|logit_scale"
)
_SWAPS = {".mlp.ffn_ln.": ".mlp.norm.", ".attn.inner_attn_ln.": ".attn.norm.", ".mlp.w12.": ".mlp.fc1."}
_SWAPS |= {".mlp.w1.": ".mlp.fc1_g.", ".mlp.w2.": ".mlp.fc1_x.", ".mlp.w3.": ".mlp.fc2."}
_OWN = (".mlp.ffn_ln.", ".attn.inner_attn_ln.", "rope.freqs_cos", "lm_head.", "relative_position_index")
PREFIX, TABLES = "visual.", ("rope.freqs_cos", "rope.freqs_sin")


def matches(opened: Opened) -> bool:
    """Biases of queries alone are EVA's and BEiT's; timm's files have them too, but not what training leaves."""
    names = [name.removeprefix(PREFIX) for name in opened.tensors]
    keyless = "blocks.0.attn.q_bias" in names or TABLES[0] in names
    own = any(part in name for name in names for part in _OWN) or bool(opened.container)
    return keyless and own and "patch_embed.proj.weight" in names and not opened.table("config.json")


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    notes: list[str] = []
    tower = opened.tensors.tower((PREFIX,), "patch_embed.proj.weight", notes)
    apart = "blocks.0.attn.q_proj.weight" in tower
    masked = "mask_token" in tower and "fc_norm.weight" not in tower
    if masked:
        notes.append("the norm of masked pre-training is read as the norm after mean pooling, as timm does")
    kept = tower.renamed(lambda name: _timm_name(name, apart, masked), notes, "of training, or that follow from sizes")
    return timm.read_names(kept, Table(), options, notes, ("Eva", "Beit"), **_shown(tower, masked))


def _shown(tower: LazyTensors, masked: bool) -> Fields:
    """What EVA's own names and tables tell: without `fc_norm` the class token is read."""
    shown: Fields = {}
    if "norm.weight" in tower and not masked and any(part in name for name in tower for part in _OWN):
        shown["pooling"] = "cls"
    return shown | (_rotary(tower) if set(TABLES) <= set(tower) else {})


def _rotary(tower: LazyTensors) -> Fields:
    """Heads and the trained grid from cosines and sines, hw K: of number * trained side / side * omega."""
    patches, each = tower.need(TABLES[0], 2)
    width, side = tower.need("patch_embed.proj.weight", 4)[0], math.isqrt(patches)
    omega = 10000.0 ** -(torch.arange(each // 4, dtype=torch.float64) / max(1, each // 4))
    if width % each or each % 4 or side * side != patches or tower.need(TABLES[1], 2) != (patches, each):
        raise CheckpointError(f"a rotary table of {patches} x {each} does not fit a width of {width}; fetch it again")
    cos, sin = (tower[name].double() for name in TABLES)
    slowest = torch.atan2(sin[-1, -1], cos[-1, -1])  # of the last column, far below half a turn
    trained = round(float(slowest) * side / (max(1, side - 1) * float(omega[-1])))
    angles = torch.arange(side).double()[:, None] * trained / side * omega
    columns = angles.repeat_interleave(2, dim=1).repeat(side, 1)  # of K/2 channels; those before are of rows
    if not torch.allclose(columns.cos(), cos[:, each // 2 :], atol=0.01):
        raise CheckpointError("not supported: rotary tables that are not of base 10000; vitkit has EVA's own")
    rotary = {"kind": "grid", "base": 10000.0, "axes": "ij", "reference": (trained, trained)}
    return {"heads": width // each, "rotary": rotary}


def _timm_name(name: str, apart: bool, masked: bool) -> str | None:
    if _LEFT_OUT.fullmatch(name):
        return None
    for theirs, timms in _SWAPS.items():
        name = name.replace(theirs, timms)
    if apart:
        name = re.sub(r"\.attn\.([qv])_bias$", r".attn.\1_proj.bias", name)
    return re.sub(r"^norm\.", "fc_norm.", name) if masked else name
