"""ResNet-D stems equal timm's backbones, with random running statistics, in evaluation and in training.

The map of names is written out here, so that a mistake in `vitkit.checkpoints` cannot hide one in the model.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import peers
import vitkit
from vitkit.model.config import StemConfig, ViTConfig
from vitkit.model.stem import build_stem
from vitkit.model.summary import summarize

timm = peers.import_timm()

TOLERANCE = 1e-5  # of the largest value: fp32 over some fifty convolutions in a row
RENAMES = (
    (r"^conv1\.([036])\.", lambda m: f"root.{int(m[1]) // 3}."),
    (r"^conv1\.([14])\.", lambda m: f"norms.{int(m[1]) // 3}."),
    (r"^bn1\.", "norms.2."),
    (r"^layer(\d)\.", lambda m: f"stages.{int(m[1]) - 1}."),
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.downsample\.", ".shortcut."),
)


def from_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in state.items():
        for pattern, ours in RENAMES:
            name = re.sub(pattern, ours, name)  # type: ignore[call-overload]
        if "num_batches_tracked" not in name:
            tensors[name] = tensor.clone()
    return tensors


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("layers", "size"), [((1, 2, 1, 1), (64, 64)), ((2, 1, 1), (48, 80)), ((1, 1), (33, 47))])
def test_map_of_the_last_stage(layers: tuple[int, ...], size: tuple[int, int], training: bool) -> None:
    """At odd sizes too: average pooling counts the pixels that are there."""
    shape = {"layers": (*layers, 1, 1, 1)[:4], "out_indices": [len(layers)], "features_only": True}
    theirs = peers.randomize(timm.create_model("resnet26d", **shape), scale=0.2).train(training)
    ours = build_stem(StemConfig(layers, variant="d"), 3).train(training)
    ours.load_state_dict(from_timm(theirs.state_dict()))
    images = torch.randn(3, 3, *size)
    with torch.no_grad():
        found, expected = ours(images), theirs(images)[-1]
    torch.testing.assert_close(found, expected, atol=TOLERANCE * expected.abs().max().item(), rtol=0)
    after, kept = from_timm(theirs.state_dict()), ours.state_dict()
    for name in [n for n in kept if "running" in n]:
        torch.testing.assert_close(kept[name], after[name], atol=1e-5, rtol=1e-4)


def small(**changes: object) -> ViTConfig:
    stem = StemConfig((1, 1), 8, variant="d")
    vit = ViTConfig(image_size=32, patch_size=8, width=16, depth=2, heads=2, mlp_width=32, classes=3, stem=stem)
    return vit.replace(**changes)


def test_a_hybrid_is_saved_loaded_counted_and_adapted(tmp_path: object) -> None:
    model = peers.randomize(vitkit.ViT(small()))
    vitkit.save(model, f"{tmp_path}/m.safetensors")
    images = torch.randn(2, 3, 32, 32)
    again = vitkit.load(f"{tmp_path}/m.safetensors")
    assert torch.equal(again(images), model(images))  # running statistics too
    grey = vitkit.load(f"{tmp_path}/m.safetensors", channels=1, image_size=(24, 40))
    assert grey(torch.randn(2, 1, 24, 40)).shape == (2, 3)
    counted = summarize(model.config)
    assert sum(layer["params"] for layer in counted["layers"]) == counted["params"]


def test_published_hybrids_have_timms_parameters() -> None:
    stem = StemConfig((2, 2, 2, 2), variant="d")
    config = ViTConfig(patch_size=32, width=768, depth=8, heads=8, mlp_width=2304, stem=stem)
    theirs = timm.create_model("vit_small_resnet26d_224")
    assert summarize(config)["params"] == sum(p.numel() for p in theirs.parameters())
