"""Hugging Face: ViT, DeiT and DINOv2 folders give transformers' own outputs, and ViT goes back."""

from __future__ import annotations

import json

import pytest
import torch

import peers
from vitkit.checkpoints import writing
from vitkit.checkpoints.load import load, open_checkpoint

transformers = peers.import_transformers()

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "eel"}, "label2id": {"cat": 0, "dog": 1, "eel": 2}}
MODELS = {  # name: (model, configuration, its options)
    "vit": ("ViTForImageClassification", "ViTConfig", {"intermediate_size": 64}),
    "vit tanh": (
        "ViTForImageClassification",
        "ViTConfig",
        {"intermediate_size": 64, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "vit no qkv bias": ("ViTForImageClassification", "ViTConfig", {"intermediate_size": 64, "qkv_bias": False}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {"intermediate_size": 64}),
    "deit distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"intermediate_size": 64}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {}),
    "dinov2 swiglu": ("Dinov2ForImageClassification", "Dinov2Config", {"use_swiglu_ffn": True}),
    "dinov2 registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersConfig",
        {"num_register_tokens": 3},
    ),
}


def peer(name: str):
    model, config, options = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **LABELS, **options))
    return peers.randomize(made, scale=0.1)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def logits(model, images: torch.Tensor) -> torch.Tensor:
    options = {} if "Dinov2" in type(model).__name__ else {"interpolate_pos_encoding": True}
    return model(images, **options).logits


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_same_logits_at_both_sizes(name: str, tmp_path) -> None:
    theirs = peer(name)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.class_names == ("cat", "dog", "eel")
    for size in ((32, 32), (64, 48)):
        images = torch.randn(2, 3, *size)
        close(ours(images), logits(theirs, images))


@pytest.mark.parametrize("name", [n for n in MODELS if n.startswith("vit")])
@torch.no_grad()
def test_written_and_read_back_by_transformers(name: str, tmp_path) -> None:
    theirs = peer(name)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    assert writing.write(checkpoint, tmp_path / "ours", "huggingface") == []
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "ours").eval()
    assert again.config.id2label == {0: "cat", 1: "dog", 2: "eel"}
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    images = torch.randn(2, 3, 64, 48)
    close(logits(again, images), logits(theirs, images))
    back = open_checkpoint(tmp_path / "ours")
    assert back.config.replace(preprocessing=checkpoint.config.preprocessing) == checkpoint.config
    assert all(torch.equal(back.tensors[k], t) for k, t in checkpoint.tensors.items())


@torch.no_grad()
def test_bare_models_give_the_pooled_output(tmp_path) -> None:
    vit = peers.randomize(transformers.ViTModel(transformers.ViTConfig(**SMALL, intermediate_size=64)), scale=0.1)
    vit.save_pretrained(tmp_path / "vit")
    images = torch.randn(2, 3, 32, 32)
    ours = load(tmp_path / "vit")
    assert ours.config.classes == 0
    close(ours(images), vit(images).pooler_output)
    writing.write(open_checkpoint(tmp_path / "vit"), tmp_path / "again", "huggingface")
    again = transformers.ViTModel.from_pretrained(tmp_path / "again").eval()
    close(again(images).pooler_output, vit(images).pooler_output)

    dino = peers.randomize(transformers.Dinov2Model(transformers.Dinov2Config(**SMALL)), scale=0.1)
    dino.save_pretrained(tmp_path / "dino")
    ours = load(tmp_path / "dino")
    assert any("mask_token" in line for line in ours.load_report)
    close(ours(images), dino(images).pooler_output)
    fine = load(tmp_path / "dino", classes=7)
    assert fine(images).shape == (2, 7)


@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_preprocessing_goes_both_ways(fit: str, tmp_path) -> None:
    peer("vit").save_pretrained(tmp_path / "m")
    size = {"height": 32, "width": 32} if fit == "squash" else {"shortest_edge": 40}
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "size": size}
    processor |= {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}} if fit == "crop" else {}
    (tmp_path / "m/preprocessor_config.json").write_text(json.dumps(processor))
    checkpoint = open_checkpoint(tmp_path / "m")
    pre = checkpoint.config.preprocessing
    assert (pre.fit, pre.interpolation, pre.mean, pre.std) == (fit, "bicubic", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert pre.crop == pytest.approx(1.0 if fit == "squash" else 0.8)
    writing.write(checkpoint, tmp_path / "again", "huggingface")
    assert open_checkpoint(tmp_path / "again").config == checkpoint.config


@torch.no_grad()
def test_state_dict_saved_by_hand_and_shards(tmp_path) -> None:
    theirs = peer("vit")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards/model.safetensors.index.json").exists()
    images = torch.randn(2, 3, 32, 32)
    close(load(tmp_path / "shards")(images), logits(theirs, images))
    (tmp_path / "hand").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "hand/pytorch_model.bin")
    (tmp_path / "hand/config.json").write_text((tmp_path / "shards/config.json").read_text())
    close(load(tmp_path / "hand")(images), logits(theirs, images))
