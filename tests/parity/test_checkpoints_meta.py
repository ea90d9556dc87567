"""DINOv3, Perception Encoder and EVA in the layouts of their own repositories.

timm's models are renamed into those layouts (the inverse of its `checkpoint_filter_fn`) and must give equal outputs.
Tolerance: 2e-5 of the largest value; float32 in another order, rotary tables computed in another precision.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import peers
import vitkit
from vitkit.errors import CheckpointError

SIZES = {"img_size": 64, "depth": 2, "embed_dim": 128, "num_heads": 2}
TOLERANCE = 2e-5


def timm_model(name: str, **changes):
    model = peers.import_timm().create_model(name, **SIZES | changes)
    tables = [(buffer, buffer.clone()) for buffer in model.buffers()]  # of rotary positions
    peers.randomize(model, scale=0.1)
    for buffer, table in tables:
        buffer.copy_(table)
    return model


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE * float(theirs.abs().max()))


def swapped(tensors: dict[str, Tensor], **swaps: str) -> dict[str, Tensor]:
    named = {}
    for name, tensor in tensors.items():
        for ours, theirs in swaps.items():
            name = name.replace(ours.replace("__", "."), theirs)
        named[name] = tensor
    return named


def as_dinov3(model: torch.nn.Module, width: int, heads: int) -> dict[str, Tensor]:
    names = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    names |= {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2"}
    gated = any("fc1_g" in name for name in model.state_dict())
    tensors = swapped(model.state_dict(), **names | ({"mlp.fc2": "mlp.w3"} if gated else {}))
    for name in [n for n in tensors if n.endswith(".q_bias")]:
        start, q, v = name.removesuffix("q_bias"), tensors.pop(name), tensors.pop(name.replace("q_bias", "v_bias"))
        tensors[f"{start}qkv.bias"] = torch.cat([q, torch.full_like(q, 7.0), v])  # masked: its value must not matter
        tensors[f"{start}qkv.bias_mask"] = torch.cat([torch.ones_like(q), torch.zeros_like(q), torch.ones_like(v)])
    each = width // heads
    tensors["rope_embed.periods"] = 100.0 ** (2 * torch.arange(each // 4) / (each // 2))
    return tensors | {"mask_token": torch.zeros(1, width)}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_dinov3_qkvb",
        "vit_small_patch16_dinov3",
        "vit_small_plus_patch16_dinov3_qkvb",
        "vit_7b_patch16_dinov3",
    ],
)
def test_dinov3(tmp_path, name: str) -> None:
    theirs = timm_model(name)
    tensors = as_dinov3(theirs, 128, 2)
    if "7b" in name:
        tensors |= {f"local_cls_norm.{part}": torch.ones(128) for part in ("weight", "bias")}
    torch.save(tensors, tmp_path / "dinov3.pth")
    ours = vitkit.load(tmp_path / "dinov3.pth")
    assert ours.config.heads == 2
    assert ours.config.rotary.base == 100
    for size in ((64, 64), (96, 48)):
        images = torch.randn(2, 3, *size)
        theirs.set_input_size(img_size=size)
        close(ours.tokens(images), theirs.forward_features(images))
    close(ours(images), theirs.forward_features(images)[:, 0])  # Meta's output: the class token after the norm


def test_dinov3_says_what_it_cannot_read(tmp_path) -> None:
    tensors = as_dinov3(timm_model("vit_small_patch16_dinov3_qkvb"), 128, 2)
    changed = tensors | {"cls_norm.weight": torch.ones(128), "cls_norm.bias": torch.ones(128)}
    odd = tensors | {"rope_embed.periods": torch.linspace(1, 50, 16)}
    short = tensors | {"rope_embed.periods": torch.ones(5)}
    bare = {name: t for name, t in tensors.items() if "periods" not in name}
    for given, reason in [
        (changed, "cls_norm"),
        (odd, "no powers of one base"),
        (short, "do not fit"),
        (bare, "pass heads=N"),
    ]:
        torch.save(given, tmp_path / "d.pth")
        with pytest.raises(CheckpointError, match=reason):
            vitkit.load(tmp_path / "d.pth")


@torch.no_grad()
def test_dinov3_with_biases_of_keys_is_asked_for_its_epsilon(tmp_path) -> None:
    """Its training's default is LayerNorm with 1e-6 and no mask; all published models have 1e-5 and a mask."""
    theirs = timm_model("vit_small_patch16_dinov3_qkvb")
    tensors = {name: t for name, t in as_dinov3(theirs, 128, 2).items() if not name.endswith("bias_mask")}
    torch.save(tensors, tmp_path / "own.pth")
    with pytest.raises(CheckpointError, match=r"pass norm_eps=1e-6 .* or norm_eps=1e-5"):
        vitkit.load(tmp_path / "own.pth")
    assert vitkit.load(tmp_path / "own.pth", norm_eps=1e-6).config.norm_eps == 1e-6


@torch.no_grad()
def test_dinov3_with_its_linear_classifier(tmp_path) -> None:
    theirs = timm_model("vit_small_patch16_dinov3_qkvb")
    weight, bias = torch.randn(5, 256), torch.randn(5)
    tensors = {f"backbone.{name}": tensor for name, tensor in as_dinov3(theirs, 128, 2).items()}
    torch.save(tensors | {"linear_head.weight": weight, "linear_head.bias": bias}, tmp_path / "lc.pth")
    images = torch.randn(2, 3, 64, 64)
    tokens = theirs.forward_features(images)
    pooled = torch.cat([tokens[:, 0], tokens[:, 5:].mean(dim=1)], dim=1)  # after class token and four registers
    close(vitkit.load(tmp_path / "lc.pth", image_size=64)(images), pooled @ weight.T + bias)
    torch.save(tensors | {"linear_head.weight": weight[:, :-1], "linear_head.bias": bias}, tmp_path / "lc.pth")
    with pytest.raises(CheckpointError, match="linear_head of 255 columns"):
        vitkit.load(tmp_path / "lc.pth")


def as_perception(model: torch.nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    if "attn_pool.q.weight" in tensors:
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"attn_pool.{part}.{kind}") for part in ("q", "kv")]
            tensors[f"attn_pool.attn.in_proj_{kind}"] = torch.cat(parts)
            tensors[f"attn_pool.attn.out_proj.{kind}"] = tensors.pop(f"attn_pool.proj.{kind}")
            tensors[f"attn_pool.layernorm.{kind}"] = tensors.pop(f"attn_pool.norm.{kind}")
        tensors["attn_pool.probe"] = tensors.pop("attn_pool.latent")
        tensors["proj"] = tensors.pop("head.weight").T.contiguous()
        tensors.pop("head.bias")
    if "cls_token" in tensors:
        tensors["class_embedding"] = tensors.pop("cls_token").flatten()
    tensors["positional_embedding"] = tensors.pop("pos_embed")[0]
    names = {"patch_embed.proj": "conv1", "blocks.": "transformer.resblocks.", "norm_pre": "ln_pre"}
    names |= {
        "gamma_1": "ls_1.gamma",
        "gamma_2": "ls_2.gamma",
        ".attn.qkv.": ".attn.in_proj_",
        ".attn.proj": ".attn.out_proj",
    }
    names |= {".norm1.": ".ln_1.", ".norm2.": ".ln_2.", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
    return {("ln_post." + n[5:] if n.startswith("norm.") else n): t for n, t in swapped(tensors, **names).items()}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("vit_pe_core_base_patch16_224", True),
        ("vit_pe_core_gigantic_patch14_448", False),
        ("vit_pe_lang_large_patch14_448", False),
        ("vit_pe_spatial_gigantic_patch14_448", True),
    ],
)
def test_perception_encoder_at_its_own_size(tmp_path, name: str, wrapped: bool) -> None:
    patch = 14 if "14" in name else 16
    side = 4 * patch
    theirs = timm_model(name, img_size=side, embed_dim=192, num_heads=3, ref_feat_shape=(4, 4))
    if "core" in name:
        theirs.head.bias.zero_()  # Meta's projection has none
    tensors = as_perception(theirs)
    if wrapped:
        tensors = {f"visual.{name}": tensor for name, tensor in tensors.items()}
        tensors |= {"token_embedding.weight": torch.zeros(9, 4), "logit_scale": torch.zeros(())}
        tensors |= {"positional_embedding": torch.zeros(3, 4), "transformer.resblocks.0.ln_1.weight": torch.zeros(4)}
    torch.save(tensors, tmp_path / "pe.pt")
    ours = vitkit.load(tmp_path / "pe.pt")
    images = torch.randn(2, 3, side, side)
    close(ours.tokens(images), theirs.forward_features(images))
    if "core" in name:
        close(ours(images), theirs(images))
    else:
        assert any("pools nothing" in line for line in ours.load_report)


def test_perception_encoder_of_another_width_is_asked_about(tmp_path) -> None:
    theirs = timm_model("vit_pe_core_base_patch16_224", ref_feat_shape=(4, 4))
    torch.save(as_perception(theirs), tmp_path / "pe.pt")
    with pytest.raises(CheckpointError, match=r"width of 128.* pass heads=N"):
        vitkit.load(tmp_path / "pe.pt")
    assert vitkit.load(tmp_path / "pe.pt", heads=2).config.map_heads == 8


def eva_tables(side: int, trained: int, each: int) -> dict[str, Tensor]:
    """Cosines and sines as EVA-02's code keeps them: rows, then columns, each frequency twice."""
    omega = 10000.0 ** -(torch.arange(0, each // 2, 2) / (each // 2))
    angles = (torch.arange(side) / side * trained)[:, None] * omega
    rows, columns = (angles.repeat_interleave(2, dim=1).expand(side, side, -1).transpose(0, i) for i in (1, 0))
    both = torch.cat([rows, columns], dim=-1).flatten(0, 1)
    return {"rope.freqs_cos": both.cos(), "rope.freqs_sin": both.sin(), "blocks.0.attn.rope.freqs_cos": both.cos()}


def as_eva(model: torch.nn.Module, trained: int = 16) -> dict[str, Tensor]:
    """EVA-02's names; with sub-LN queries, keys and values are apart, and so are the gates. EVA's are timm's."""
    tensors = {name: t for name, t in model.state_dict().items() if "rope" not in name}
    if model.rope is not None:
        each = model.embed_dim // model.blocks[0].attn.num_heads
        tensors |= eva_tables(model.patch_embed.grid_size[0], trained, each)
    up, down = (tensors.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc2"))
    names = {"mlp.norm.": "mlp.ffn_ln.", "q_proj.bias": "q_bias", "v_proj.bias": "v_bias"}
    if up is None or len(up) == 2 * down.shape[1]:
        names |= {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2", "mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
    return swapped(tensors, **names)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["eva02_tiny_patch14_224", "eva02_base_patch14_224", pytest.param("eva_giant_patch14_224", marks=pytest.mark.slow)],
)
def test_eva(tmp_path, name: str) -> None:
    model = peers.import_timm().create_model(name, img_size=56, depth=1, num_classes=7)
    tables = [(buffer, buffer.clone()) for buffer in model.buffers()]
    theirs = peers.randomize(model, scale=0.05)
    for buffer, table in tables:
        buffer.copy_(table)
    torch.save({"module": as_eva(theirs)}, tmp_path / "eva.pt")
    heads = {"heads": 16} if "giant" in name else {}  # the others' tables tell
    ours = vitkit.load(tmp_path / "eva.pt", **heads)
    images = torch.randn(2, 3, 56, 56)
    close(ours(images), theirs(images))
    assert ours.config.heads == theirs.blocks[0].attn.num_heads
    masked = {k: v for k, v in as_eva(theirs).items() if not k.startswith(("fc_norm", "head"))}
    masked |= {f"norm.{part}": theirs.state_dict()[f"fc_norm.{part}"] for part in ("weight", "bias")}
    masked |= {"mask_token": torch.zeros(1, 1, ours.config.width), "lm_head.weight": torch.zeros(3, 4)}
    torch.save({"model": masked}, tmp_path / "eva.pt")
    again = vitkit.load(tmp_path / "eva.pt", **heads)
    close(again(images), theirs.forward_head(theirs.forward_features(images), pre_logits=True))
    assert any("masked pre-training" in line for line in again.load_report)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["fc_norm", "norm"])
@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "eva_giant_patch14_224"])
def test_eva_of_sizes_that_nobody_published(tmp_path, name: str, norm: str) -> None:
    """Its own tables tell heads and rotary positions, and without `fc_norm` its code reads the class token."""
    more = {"use_rot_pos_emb": True, "ref_feat_shape": (7, 7), "global_pool": "avg" if norm == "fc_norm" else "token"}
    theirs = timm_model(name, img_size=56, num_heads=4, num_classes=3, **more)
    tensors = as_eva(theirs, trained=7)
    assert f"{norm}.weight" in tensors
    torch.save(tensors, tmp_path / "eva.pt")
    ours = vitkit.load(tmp_path / "eva.pt", **({"block": "pre-norm"} if "giant" in name else {}))
    assert (ours.config.heads, ours.config.rotary.reference) == (4, (7, 7))
    images = torch.randn(2, 3, 56, 56)
    close(ours(images), theirs(images))


def test_eva_says_what_it_cannot_read(tmp_path) -> None:
    tensors = as_eva(timm_model("eva02_tiny_patch14_224", img_size=56))
    high = "blocks.0.attn.rel_pos_bias.relative_position_bias_for_high"
    for name, given, reason in [
        ("rope.freqs_cos", tensors["rope.freqs_cos"][:, :-2], "does not fit a width of 128"),
        ("rope.freqs_cos", tensors["rope.freqs_cos"] * 0.5, "not of base 10000"),
        (high, torch.zeros(9, 2), "a table for rows and one for columns"),
    ]:
        torch.save(tensors | {name: given}, tmp_path / "eva.pt")
        with pytest.raises(CheckpointError, match=reason):
            vitkit.load(tmp_path / "eva.pt")
