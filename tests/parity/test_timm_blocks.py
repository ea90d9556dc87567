"""The blocks and layers of published variants equal timm's own, with the same random weights.

The map of names is written out here, as in `test_timm.py`. One block deep, numbers of order 1: fp32 keeps them
within 1e-5; a missing norm or bias, or a wrong order, shows from 1e-2 up.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import peers
from vitkit.model.attention_variants import VariantAttention, build_attention
from vitkit.model.blocks import block_kind
from vitkit.model.config import ViTConfig
from vitkit.model.head import MapPool
from vitkit.model.mlp import build_mlp
from vitkit.model.positions import Place

timm = peers.import_timm()
from timm.layers import Attention, AttentionPoolLatent, GluMlp, LayerNorm, Mlp, RmsNorm, SwiGLU  # noqa: E402
from timm.models.eva import EvaAttention, EvaBlockPostNorm  # noqa: E402
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock  # noqa: E402

WIDTH, HEADS, MLP_WIDTH, TOKENS = 24, 3, 40, 11
RATIO = MLP_WIDTH / WIDTH
NORMS = {"layernorm": partial(LayerNorm, eps=1e-6), "rmsnorm": partial(RmsNorm, eps=1e-6)}
RENAMES = (
    (r"(^|\.)attn\.", r"\1attention."),
    (r"(^|\.)q_norm\.", r"\1query_norm."),
    (r"(^|\.)k_norm\.", r"\1key_norm."),
    (r"(^|\.)q_bias$", r"\1query_bias"),
    (r"(^|\.)v_bias$", r"\1value_bias"),
    (r"(^|\.)proj\.", r"\1out."),
    (r"(^|\.)fc1\.", r"\1up."),
    (r"(^|\.)fc2\.", r"\1down."),
    (r"\.?\bls([12])\.gamma$", r"scale\1"),
    (r"^attns\.(\d)\.norm\.", r"branches.\1.norm1."),
    (r"^attns\.(\d)\.attention\.", r"branches.\1.attention."),
    (r"^attns\.(\d)\.ls\.gamma", r"branches.\1.scale1"),
    (r"^ffns\.(\d)\.norm\.", r"branches.\1.norm2."),
    (r"^ffns\.(\d)\.mlp\.", r"branches.\1.mlp."),
    (r"^ffns\.(\d)\.ls\.gamma", r"branches.\1.scale2"),
    (r"^latent$", "probe"),
    (r"^q\.", "query."),
    (r"^kv\.", "key_value."),
)


def config_of(**changes: object) -> ViTConfig:
    sizes = {"image_size": 8, "patch_size": 4, "width": WIDTH, "heads": HEADS, "mlp_width": MLP_WIDTH, "depth": 1}
    return ViTConfig(**(sizes | {"positions": "none"} | changes))  # type: ignore[arg-type]


def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in state.items():
        for pattern, new in RENAMES:
            name = re.sub(pattern, new, name)
        found[name] = tensor
    return found


def assert_equal(ours: nn.Module, theirs: nn.Module, tensors: dict[str, Tensor] | None = None, **call: object) -> None:
    ours.eval().load_state_dict(renamed(theirs.state_dict()) if tensors is None else tensors)
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, **call), theirs(x), rtol=1e-5, atol=1e-5)


PLACE = Place((1, TOKENS))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"qk_norm": True}, {"qk_norm": True}),
        ({"attention_norm": True}, {"scale_norm": True}),
        ({"qk_norm": True, "attention_norm": True, "qkv_bias": False}, {"qk_norm": True, "scale_norm": True}),
        ({"out_bias": False}, {"proj_bias": False}),
        ({"head_width": 4}, {"attn_head_dim": 4}),
        ({"head_width": 12, "qk_norm": True, "attention_norm": True}, {"attn_head_dim": 12, "qk_norm": True}),
    ],
)
def test_attention(norm: str, ours: dict[str, object], theirs: dict[str, object]) -> None:
    theirs = {"qkv_bias": ours.get("qkv_bias", True), "scale_norm": "attention_norm" in ours} | theirs
    peer = randomized(Attention(WIDTH, HEADS, norm_layer=NORMS[norm], **theirs))
    attention = build_attention(config_of(norm=norm, **ours))
    assert isinstance(attention, VariantAttention)
    assert_equal(attention, peer)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_without_key_bias(fused: bool) -> None:
    peer = randomized(EvaAttention(WIDTH, HEADS, qkv_fused=fused, norm_layer=NORMS["layernorm"], num_prefix_tokens=0))
    attention = build_attention(config_of(key_bias=False, attention_norm=True))
    tensors = renamed(peer.state_dict())
    if not fused:
        tensors["qkv.weight"] = torch.cat([tensors.pop(f"{name}_proj.weight") for name in "qkv"])
        tensors |= {"query_bias": tensors.pop("q_proj.bias"), "value_bias": tensors.pop("v_proj.bias")}
    assert_equal(attention, peer, tensors)


@pytest.mark.parametrize(
    ("config", "peer"),
    [
        ({"mlp_norm": True}, partial(Mlp, norm_layer=NORMS["layernorm"])),
        ({"mlp_bias": False, "activation": "relu"}, partial(Mlp, bias=False, act_layer=nn.ReLU)),
        (
            {"mlp_norm": True, "norm": "rmsnorm", "activation": "silu"},
            partial(Mlp, norm_layer=NORMS["rmsnorm"], act_layer=nn.SiLU),
        ),
    ],
)
def test_mlp(config: dict[str, object], peer: partial[nn.Module]) -> None:
    assert_equal(build_mlp(config_of(**config)), randomized(peer(WIDTH, MLP_WIDTH)))


def test_gated_mlps_packed_and_apart() -> None:
    normed = {"norm_layer": NORMS["layernorm"]}
    packed = GluMlp(WIDTH, 2 * MLP_WIDTH, act_layer=nn.SiLU, gate_last=False, **normed)
    assert_equal(build_mlp(config_of(activation="swiglu", mlp_norm=True)), randomized(packed))
    apart = randomized(SwiGLU(WIDTH, MLP_WIDTH, **normed))
    tensors = renamed(apart.state_dict())
    for kind in ("weight", "bias"):  # gate first, then value
        tensors[f"up.{kind}"] = torch.cat([tensors.pop(f"fc1_g.{kind}"), tensors.pop(f"fc1_x.{kind}")])
    assert_equal(build_mlp(config_of(activation="swiglu", mlp_norm=True)), apart, tensors)


def theirs_of(kind: type[nn.Module], norm: str = "layernorm", **options: object) -> nn.Module:
    return randomized(kind(WIDTH, HEADS, mlp_ratio=RATIO, norm_layer=NORMS[norm], **options))


def ours_of(**changes: object) -> nn.Module:
    config = config_of(**changes)
    return block_kind(config)(config)


@pytest.mark.parametrize("norm", NORMS)
def test_residual_post_norm(norm: str) -> None:
    peer = theirs_of(ResPostBlock, norm, qkv_bias=True, qk_norm=True, init_values=0.1)
    assert_equal(ours_of(block="post-norm", norm=norm, qk_norm=True, layer_scale=0.1), peer, place=PLACE)


def test_post_norm_of_eva() -> None:
    peer = theirs_of(EvaBlockPostNorm, num_prefix_tokens=0, scale_attn_inner=True)
    ours = ours_of(block="post-norm", key_bias=False, attention_norm=True)
    assert_equal(ours, peer, place=PLACE)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("proj_bias", [True, False])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_parallel_attention_and_mlp(qkv_bias: bool, proj_bias: bool, fused: bool) -> None:
    """timm's one map in: the MLP's rows, then queries, keys, values. The MLP keeps its bias when they have none."""
    options = {"qkv_bias": qkv_bias, "proj_bias": proj_bias, "fuse_out_proj": fused}
    peer = theirs_of(ParallelScalingBlock, "rmsnorm", qk_norm=True, init_values=0.5, **options)
    state, m = peer.state_dict(), MLP_WIDTH
    weight = state["in_proj.weight"]
    tensors = {"norm1.weight": state["in_norm.weight"], "scale1": state["ls.gamma"]}
    tensors |= {"attention.qkv.weight": weight[m:], "mlp.up.weight": weight[:m]}
    tensors["mlp.up.bias"] = state["in_proj.bias"][:m] if qkv_bias else state["mlp_bias"]
    if qkv_bias:
        tensors["attention.qkv.bias"] = state["in_proj.bias"][m:]
    tensors |= {f"attention.{ours}_norm.weight": state[f"{ours[0]}_norm.weight"] for ours in ("query", "key")}
    for ours, theirs in {"attention.out": "attn", "mlp.down": "mlp"}.items():
        out = state["out_proj.weight"].split([WIDTH, m], dim=1)[theirs == "mlp"] if fused else None
        tensors[f"{ours}.weight"] = state[f"{theirs}_out_proj.weight"] if out is None else out
        if proj_bias:
            bias = state["out_proj.bias"] / 2 if fused else state[f"{theirs}_out_proj.bias"]
            tensors[f"{ours}.bias"] = bias
    fields = {"qkv_bias": qkv_bias, "out_bias": proj_bias, "mlp_bias": proj_bias}
    ours = ours_of(block="parallel", norm="rmsnorm", qk_norm=True, layer_scale=0.5, **fields)
    assert_equal(ours, peer, tensors, place=PLACE)


@pytest.mark.parametrize("norm", NORMS)
def test_branches_side_by_side(norm: str) -> None:
    peer = theirs_of(ParallelThingsBlock, norm, num_parallel=3, qkv_bias=True, qk_norm=True, init_values=0.5)
    assert_equal(ours_of(branches=3, norm=norm, qk_norm=True, layer_scale=0.5), peer, place=PLACE)


@pytest.mark.parametrize("norm", NORMS)
def test_map_head_of_other_heads_and_width(norm: str) -> None:
    peer = randomized(AttentionPoolLatent(WIDTH, num_heads=8, mlp_ratio=2.0, norm_layer=NORMS[norm]))
    config = config_of(pooling="map", map_heads=8, map_mlp_width=2 * WIDTH, norm=norm)
    tensors = renamed(peer.state_dict())
    tensors["probe"] = tensors["probe"][0]
    assert_equal(MapPool(config), peer, tensors)
    patches_alone = MapPool(config.replace(map_prefix=False, registers=2)).eval()
    patches_alone.load_state_dict(tensors)
    x = torch.randn(2, TOKENS, WIDTH)
    torch.testing.assert_close(patches_alone(x), peer(x[:, 3:]), rtol=1e-5, atol=1e-5)
