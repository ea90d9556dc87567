"""torchvision: the same logits from the same state dict, resized its own way, and back again."""

from __future__ import annotations

import pytest
import torch

import peers
from vitkit.checkpoints import writing
from vitkit.checkpoints.load import load, open_checkpoint

torchvision = peers.import_torchvision()
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings  # noqa: E402

SMALL = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 5}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def peer(image_size: int = 32, **more) -> torch.nn.Module:
    return peers.randomize(VisionTransformer(image_size, **{**SMALL, **more}), scale=0.1)


@pytest.mark.parametrize("more", [{}, {"representation_size": 24}])
@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@torch.no_grad()
def test_same_logits_and_back(more: dict, ending: str, tmp_path) -> None:
    theirs = peer(**more)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = load(tmp_path / "weights.pth", heads=2)
    images = torch.randn(2, 3, 32, 32)
    close(ours(images), theirs(images))
    checkpoint = open_checkpoint(tmp_path / "weights.pth", heads=2)
    writing.write(checkpoint, tmp_path / f"again{ending}", "torchvision")
    again = peer(**more)
    if ending == ".pth":
        state = torch.load(tmp_path / "again.pth", weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(tmp_path / "again.safetensors")
    again.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[k], t) for k, t in theirs.state_dict().items())
    back = open_checkpoint(tmp_path / f"again{ending}", heads=2)
    assert back.config == checkpoint.config
    assert all(torch.equal(back.tensors[k], t) for k, t in checkpoint.tensors.items())


@torch.no_grad()
def test_resized_as_torchvision_does(tmp_path) -> None:
    """torchvision resizes to squares only, so that is what can be compared."""
    theirs = peer()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    larger = peer(image_size=56)
    larger.load_state_dict(interpolate_embeddings(56, 8, theirs.state_dict()))
    images = torch.randn(2, 3, 56, 56)
    close(load(tmp_path / "weights.pth", heads=2)(images), larger(images))
    close(load(tmp_path / "weights.pth", heads=2, image_size=56)(images), larger(images))


@torch.no_grad()
def test_names_before_version_0_13(tmp_path) -> None:
    theirs = peer()
    old = {
        k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v
        for k, v in theirs.state_dict().items()
    }
    torch.save(old, tmp_path / "old.pth")
    images = torch.randn(2, 3, 32, 32)
    close(load(tmp_path / "old.pth", heads=2)(images), theirs(images))
