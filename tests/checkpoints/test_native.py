"""vitkit's own file: complete, the same every time, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import peers
import vitkit
from vitkit.checkpoints import native, writing
from vitkit.checkpoints.family import Checkpoint
from vitkit.checkpoints.load import load, open_checkpoint
from vitkit.errors import CheckpointError, WriteError
from vitkit.model.base import Outputs

EVERYTHING = {
    "plain": {},
    "hybrid": {"stem": vitkit.StemConfig((1, 1), width=16), "patch_size": 8},
    "convolutions": {"stem": vitkit.ConvStemConfig((4, 8, 8), (1, 2, 1))},
    "whitened": {"stem": vitkit.WhitenedStemConfig((4, 8), (2, 1))},
    "map": {"pooling": "map", "class_token": False},
    "relative": {"positions": "relative", "layer_scale": 0.1, "registers": 2},
    "learned-2d": {"positions": "learned-2d", "pre_norm": True, "projection": 12, "classes": 0},
    "rope": {"positions": "rope-2d", "activation": "swiglu", "pooling": "cls+mean"},
    "distilled": {"distillation_token": True, "norm_eps": 1e-12},
    "linear": {"patch_embedding": "linear", "channels": 5, "pre_logits": 7, "image_size": (32, 48)},
}


def model_of(name: str) -> torch.nn.Module:
    return peers.randomize(vitkit.create("mu", **EVERYTHING[name]))


@pytest.mark.parametrize("name", EVERYTHING)
def test_everything_comes_back(name: str, tmp_path) -> None:
    model = model_of(name)
    names = [f"class {i} \N{SNOWMAN}" for i in range(model.config.classes)]
    vitkit.save(model, tmp_path / "m.safetensors", names)
    again = vitkit.load(tmp_path / "m.safetensors")
    assert again.config == model.config
    assert again.class_names == (tuple(names) or None)
    assert again.load_report == ()
    assert not again.training
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert all(p.requires_grad for p in again.parameters())


@torch.no_grad()
def test_a_file_of_version_0_1_gives_the_same_classes_and_logits() -> None:
    model = vitkit.load(Path(__file__).parents[1] / "data_made_by_0_1" / "finished.safetensors")
    assert model.class_names == ("one", "two", "zero")
    assert (model.outputs.kind, model.load_report, model.pretrained) == ("classes", (), True)
    images = (torch.arange(2 * 8 * 8) % 17 / 17 - 0.5).reshape(2, 1, 8, 8)
    expected = torch.tensor([[-0.059083, -0.033934, 0.066568], [-0.059643, -0.039144, 0.069967]])  # by 0.1 itself
    torch.testing.assert_close(model(images), expected, atol=2e-6, rtol=0)


def test_a_resnet_too(tmp_path) -> None:
    model = peers.randomize(vitkit.create("resnet-8px"))
    vitkit.save(model, tmp_path / "m.safetensors")
    again = vitkit.load(tmp_path / "m.safetensors")
    assert again.config == model.config
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(again(images), model(images))
    fine = vitkit.load(tmp_path / "m.safetensors", classes=3, channels=3, image_size=16)
    assert fine(torch.randn(2, 3, 16, 16)).abs().max() == 0
    assert len(fine.load_report) == 3


def test_equal_models_are_equal_files(tmp_path) -> None:
    for name in ("a", "b"):
        vitkit.save(model_of("plain"), tmp_path / f"{name}.safetensors", list("abcdefghij"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    again = vitkit.load(tmp_path / "a.safetensors")
    vitkit.save(again, tmp_path / "c.safetensors")  # the class names travel with the model
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_any_reader_of_safetensors_can_read_it(tmp_path) -> None:
    from safetensors import safe_open

    model = model_of("plain")
    vitkit.save(model, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("norm.weight"), model.norm.weight)
        about = json.loads(file.metadata()["vitkit"])
    assert about["version"] == 1
    assert "outputs" not in about
    assert about["config"]["preprocessing"]["mean"] == [0.5]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_are_kept_or_converted(dtype: str, tmp_path) -> None:
    model = model_of("plain").to(getattr(torch, dtype))
    vitkit.save(model, tmp_path / "m.safetensors")
    kept = vitkit.load(tmp_path / "m.safetensors")
    assert kept.norm.weight.dtype == getattr(torch, dtype)
    assert torch.equal(kept.norm.weight, model.norm.weight)
    converted = vitkit.load(tmp_path / "m.safetensors", dtype="float32")
    assert converted.norm.weight.dtype == torch.float32
    assert f"dtype: {dtype} -> float32" in converted.load_report
    with pytest.raises(CheckpointError, match="choose float32"):
        vitkit.load(tmp_path / "m.safetensors", dtype="int8")


def test_a_failed_write_changes_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "m.safetensors"
    vitkit.save(model_of("plain"), path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitkit.io.os.fsync", full)
    with pytest.raises(WriteError, match="No space left on device"):
        vitkit.save(model_of("plain").to(torch.float64), path)
    with pytest.raises(WriteError, match="cannot be written"):
        writing.write(open_checkpoint(path), tmp_path / "w.npz", "google")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "m.safetensors"
    vitkit.save(model_of("plain"), path)
    writing.write(open_checkpoint(path), tmp_path / "hf", "huggingface")
    before = sorted(p.name for p in (tmp_path / "hf").iterdir())

    def broken(*_: object) -> None:
        raise OSError("broken disk")

    monkeypatch.setattr("vitkit.checkpoints.writing.write_safetensors", broken)
    with pytest.raises(WriteError, match="broken disk"):
        writing.write(open_checkpoint(path), tmp_path / "hf", "huggingface")
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m.safetensors"]


def test_wrong_class_names_are_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="2 class names were given for a model of 10 classes"):
        vitkit.save(model_of("plain"), tmp_path / "m.safetensors", ["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "outputs",
    [
        Outputs("labels", tuple("abc")),
        Outputs("values", ("age", "weight", "height"), (40.0, 70.5, 1.7), (20.0, 15.0, 0.1)),
        Outputs("values", (), (), ()),
    ],
)
def test_what_the_outputs_mean_comes_back(outputs: Outputs, tmp_path) -> None:
    model = vitkit.create("mu", classes=3)
    model.outputs = outputs
    vitkit.save(model, tmp_path / "m.safetensors")
    assert vitkit.load(tmp_path / "m.safetensors").outputs == outputs
    assert vitkit.load(tmp_path / "m.safetensors", image_size=64).outputs == outputs
    assert vitkit.load(tmp_path / "m.safetensors", classes=2).outputs == Outputs()


@pytest.mark.parametrize(("mean", "std"), [((1.0,), (1.0, 1.0, 1.0)), ((0.0,) * 3, (1.0, 0.0, 1.0))])
def test_statistics_that_do_not_fit_are_refused(mean: tuple, std: tuple, tmp_path) -> None:
    model = vitkit.create("mu", classes=3)
    model.outputs = Outputs("values", ("x", "y", "z"), mean, std)
    with pytest.raises(CheckpointError, match="mean"):
        vitkit.save(model, tmp_path / "m.safetensors")


def test_a_newer_format_is_refused(tmp_path, monkeypatch) -> None:
    """Also by version 0.1, which reads 1: it would take numbers for classes."""
    model = model_of("plain")
    model.outputs = Outputs("values")
    vitkit.save(model, tmp_path / "m.safetensors")
    monkeypatch.setattr(native, "VERSION", 1)
    with pytest.raises(CheckpointError, match="pip install -U vitkit"):
        vitkit.load(tmp_path / "m.safetensors")


def test_an_edited_header_is_refused(tmp_path) -> None:
    """One digit of the configuration changed: the same tensors would silently be another model."""
    vitkit.save(model_of("plain"), tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert b"1e-06" in raw
    (tmp_path / "m.safetensors").write_bytes(raw.replace(b"1e-06", b"1e-05", 1))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        vitkit.load(tmp_path / "m.safetensors")


def test_the_file_may_be_replaced_while_its_model_is_in_use(tmp_path) -> None:
    path = tmp_path / "m.safetensors"
    first = model_of("plain")
    vitkit.save(first, path)
    loaded = vitkit.load(path)
    vitkit.save(peers.randomize(vitkit.create("mu"), seed=1), path)
    assert torch.equal(loaded.norm.weight, first.norm.weight)
    with torch.no_grad():
        loaded.norm.weight.add_(1)  # and writing to the model does not write to the file
    assert not torch.equal(load(path).norm.weight, loaded.norm.weight)


@pytest.mark.parametrize("to", ["google", "big_vision", "timm", "huggingface", "torchvision"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip_through_every_format_is_bit_identical(to: str, dtype: torch.dtype, tmp_path) -> None:
    prefix = "none" if to == "big_vision" else "all"
    model = peers.randomize(vitkit.create("mu", positioned_prefix=prefix)).to(dtype)
    checkpoint = Checkpoint(model.config, dict(model.state_dict()))
    dest = tmp_path / {"google": "w.npz", "big_vision": "w.npz", "torchvision": "w.pth"}.get(to, "folder")
    writing.write(checkpoint, dest, to)
    back = open_checkpoint(dest, heads=2)
    assert back.format == to
    assert back.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert back.tensors[name].dtype == dtype
        assert torch.equal(back.tensors[name], tensor), name


@pytest.mark.parametrize("to", ["google", "big_vision", "timm", "huggingface", "torchvision"])
def test_what_a_format_cannot_hold_is_refused(to: str, tmp_path) -> None:
    dest = tmp_path / ("w.npz" if to in ("google", "big_vision") else "w.pth" if to == "torchvision" else "folder")
    for changes in ({"positions": "learned-2d"}, {"projection": 8, "classes": 0}, {"pooling": "cls+mean"}):
        model = vitkit.create("mu", **changes)
        with pytest.raises(CheckpointError, match="cannot hold a model with"):
            writing.write(Checkpoint(model.config, dict(model.state_dict())), dest, to)
    resnet = vitkit.create("resnet-8px")
    with pytest.raises(CheckpointError, match="cannot hold a ResNet"):
        writing.write(Checkpoint(resnet.config, dict(resnet.state_dict())), dest, to)
    assert not list(tmp_path.iterdir())


def _another_classifier(model) -> None:
    model.head.classifier = torch.nn.Linear(model.config.width, 3)


def _fewer_blocks(model) -> None:
    model.encoder.blocks = model.encoder.blocks[:1]


def _another_layer(model) -> None:
    model.head.classifier = torch.nn.Sequential(model.head.classifier)


def _no_norm(model) -> None:
    model.norm = torch.nn.GroupNorm(1, model.config.width)  # has the same tensors


def _other_heads(model) -> None:
    model.encoder.blocks[0].attention.heads = 1


def _other_epsilon(model) -> None:
    model.norm.eps = 1e-3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_classifier, r"head\.classifier\.weight is \(3, 32\), should be \(10, 32\)"),
        (_fewer_blocks, r"missing: encoder\.blocks\.1\."),
        (_another_layer, r"not part of the model: head\.classifier\.0\.weight"),
        (_no_norm, "norm is GroupNorm, should be LayerNorm"),
        (_other_heads, r"blocks\.0\.attention\.heads is 1"),
        (_other_epsilon, r"norm\.eps is 0\.001"),
    ],
)
def test_a_model_changed_by_hand_is_refused_when_it_is_saved(tmp_path, change, reason) -> None:
    model = vitkit.create("mu")
    change(model)
    with pytest.raises(CheckpointError, match=rf"(?s)changed by hand.*{reason}.*Build what you want by its config"):
        vitkit.save(model, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_what_changes_no_prediction_does_not_keep_a_model_from_being_saved(tmp_path) -> None:
    model = vitkit.create("mu", dropout=0.1).train()
    model.gradient_checkpointing, model.merge = True, 1
    model.encoder.blocks[0].dropout = 0.5
    model(torch.randn(1, 3, 32, 32))
    vitkit.save(torch.compile(model.requires_grad_(False).to(torch.bfloat16)), tmp_path / "m.safetensors")
    assert vitkit.load(tmp_path / "m.safetensors").norm.weight.dtype == torch.bfloat16
