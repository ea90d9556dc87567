"""A loaded model owns its weights: what happens to the file afterwards changes and kills nothing."""

import os
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.checkpoints.files import open_tensors
from vitkit.errors import CheckpointError

SMALL = {"image_size": 32, "patch_size": 16, "width": 64, "depth": 1, "heads": 1, "mlp_width": 64, "classes": 10}


@pytest.fixture(params=["safetensors", "timm", "legacy"])
def path(request: pytest.FixtureRequest, command, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = vitkit.create("vit-ti/16", **SMALL)
    torch.nn.init.normal_(model.head.classifier.weight)
    vitkit.save(model, tmp_path / "m.safetensors")
    if request.param == "safetensors":
        return tmp_path / "m.safetensors"
    assert command("convert", tmp_path / "m.safetensors", "--to", "timm", tmp_path / "m.pth")[0] == 0
    if request.param == "legacy":
        content = torch.load(tmp_path / "m.pth", weights_only=True)
        torch.save(content, tmp_path / "m.pth", _use_new_zipfile_serialization=False)
    return tmp_path / "m.pth"


@torch.inference_mode()
@pytest.mark.parametrize("damage", ["zeros", "cut"])
def test_a_loaded_model_does_not_see_its_file_again(path: Path, damage: str) -> None:
    model = vitkit.load(path, heads=1)
    images = torch.ones(1, 3, 32, 32)
    before = model(images)
    size = path.stat().st_size
    with path.open("r+b") as file:  # in place: the same inode
        file.truncate(size if damage == "zeros" else 10)
        if damage == "zeros":
            file.write(bytes(size))
    assert torch.equal(model(images), before)
    assert before.abs().sum() > 0


def test_a_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    tensors, _ = open_tensors(path)
    first, *_, last = tensors
    tensors[first]
    os.truncate(path, 100)
    if path.read_bytes()[:2] != b"PK" and path.suffix == ".pth":
        assert tensors[last].numel()  # the old format was read as a whole when it was opened
        return
    with pytest.raises((CheckpointError, ValueError), match="written to while"):
        tensors[last]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_no_file_of_weights_is_mapped(path: Path) -> None:
    """Whoever makes it shorter would end the process with SIGBUS."""
    kept = vitkit.load(path, heads=1)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert kept is not None


def test_views_of_one_storage_are_read_as_they_were(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    views = {"rows": whole[1:3], "columns": whole[:, 2:4], "turned": whole.T, "all": whole, "half": whole[2].half()}
    torch.save(views, tmp_path / "m.pth")
    tensors, _ = open_tensors(tmp_path / "m.pth")
    assert all(torch.equal(tensors[name], view) for name, view in views.items())
    assert all(tensors[name].is_contiguous() for name in views)


def test_tensors_without_numbers_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(3, device="meta")}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match="sparse, quantised or empty"):
        open_tensors(tmp_path / "m.pth")


def test_a_file_that_is_replaced_while_it_is_read_does_not_matter(path: Path, tmp_path: Path) -> None:
    tensors, _ = open_tensors(path)
    *_, last = tensors
    before = tensors[last]
    (tmp_path / "other").write_bytes(b"no weights")
    os.replace(tmp_path / "other", path)
    assert torch.equal(tensors[last], before)
