"""`vitkit verify`: equal where the peer is equal, and the first layer that differs where something was changed."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import peers
import vitkit
from vitkit.checkpoints import against
from vitkit.checkpoints.options import ModelOptions
from vitkit.errors import CheckpointError, MissingPackage

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def timm_model(name: str = "vit_base_patch16_224", **changes):
    return peers.randomize(peers.import_timm().create_model(name, **SIZES | changes))


@pytest.fixture
def timm_folder(tmp_path):
    peers.import_timm()
    from timm.models import save_for_hf

    save_for_hf(timm_model(), str(tmp_path / "timm"), model_args=SIZES, safe_serialization=True)
    return tmp_path / "timm"


@pytest.fixture
def hf_folder(tmp_path):
    transformers = peers.import_transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    peers.randomize(transformers.ViTForImageClassification(config)).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_equal_to_timm_at_two_sizes(timm_folder, command) -> None:
    code, out, err = command("verify", timm_folder, "--against", "timm", "--json")
    assert (code, err) == (0, "")
    about = json.loads(out)
    assert about["equal"]
    layers = ["embedding", "block 0", "block 1", "block 2", "output"]
    assert [(row["size"], row["layer"]) for row in about["layers"]] == [(s, n) for s in ("32", "40x48") for n in layers]
    assert max(row["difference"] / row["range"] for row in about["layers"]) < 1e-5
    code, out, _ = command("verify", timm_folder, "--against", "timm", "--image-size", "64x32")
    assert code == 0
    assert "64x32" in out
    assert "equal to timm within 1e-05" in out


def test_equal_to_hugging_face_at_two_sizes(hf_folder, command) -> None:
    code, out, _ = command("verify", hf_folder, "--against", "hf")
    assert code == 0, out
    assert out.count("yes") == 10


def test_what_is_stated_wrongly_is_found(timm_folder, hf_folder, command) -> None:
    code, out, _ = command("verify", timm_folder, "--against", "timm", "--heads", "4")
    assert code == 1
    assert "differs from timm first at block 0, 32" in out
    code, out, _ = command("verify", hf_folder, "--against", "hf", "--set", "norm_eps=0.1", "--json")
    assert code == 1
    assert json.loads(out)["first"] == "block 0"


@pytest.mark.parametrize(
    ("name", "first"),
    [("patches.bias", "embedding"), ("encoder.blocks.1.mlp.up.weight", "block 1"), ("head.classifier.bias", "output")],
)
def test_the_first_layer_that_differs_is_named(timm_folder, name: str, first: str) -> None:
    model = vitkit.load(timm_folder).double()
    theirs = against.build(against.PEERS["timm"], str(timm_folder), model.config, "")
    with torch.no_grad():
        model.get_parameter(name).add_(0.1)
    found = against.Comparison(list(against.compare(against.PEERS["timm"], model, theirs, (32, 32))), [])
    assert found.first(1e-5).layer == first


def test_a_bare_file_needs_the_name_of_its_architecture(tmp_path, command) -> None:
    peers.import_timm()
    sizes = SIZES | {"img_size": 224, "patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    torch.save(timm_model("vit_tiny_patch16_224", **sizes).state_dict(), tmp_path / "w.pth")
    code, _, err = command("verify", tmp_path / "w.pth", "--against", "timm", "--heads", 3, "--activation", "gelu")
    assert code == 2
    assert "--architecture NAME" in err
    same = ("--architecture", "vit_tiny_patch16_224", "--heads", 3, "--activation", "gelu")
    code, _, err = command("verify", tmp_path / "w.pth", "--against", "timm", *same)
    assert (code, err) == (0, "")
    code, _, err = command(
        "verify", tmp_path / "w.pth", "--against", "timm", "--architecture", "vit_none", "--heads", 3
    )
    assert code == 2
    assert "timm cannot build a model from" in err


def test_a_peer_that_is_not_there_or_cannot_do_it_is_a_sentence(timm_folder, monkeypatch, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot build a model"):
        against.verify(str(timm_folder), "hf", ModelOptions())
    vitkit.save(vitkit.create("mu"), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"no config\.json beside it: name timm's model with --architecture"):
        against.verify(str(tmp_path / "m.safetensors"), "timm", ModelOptions())
    vitkit.save(vitkit.create("resnet-26", image_size=32), tmp_path / "r.safetensors")
    with pytest.raises(CheckpointError, match="verify compares Vision Transformers"):
        against.verify(str(tmp_path / "r.safetensors"), "timm", ModelOptions())
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingPackage, match=r"pip install 'vitkit\[peers\]'"):
        against.verify(str(timm_folder), "timm", ModelOptions())


def test_a_size_that_the_peer_does_not_take_is_said(timm_folder, monkeypatch) -> None:
    peers.import_timm()

    def refuse(model, size) -> None:
        raise ValueError("one size only")

    monkeypatch.setitem(against.PEERS, "timm", against.PEERS["timm"]._replace(resize=refuse))
    result = against.verify(str(timm_folder), "timm", ModelOptions())
    assert {row.size for row in result.rows} == {(32, 32)}
    assert result.notes == ["40x48 is not compared: timm does not take it (one size only)"]
    assert result.first(1e-4) is None
