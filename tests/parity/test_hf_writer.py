"""Folders that vitkit writes: equal outputs of transformers without vitkit, to 1e-4; read back bit-identical.

Epsilon, activation and rotary base are no class's default, and a config.json without one of them must give others.

Also: the attention weights of every block are transformers' `output_attentions` (eager), with registers and rotary
positions too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import hf_peer
import pytest
import torch
from test_hf_census import ALL, REFUSED, SMALL, TOLERANCE, transformers
from test_hf_census import build as built

from vitkit.checkpoints import writing
from vitkit.checkpoints.load import load, open_checkpoint
from vitkit.errors import CheckpointError

# Read, but written as another class that computes the same: MAE and MSN as ViT, the towers of others as CLIP's, ...
OTHERS = ("ViTMAE", "ViTMSN", "MetaClip2", "AltCLIP", "ChineseCLIP", "CLIPModel", "SiglipModel", "Data2Vec")
OTHERS += ("SiglipVisionModel, no head",)
NAMES = [name for name in ALL if name not in REFUSED]
FEW = ["DINOv3ViTModel", "BeitForImageClassification", "SiglipVisionModel"]
EPSILON, ACTIVATION = {"layer_norm_eps": 0.05}, {"hidden_act": "relu"}  # no class's default


def unusual(name: str) -> dict[str, object]:
    """Numbers of config.json that weights do not show, at values that a class would not choose by itself."""
    if "Aimv2" in name:
        return {"rms_norm_eps": 0.05}
    rotary = {"rope_theta": 30.0} if "DINOv3" in name else {}
    gated = "gated" in name or "use_swiglu_ffn" in ALL[name][1]  # by silu
    return EPSILON | rotary | ({} if gated else ACTIVATION)


@torch.no_grad()
def write(name: str, folder: Path, classes: int = 0) -> dict[str, torch.Tensor]:
    """The model of the census, read from one folder and written into another: the outputs of ours for a batch."""
    theirs = built(name, **unusual(name))
    theirs.save_pretrained(folder / "theirs")
    checkpoint = open_checkpoint(folder / "theirs")
    ours = load(folder / "theirs", **{"classes": classes} if classes else {})
    if classes:
        torch.nn.init.normal_(ours.head.classifier.weight)
        checkpoint.config, checkpoint.tensors, checkpoint.outputs = ours.config, ours.state_dict(), ours.outputs
    writing.write(checkpoint, folder / "written", "huggingface")
    back = open_checkpoint(folder / "written")
    assert back.config.replace(preprocessing=checkpoint.config.preprocessing) == checkpoint.config, name
    assert back.tensors.keys() == checkpoint.tensors.keys(), name
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in checkpoint.tensors.items()), name
    written = json.loads((folder / "written/config.json").read_text())["architectures"]
    assert classes or name.startswith(OTHERS) or written == [type(theirs).__name__], (name, written)
    images = torch.randn(2, 3, *ours.config.image_size, generator=torch.Generator().manual_seed(1))
    torch.save(images, folder / "images.pt")
    return {"pooled": ours(images), "tokens": ours.tokens(images)}


def difference(ours: dict[str, torch.Tensor], folder: Path) -> float:
    """The largest one, as a part of the range of the peer's output."""
    theirs = torch.load(folder / "outputs.pt")
    assert isinstance(theirs, dict), f"{folder.name}: {theirs}"
    assert theirs
    assert all(ours[key].shape == value.shape for key, value in theirs.items()), folder.name
    return max(float((ours[key] - value).abs().max() / (value.max() - value.min())) for key, value in theirs.items())


def check(names: list[str], folder: Path, compute: Callable[[Path], None]) -> None:
    """Each class as it is and, where that makes another model, with three classes; then mistakes in config.json."""
    jobs = {name: (name, 0) for name in names}
    jobs |= {f"{name}, 3 classes": (name, 3) for name in names if "Classification" not in name}
    ours = {}
    for job, (name, classes) in jobs.items():
        ours[job] = write(name, folder / job, classes)
    wrong = {
        f"{name}, wrong {key}": name for name in names for key in ("eps", "act", "theta") if mistake(name, key, folder)
    }
    compute(folder)
    for job in jobs:
        assert (off := difference(ours[job], folder / job)) <= TOLERANCE, (job, off)
    for job, name in wrong.items():
        assert (off := difference(ours[name], folder / job)) > TOLERANCE, (job, off)


def mistake(name: str, key: str, folder: Path) -> bool:
    """A copy whose config.json leaves one number out."""
    about = json.loads((folder / name / "written/config.json").read_text())
    vision = about.get("vision_config", about)
    keys = [k for k in unusual(name) if key in k]
    if keys:
        shutil.copytree(folder / name, folder / f"{name}, wrong {key}")
        del vision[keys[0]]
        (folder / f"{name}, wrong {key}/written/config.json").write_text(json.dumps(about))
    return bool(keys)


def without_vitkit(folder: Path) -> None:
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-S", hf_peer.__file__, str(folder)]  # -S: nothing that a .pth file would add
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", FEW)
def test_written_folders_give_equal_outputs(name: str, tmp_path) -> None:
    check([name], tmp_path, hf_peer.main)


@pytest.mark.slow
def test_every_class_without_vitkit(tmp_path) -> None:
    check(NAMES, tmp_path, without_vitkit)


@pytest.mark.parametrize("changes", [{"image_size": (32, 48)}, {"patch_size": (8, 16)}])
@pytest.mark.parametrize(("name", "held"), [("ViTModel", True), ("SiglipForImageClassification", False)])
@torch.no_grad()
def test_sides_that_differ_are_kept_or_refused(name: str, held: bool, changes: dict, tmp_path) -> None:
    """transformers builds CLIP, SigLIP and AIMv2 with one number for both sides; DINOv2 and BEiT resize squares."""
    built(name).save_pretrained(tmp_path / "theirs")
    ours, checkpoint = load(tmp_path / "theirs", **changes), open_checkpoint(tmp_path / "theirs")
    checkpoint.config, checkpoint.tensors = ours.config, ours.state_dict()
    if not held:
        with pytest.raises(CheckpointError, match=rf"{next(iter(changes))}=.* \(not square\).*siglip.*--to native"):
            writing.write(checkpoint, tmp_path / "written", "huggingface")
        return
    writing.write(checkpoint, tmp_path / "written", "huggingface")
    images = torch.randn(2, 3, *ours.config.image_size)
    theirs = transformers.ViTModel.from_pretrained(tmp_path / "written").eval()
    torch.testing.assert_close(ours(images), theirs(images).pooler_output, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_classifier_beside_a_base_model(tmp_path) -> None:
    """DINOv3, which has no class with a classifier, fine-tuned here: its pooled output through classifier.*"""
    theirs = built("DINOv3ViTModel")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs", classes=3)
    torch.nn.init.normal_(ours.head.classifier.weight)
    checkpoint = open_checkpoint(tmp_path / "theirs")
    checkpoint.config, checkpoint.tensors = ours.config, ours.state_dict()
    notes = writing.write(checkpoint, tmp_path / "ours", "huggingface")
    assert any("classifier" in note for note in notes)
    images = torch.randn(2, 3, 32, 32)
    pooled = transformers.DINOv3ViTModel.from_pretrained(tmp_path / "ours").eval()(images).pooler_output
    torch.testing.assert_close(ours.head.classifier(pooled), ours(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(load(tmp_path / "ours")(images), ours(images))


@pytest.mark.parametrize("name", ["Dinov2WithRegistersModel", "DINOv3ViTModel"])
@torch.no_grad()
def test_attention_weights_are_the_peers(name: str, tmp_path) -> None:
    theirs = built(name)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path)
    for size in ((32, 32), (48, 64)):
        images, kept = torch.randn(2, 3, *size), list[torch.Tensor]()
        load(tmp_path)(images, on_weights=kept.append)
        wanted = theirs(images, output_attentions=True).attentions
        assert len(kept) == len(wanted) == SMALL["num_hidden_layers"]
        for a, b in zip(kept, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
