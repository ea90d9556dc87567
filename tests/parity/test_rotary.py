"""Rotary positions equal timm's layers and transformers' DINOv3, at the trained grid and at others.

The maps of names are written out here rather than taken from `vitkit.checkpoints`, so that a mistake there cannot hide
one in the model. The peers compute angles in fp32: at 40 radians that is 2e-6, and of the
176 radians that bands of pixels reach 1e-5, times a query of up to 4; ours are float64.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import peers
from vitkit.model.config import RotaryConfig, Size, ViTConfig
from vitkit.model.place import Place
from vitkit.model.rotary import Rotary
from vitkit.model.vit import ViT

timm = peers.import_timm()
layers = peers._quietly("timm.layers.pos_embed_sincos")
transformers = peers.import_transformers()

TOLERANCE = 1e-5
HEADS, WIDTH, DEPTH, PREFIX = 2, 32, 3, 2  # 16 channels per head
GRIDS = [(14, 14), (3, 5), (7, 2)]


def config(rotary: RotaryConfig, **changes: object) -> ViTConfig:
    small = ViTConfig(image_size=32, patch_size=8, width=WIDTH, depth=DEPTH, heads=HEADS, mlp_width=64, classes=5)
    return small.replace(positions="none", registers=PREFIX - 1, rotary=rotary, **changes)


def randomized(theirs: nn.Module) -> nn.Module:
    """Parameters alone: the peers keep frequencies in buffers."""
    kept = [buffer.clone() for buffer in theirs.buffers()]
    peers.randomize(theirs, scale=0.2)
    for buffer, value in zip(theirs.buffers(), kept, strict=True):
        buffer.copy_(value)
    return theirs


def turned(rotary: Rotary, grid: Size, x: Tensor, block: int = 0) -> Tensor:
    rotate = rotary.turn(Place(grid), x).at(block).rotate
    assert rotate is not None
    return rotate(x)


SCALED = {"temperature": 100.0, "grid_offset": 1.0, "grid_indexing": "xy", "ref_feat_shape": (16, 8)}
CASES = [  # ours; timm's layer and its arguments
    (RotaryConfig(), "Cat", {"in_pixels": False}),
    (RotaryConfig(reference=(16, 16)), "Cat", {"in_pixels": False, "ref_feat_shape": (16, 16)}),
    (
        RotaryConfig(base=100.0, offset=1.0, axes="xy", reference=(16, 8)),
        "Cat",
        {
            "in_pixels": False,
            "temperature": 100.0,
            "grid_offset": 1.0,
            "grid_indexing": "xy",
            "ref_feat_shape": (16, 8),
        },
    ),
    (RotaryConfig(half=True, axes="xy"), "Cat", {"in_pixels": False, "grid_indexing": "xy", "rotate_half": True}),
    (RotaryConfig(pixels=True, max_res=112), "Cat", {"in_pixels": True, "max_res": 112}),
    (RotaryConfig(kind="box", base=100.0, half=True), "DinoV3", {}),
    (
        RotaryConfig(kind="box", base=50.0, offset=0.25),
        "DinoV3",
        {"temperature": 50.0, "grid_offset": 0.25, "rotate_half": False},
    ),
]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_turned_as_by_timm(case: int, grid: Size) -> None:
    ours, name, arguments = CASES[case]
    theirs = getattr(layers, f"RotaryEmbedding{name}")(WIDTH // HEADS, **arguments)
    x = torch.randn(2, HEADS, PREFIX + grid[0] * grid[1], WIDTH // HEADS)
    found = turned(Rotary(ours, config(ours)), grid, x)
    expected = layers.apply_rot_embed_cat(x[:, :, PREFIX:], theirs.get_embed(list(grid)), half=ours.half)
    torch.testing.assert_close(found[:, :, PREFIX:], expected, atol=1e-4 if ours.pixels else TOLERANCE, rtol=0)
    assert torch.equal(found[:, :, :PREFIX], x[:, :, :PREFIX])  # tokens before the patches are not turned


@pytest.mark.parametrize("axes", ["ij", "xy"])
@pytest.mark.parametrize("grid", GRIDS)
def test_learned_frequencies_turn_as_timms(axes: str, grid: Size) -> None:
    torch.manual_seed(0)
    theirs = layers.RotaryEmbeddingMixed(WIDTH, DEPTH, HEADS, temperature=10.0, grid_indexing=axes)
    ours = RotaryConfig(kind="mixed", base=10.0, axes=axes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    rotary = Rotary(ours, config(ours))
    torch.testing.assert_close(rotary.frequencies, theirs.freqs)  # the same seed starts with the same frequencies
    x = torch.randn(2, HEADS, PREFIX + grid[0] * grid[1], WIDTH // HEADS)
    for block, table in enumerate(theirs.get_embed(list(grid))):
        expected = layers.apply_rot_embed_cat(x[:, :, PREFIX:], table)
        torch.testing.assert_close(turned(rotary, grid, x, block)[:, :, PREFIX:], expected, atol=TOLERANCE, rtol=0)


def test_coordinates_vary_in_training_as_in_timm_and_transformers() -> None:
    """The same seed draws the same shift, jitter and scale; in evaluation nothing is drawn."""
    ours = RotaryConfig(kind="box", base=100.0, half=True, shift=0.2, jitter=1.3, rescale=2.0)
    theirs = layers.RotaryEmbeddingDinoV3(WIDTH // HEADS, shift_coords=0.2, jitter_coords=1.3, rescale_coords=2.0)
    given = {"pos_embed_shift": 0.2, "pos_embed_jitter": 1.3, "pos_embed_rescale": 2.0, "patch_size": 8}
    hf = transformers.DINOv3ViTConfig(hidden_size=WIDTH, num_attention_heads=HEADS, **given)
    position = transformers.models.dinov3_vit.modeling_dinov3_vit.DINOv3ViTRopePositionEmbedding(hf)
    rotary, x = Rotary(ours, config(ours)).train(), torch.zeros(1, HEADS, PREFIX + 15, WIDTH // HEADS)
    drawn = []
    for make in (
        lambda: theirs.train().get_embed([3, 5]).chunk(2, dim=-1),
        lambda: position.train()(torch.zeros(1, 3, 24, 40))[::-1],
        lambda: rotary((3, 5), x)[:, PREFIX:].flip(0),
    ):
        torch.manual_seed(7)
        drawn.append([t.abs() for t in make()])
    for sin, cos in drawn[:2]:
        torch.testing.assert_close(drawn[2], [sin, cos], atol=TOLERANCE, rtol=0)
    assert not torch.equal(rotary((3, 5), x), rotary((3, 5), x))
    assert torch.equal(rotary.eval()((3, 5), x), rotary((3, 5), x))


DINOV3 = (
    (r"^embeddings\.cls_token$", "class_token"),
    (r"^embeddings\.register_tokens$", "registers"),
    (r"^embeddings\.patch_embeddings\.", "patches."),
    (r"^(model\.)?layer\.", "encoder.blocks."),
    (r"\.attention\.o_proj\.", ".attention.out."),
    (r"\.layer_scale([12])\.lambda1", r".scale\1"),
    (r"\.up_proj\.", ".up."),
    (r"\.down_proj\.", ".down."),
)


def from_dinov3(state: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in state.items():
        for pattern, ours in DINOV3:
            name = re.sub(pattern, ours, name)
        tensors[name] = tensor[0] if name in ("class_token", "registers") else tensor
    for block in [n.removesuffix("q_proj.weight") for n in tensors if n.endswith("q_proj.weight")]:
        bias = tensors.pop(f"{block}q_proj.bias"), torch.zeros(WIDTH), tensors.pop(f"{block}v_proj.bias")
        tensors[f"{block}qkv.weight"] = torch.cat([tensors.pop(f"{block}{part}_proj.weight") for part in "qkv"])
        tensors[f"{block}qkv.bias"] = torch.cat(bias)
    return {n: t for n, t in tensors.items() if "mask_token" not in n}


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
def test_equal_to_dinov3_of_transformers_with_its_attention_maps(size: Size) -> None:
    given = {"num_register_tokens": 1, "patch_size": 8, "image_size": 32, "intermediate_size": 64}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    hf = transformers.DINOv3ViTConfig(**given, **sizes, attn_implementation="eager")
    theirs = randomized(transformers.DINOv3ViTModel(hf))
    ours = RotaryConfig(kind="box", base=100.0, half=True)
    model = ViT(config(ours, classes=0, layer_scale=1.0, norm_eps=hf.layer_norm_eps)).eval()
    model.load_state_dict(from_dinov3(theirs.state_dict()))
    images, seen = torch.randn(2, 3, *size), []
    with torch.no_grad():
        expected = theirs(images, output_attentions=True)
        found = model.tokens(images, on_weights=seen.append)
        torch.testing.assert_close(found, expected.last_hidden_state, atol=TOLERANCE, rtol=0)
        for mine, other in zip(seen, expected.attentions, strict=True):
            torch.testing.assert_close(mine, other, atol=TOLERANCE, rtol=0)


EVA = (
    (r"^patch_embed\.proj\.", "patches."),
    (r"^cls_token$", "class_token"),
    (r"^pos_embed$", "positions.learned"),
    (r"^rope\.freqs$", "rotary.frequencies"),
    (r"^blocks\.", "encoder.blocks."),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.attn\.proj\.", ".attention.out."),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
    (r"\.gamma_([12])$", r".scale\1"),
    (r"^head\.", "head.classifier."),
)


@pytest.mark.parametrize("size", [(32, 32), (24, 56)])
@pytest.mark.parametrize("name", ["rope", "rope_ape", "rope_mixed", "rope_mixed_ape"])
def test_whole_models_of_timm(name: str, size: Size) -> None:
    """RoPE-ViT, with and without learned positions beside the rotary ones, built by timm at each size."""
    shape = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS, "num_classes": 5}
    arguments = {"img_size": 32, "patch_size": 8, "dynamic_img_size": True, "global_pool": "token"}
    theirs = randomized(timm.create_model(f"vit_small_patch16_{name}_224", **shape, **arguments))
    mixed, learned = "mixed" in name, "ape" in name
    rotary = RotaryConfig(kind="mixed" if mixed else "grid", base=10.0 if mixed else 100.0, axes="xy")
    ours = config(rotary, layer_scale=1.0, mlp_width=4 * WIDTH, position_resize="timm").replace(registers=0)
    ours = ours.replace(positions="learned" if learned else "none", positioned_prefix="none")
    tensors = {}
    for key, tensor in theirs.state_dict().items():
        for pattern, word in EVA:
            key = re.sub(pattern, word, key)
        tensors[key] = tensor[0] if key in ("class_token", "positions.learned") else tensor
    model = ViT(ours).eval()
    model.load_state_dict(tensors)
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), atol=2 * TOLERANCE, rtol=0)
