"""With the same weights, vitkit computes the numbers of torchvision's and vit-pytorch's ViT.

States after the final norm are of order 1 and a few blocks round to about 1e-6 in fp32: 1e-5 as elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import peers
from vitkit.model.config import ViTConfig
from vitkit.model.patches import linear_to_conv
from vitkit.model.vit import ViT

TOLERANCE = 1e-5
OURS = ViTConfig(32, 8, width=64, depth=3, heads=4, mlp_width=256, classes=7)  # type: ignore[arg-type]

TORCHVISION = (
    (r"^conv_proj\.", "patches."),
    (r"^encoder\.pos_embedding$", "positions.learned"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"encoder.blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_(weight|bias)$", r".attention.qkv.\1"),
    (r"\.self_attention\.out_proj\.", ".attention.out."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.up."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.down."),
    (r"^heads\.head\.", "head.classifier."),
    (r"^heads\.pre_logits\.", "head.pre_logits."),
)
VIT_PYTORCH = (
    (r"^cls_token$", "class_token"),
    (r"^pos_embedding$", "positions.learned"),
    (r"^to_patch_embedding\.2\.", "patches."),
    (r"^transformer\.norm\.", "norm."),
    (r"^transformer\.layers\.(\d+)\.0\.norm\.", r"encoder.blocks.\1.norm1."),
    (r"^transformer\.layers\.(\d+)\.0\.to_qkv\.", r"encoder.blocks.\1.attention.qkv."),
    (r"^transformer\.layers\.(\d+)\.0\.to_out\.0\.", r"encoder.blocks.\1.attention.out."),
    (r"^transformer\.layers\.(\d+)\.1\.net\.0\.", r"encoder.blocks.\1.norm2."),
    (r"^transformer\.layers\.(\d+)\.1\.net\.1\.", r"encoder.blocks.\1.mlp.up."),
    (r"^transformer\.layers\.(\d+)\.1\.net\.4\.", r"encoder.blocks.\1.mlp.down."),
    (r"^mlp_head\.", "head.classifier."),
)


def translate(state: dict[str, Tensor], renames: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for pattern, ours in renames:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor.reshape(-1, 64) if name in ("class_token", "positions.learned") else tensor
    return renamed


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_torchvision() -> None:
    vision_transformer = peers.import_torchvision().models.vision_transformer
    for pre_logits in (0, 24):
        theirs: Any = vision_transformer.VisionTransformer(
            32, 8, 3, 4, 64, 256, num_classes=7, representation_size=pre_logits or None
        )
        peers.randomize(theirs, seed=1)
        ours = ViT(OURS.replace(pre_logits=pre_logits)).eval()
        ours.load_state_dict(translate(theirs.state_dict(), TORCHVISION))
        with torch.inference_mode():
            x = theirs._process_input(images())
            states = theirs.encoder(torch.cat([theirs.class_token.expand(2, -1, -1), x], dim=1))
            torch.testing.assert_close(ours.tokens(images()), states, rtol=TOLERANCE, atol=TOLERANCE)
            torch.testing.assert_close(ours(images()), theirs(images()), rtol=TOLERANCE, atol=TOLERANCE)


def test_vit_pytorch() -> None:
    """Its patches are normalised before and after the linear map; without those two norms it is the paper's ViT."""
    theirs: Any = peers.import_vit_pytorch().ViT(
        image_size=32, patch_size=8, num_classes=7, dim=64, depth=3, heads=4, dim_head=16, mlp_dim=256
    )
    theirs.to_patch_embedding[1] = theirs.to_patch_embedding[3] = torch.nn.Identity()
    peers.randomize(theirs, seed=1)
    ours = ViT(OURS.replace(norm_eps=1e-5, qkv_bias=False)).eval()
    state = translate(theirs.state_dict(), VIT_PYTORCH)
    state["patches.weight"] = linear_to_conv(state["patches.weight"], (8, 8))
    ours.load_state_dict(state)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images()), theirs(images()), rtol=TOLERANCE, atol=TOLERANCE)
