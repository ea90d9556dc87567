"""Written for timm, built by timm in an interpreter that has no vitkit: equal logits. Read back: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import timm_census as census
import torch

from vitkit.checkpoints import timm_models, writing
from vitkit.checkpoints.load import load, open_checkpoint
from vitkit.errors import CheckpointError

FEW = ["vit_base_patch16_224", "vit_base_patch16_clip_quickgelu_224", "vit_so400m_patch14_siglip_384"]
FEW += ["vit_base_patch16_18x2_224", "vit_base_patch16_xp_224", "vit_base_patch16_rpn_224", "aimv2_large_patch14_224"]
FEW += ["vit_giant_patch14_reg4_dinov2", "beit3_base_patch16_224", "deit3_small_patch16_224", "beitv2_base_patch16_224"]
FEW += ["deit_tiny_distilled_patch16_224", "eva02_base_patch14_448", "eva02_enormous_patch14_clip_224"]
FEW += ["vit_7b_patch16_dinov3", "vit_base_patch16_dinov3_qkvb", "vit_pe_core_base_patch16_224"]
FEW += ["vit_pe_lang_large_patch14_448", "vit_small_patch16_rope_mixed_ape_224", "vit_tiny_r_s16_p8_224"]
FEW += ["vit_relpos_base_patch16_cls_224", "vit_srelpos_small_patch16_224", "vit_intern300m_patch14_448"]

BUILT_BY_TIMM = """
import importlib.util, pathlib, sys, torch, peers
timm = peers.import_timm()
assert importlib.util.find_spec("vitkit") is None and "vitkit" not in sys.modules
for folder in pathlib.Path(sys.argv[1]).iterdir():
    model = timm.create_model(f"local-dir:{folder / 'written'}", pretrained=True).eval()
    images = torch.load(folder / "images.pt")
    with torch.inference_mode():
        torch.save(model.to(images.dtype)(images), folder / "logits.pt")
"""


@torch.inference_mode()
def write(name: str, folder: Path) -> torch.Tensor:
    """The census' model, read from timm's folder and written into another; and the logits of ours."""
    args = census.shrunken(name, native=False)
    census.save(census.peer(name, **args), folder / "original", args)
    checkpoint = open_checkpoint(folder / "original")
    writing.write(checkpoint, folder / "written", "timm")
    back = open_checkpoint(folder / "written")
    assert back.config == checkpoint.config, name
    assert back.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(back.tensors[key], tensor) for key, tensor in checkpoint.tensors.items()), name
    ours = load(folder / "written")
    images = torch.rand(1, 3, *checkpoint.config.image_size).to(next(ours.parameters()).dtype)
    torch.save(images, folder / "images.pt")
    return ours(images)


def check(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    ours = {name: write(name, tmp_path / name) for name in names}
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1])]
    without = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # -S: nothing that a .pth file would add
    command = [sys.executable, "-S", "-c", BUILT_BY_TIMM, str(tmp_path)]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, found in ours.items():
        expected = torch.load(tmp_path / name / "logits.pt")
        off = (found - expected).abs().max() / (expected.max() - expected.min())
        assert off < census.TOLERANCE[found.dtype], (name, off)


def test_a_few_without_vitkit(tmp_path: Path) -> None:
    check(FEW[::5], tmp_path)


@pytest.mark.slow
def test_one_of_every_kind_without_vitkit(tmp_path: Path) -> None:
    check(FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("module", census.MODULES[:6])
def test_every_model_without_vitkit(module: str, tmp_path: Path) -> None:
    def has(name: str) -> bool:
        try:
            return bool(timm_models.known(name, {}))
        except CheckpointError:
            return False

    # timm fetches the weights of a ResNet-D itself when it builds one of these from a folder
    names = [name for name in census.NAMES if census.NAMES[name] == module and "_resnet" not in name]
    check([name for name in names if has(name)], tmp_path)


@pytest.mark.parametrize("shared", [False, True])
@torch.no_grad()
def test_beit_with_learned_positions_beside_relative_ones(shared: bool, tmp_path: Path) -> None:
    name = "beitv2_base_patch16_224"
    args = census.shrunken(name, native=False) | {"use_abs_pos_emb": True}
    args |= {"use_shared_rel_pos_bias": shared, "use_rel_pos_bias": not shared}
    theirs = census.peer(name, **args)
    census.save(theirs, tmp_path / "original", args)
    ours = load(tmp_path / "original")
    assert ours.config.positions == ("learned+relative-shared" if shared else "learned+relative")
    assert census.compare(ours, theirs, ours.config.image_size) == "exact"
    writing.write(open_checkpoint(tmp_path / "original"), tmp_path / "written", "timm")
    again = open_checkpoint(tmp_path / "written")
    assert all(torch.equal(again.tensors[key], tensor) for key, tensor in ours.state_dict().items())
    args |= {"use_shared_rel_pos_bias": True, "use_rel_pos_bias": True}
    census.save(census.peer(name, **args), tmp_path / "both", args)
    with pytest.raises(CheckpointError, match="both of each block and shared by all"):
        load(tmp_path / "both")
