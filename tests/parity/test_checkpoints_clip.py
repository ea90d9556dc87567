"""CLIP's image tower under OpenAI's names, against transformers' CLIP with the same weights."""

from __future__ import annotations

import json

import pytest
import torch

import peers
from vitkit.checkpoints.load import load

transformers = peers.import_transformers()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def peer(act: str):
    config = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=32,
        patch_size=8,
        projection_dim=24,
        hidden_act=act,
    )
    return peers.randomize(transformers.CLIPVisionModelWithProjection(config), scale=0.1)


def openai_state(model) -> dict[str, torch.Tensor]:
    old = {k.removeprefix("vision_model."): v for k, v in model.state_dict().items()}
    state = {
        "conv1.weight": old["embeddings.patch_embedding.weight"],
        "class_embedding": old["embeddings.class_embedding"],
        "positional_embedding": old["embeddings.position_embedding.weight"],
        "proj": old["visual_projection.weight"].T.contiguous(),
    }
    for part in ("weight", "bias"):
        state[f"ln_pre.{part}"] = old[f"pre_layrnorm.{part}"]
        state[f"ln_post.{part}"] = old[f"post_layernorm.{part}"]
        for i in range(2):
            block, layer = f"transformer.resblocks.{i}", f"encoder.layers.{i}"
            qkv = [old[f"{layer}.self_attn.{one}_proj.{part}"] for one in "qkv"]
            state[f"{block}.attn.in_proj_{part}"] = torch.cat(qkv)
            state[f"{block}.attn.out_proj.{part}"] = old[f"{layer}.self_attn.out_proj.{part}"]
            state[f"{block}.ln_1.{part}"] = old[f"{layer}.layer_norm1.{part}"]
            state[f"{block}.ln_2.{part}"] = old[f"{layer}.layer_norm2.{part}"]
            state[f"{block}.mlp.c_fc.{part}"] = old[f"{layer}.mlp.fc1.{part}"]
            state[f"{block}.mlp.c_proj.{part}"] = old[f"{layer}.mlp.fc2.{part}"]
    return {k: v.clone() for k, v in state.items()}


@pytest.mark.parametrize("prefix", ["visual.", "module.visual.", ""])
@torch.no_grad()
def test_openai(prefix: str, tmp_path) -> None:
    theirs = peer("quick_gelu")
    text = {"token_embedding.weight": torch.randn(8, 4), "logit_scale": torch.ones(())} if prefix else {}
    torch.save({f"{prefix}{k}": v for k, v in openai_state(theirs).items()} | text, tmp_path / "clip.pt")
    ours = load(tmp_path / "clip.pt")
    config = ours.config
    assert (config.classes, config.projection, config.pre_norm, config.activation) == (0, 24, True, "quick-gelu")
    assert config.preprocessing.mean[0] == pytest.approx(0.48145466)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images).image_embeds)
    images = torch.randn(2, 3, 64, 48)
    like_theirs = load(tmp_path / "clip.pt", resize="huggingface")
    close(like_theirs(images), theirs(images, interpolate_pos_encoding=True).image_embeds)
    assert load(tmp_path / "clip.pt", classes=6)(images).shape == (2, 6)


@torch.no_grad()
def test_open_clip_folder_says_which_gelu(tmp_path) -> None:
    theirs = peer("gelu")
    torch.save({f"visual.{k}": v for k, v in openai_state(theirs).items()}, tmp_path / "open_clip_pytorch_model.bin")
    about = {"model_cfg": {"embed_dim": 24, "vision_cfg": {"width": 64, "layers": 2, "patch_size": 8}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(about))
    ours = load(tmp_path)
    assert (ours.config.activation, ours.config.heads) == ("gelu", 1)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images).image_embeds)


@torch.no_grad()
def test_half_precision_is_kept_or_converted(tmp_path) -> None:
    theirs = peer("quick_gelu")
    state = {f"visual.{k}": v.half() for k, v in openai_state(theirs).items()}
    torch.save(state, tmp_path / "half.pt")
    assert load(tmp_path / "half.pt").norm.weight.dtype == torch.float16
    full = load(tmp_path / "half.pt", dtype="float32")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(full(images), theirs(images).image_embeds, atol=0.02, rtol=0.02)
    state["visual.ln_pre.weight"] = state["visual.ln_pre.weight"].float()  # as OpenAI's own files mix them
    torch.save(state, tmp_path / "mixed.pt")
    mixed = load(tmp_path / "mixed.pt")
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}
    assert any("mixes" in line for line in mixed.load_report)
