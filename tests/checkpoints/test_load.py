"""Loading: sources, adaptation with one line for each, and strictness that says what differs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import peers
import vitkit
from vitkit.checkpoints import timm as timm_family
from vitkit.checkpoints.load import open_checkpoint, resize_channels, resize_patches
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.reading import guess_heads
from vitkit.checkpoints.writing import write
from vitkit.errors import CheckpointError, VitkitError
from vitkit.model.positions import resize_grid


@pytest.fixture
def saved(tmp_path):
    model = peers.randomize(vitkit.create("mu"), scale=0.1)
    vitkit.save(model, tmp_path / "m.safetensors", list("abcdefghij"))
    return model, tmp_path / "m.safetensors"


def test_zoo_names_give_fresh_weights() -> None:
    model = vitkit.load("mu", classes=4, image_size=(32, 64))
    assert (model.config.classes, model.config.image_size) == (4, (32, 64))
    assert model.load_report == ("fresh weights",)
    assert model.class_names is None
    assert vitkit.load("mu", dtype="bfloat16").norm.weight.dtype == torch.bfloat16


def test_a_run_directory_gives_its_best(tmp_path, saved) -> None:
    model, path = saved
    run = tmp_path / "run"
    run.mkdir()
    vitkit.save(vitkit.create("mu", classes=3), run / "model.safetensors")
    assert vitkit.load(run).config.classes == 3
    (run / "best.safetensors").write_bytes(path.read_bytes())
    (run / "config.json").write_text('{"recipe": "not a model"}')
    assert torch.equal(vitkit.load(run).norm.weight, model.norm.weight)


def test_format_is_recognised_by_content_not_by_name(tmp_path, saved) -> None:
    model, path = saved
    for name in ("m.npz", "m.pth", "m", "m.jpg"):
        (tmp_path / name).write_bytes(path.read_bytes())
        assert torch.equal(vitkit.load(tmp_path / name).norm.weight, model.norm.weight)


def test_nothing_asked_nothing_changed(saved) -> None:
    model, path = saved
    again = vitkit.load(path, image_size=32, classes=10, patch_size=8, channels=3)
    assert again.load_report == ()
    assert again.class_names == tuple("abcdefghij")
    assert again.config == model.config


@pytest.mark.parametrize("way", ["official", "timm", "huggingface", "torchvision", "dinov2"])
def test_positions_are_resized_the_way_that_is_asked(way: str, saved) -> None:
    model, path = saved
    again = vitkit.load(path, image_size=(64, 48), resize=way)
    table = model.positions.learned[1:].unflatten(0, (4, 4))
    assert torch.equal(again.positions.learned[1:], resize_grid(table, (8, 6), way).flatten(0, 1))
    assert torch.equal(again.positions.learned[0], model.positions.learned[0])
    assert again.load_report[-1] == f"positions: grid 4x4 -> 8x6, resized the way of {way}"
    assert again.config.preprocessing.size == (64, 48)


@pytest.mark.parametrize("changes", [{"positions": "learned-2d"}, {"positions": "relative"}, {"positions": "rope-2d"}])
def test_every_kind_of_position_can_be_resized(changes: dict, tmp_path) -> None:
    model = peers.randomize(vitkit.create("mu", **changes))
    vitkit.save(model, tmp_path / "m.safetensors")
    images = torch.randn(1, 3, 64, 48)
    resized = vitkit.load(tmp_path / "m.safetensors", image_size=(64, 48))
    assert resized.config.grid == (8, 6)
    if changes["positions"] != "rope-2d":  # whose angles depend on the trained grid
        torch.testing.assert_close(resized(images), model.eval()(images), atol=1e-5, rtol=1e-5)


def test_a_new_classifier_starts_at_zero_and_forgets_the_names(saved) -> None:
    _, path = saved
    model = vitkit.load(path, classes=3)
    assert model.class_names is None
    assert model(torch.randn(2, 3, 32, 32)).abs().max() == 0
    assert model.load_report == ("classifier: 10 -> 3 classes, a new one that starts at zero",)
    bare = vitkit.load(path, classes=0)
    assert bare(torch.randn(2, 3, 32, 32)).shape == (2, 32)


def test_the_tanh_layer_of_pretraining_goes_with_its_head(tmp_path) -> None:
    vitkit.save(peers.randomize(vitkit.create("mu", pre_logits=16)), tmp_path / "m.safetensors")
    model = vitkit.load(tmp_path / "m.safetensors", classes=5)
    assert model.config.pre_logits == 0
    assert "tanh layer" in model.load_report[0]


@torch.no_grad()
def test_grey_images_give_what_they_gave_as_rgb(saved) -> None:
    model, path = saved
    grey = torch.randn(2, 1, 32, 32)
    ours = vitkit.load(path, channels=1)
    torch.testing.assert_close(ours(grey), model(grey.expand(-1, 3, -1, -1)), atol=1e-5, rtol=1e-5)
    assert ours.config.preprocessing.mean == (0.5,)
    weight = torch.randn(4, 3, 2, 2)
    assert resize_channels(weight, 7).shape == (4, 7, 2, 2)
    torch.testing.assert_close(resize_channels(weight, 6).sum(1), weight.sum(1))
    torch.testing.assert_close(resize_channels(weight[:, :1], 3).sum(1), weight[:, 0])


@pytest.mark.parametrize(("old", "new"), [((8, 8), (16, 16)), ((8, 8), (12, 20)), ((4, 6), (9, 7))])
def test_flexivit_resize_gives_the_same_tokens(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Each patch resized by the bilinear map that the embedding was solved for."""
    weight = torch.randn(16, 3, *old)
    patches = torch.randn(10, 3, *old)
    larger = F.interpolate(patches, new, mode="bilinear", align_corners=False)
    before = torch.einsum("dcpq,ncpq->nd", weight, patches)
    after = torch.einsum("dcpq,ncpq->nd", resize_patches(weight, new), larger)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_flexivit_in_a_model(saved) -> None:
    model, path = saved
    larger = vitkit.load(path, patch_size=16, image_size=64)
    assert larger.config.grid == model.config.grid
    images = torch.randn(2, 3, 4, 8, 4, 8)  # B C h p w q
    patches = images.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3, 8, 8)
    resized = F.interpolate(patches, (16, 16), mode="bilinear", align_corners=False)
    resized = resized.reshape(2, 4, 4, 3, 16, 16).permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 64, 64)
    torch.testing.assert_close(larger(resized), model(images.reshape(2, 3, 32, 32)), atol=1e-4, rtol=1e-4)
    assert "patches: 8x8 -> 16x16, pseudo-inverse resize (FlexiViT)" in larger.load_report


@pytest.mark.parametrize(
    "changes",
    [
        {"patch_embedding": "linear"},
        {"stem": vitkit.StemConfig((1,), 16)},
        {"stem": vitkit.ConvStemConfig()},
        {"stem": vitkit.WhitenedStemConfig()},
    ],
)
def test_all_at_once(changes: dict, tmp_path) -> None:
    vitkit.save(peers.randomize(vitkit.create("mu", **changes)), tmp_path / "m.safetensors")
    model = vitkit.load(tmp_path / "m.safetensors", image_size=(48, 64), patch_size=16, channels=4, classes=2)
    assert model(torch.randn(1, 4, 48, 64)).shape == (1, 2)
    assert len(model.load_report) == 5


def edited(path, tmp_path, edit) -> None:
    """The same checkpoint as timm's, with some tensors changed."""
    checkpoint = open_checkpoint(path)
    tensors = dict(timm_family.write(checkpoint).tensors)
    edit(tensors)
    torch.save({k: v.clone() for k, v in tensors.items()}, tmp_path / "edited.pth")
    vitkit.load(tmp_path / "edited.pth", heads=2)


def test_strictness_lists_what_is_missing_extra_and_of_another_shape(saved, tmp_path) -> None:
    _, path = saved

    def drop(tensors: dict) -> None:
        del tensors["blocks.1.mlp.fc2.bias"]

    with pytest.raises(CheckpointError, match=r"1 missing: blocks\.1\.mlp\.fc2\.bias") as error:
        edited(path, tmp_path, drop)
    assert "edited.pth" in str(error.value)
    assert "incomplete" in str(error.value)

    def add(tensors: dict) -> None:
        tensors |= {f"adapter.{i}.weight": torch.zeros(2) for i in range(13)}

    with pytest.raises(CheckpointError, match=r"13 not part of the model: adapter\.0\.weight.*and 3 more"):
        edited(path, tmp_path, add)

    def reshape(tensors: dict) -> None:
        tensors["norm.weight"] = torch.zeros(33)

    with pytest.raises(CheckpointError, match=r"norm\.weight is \(33,\), should be \(32,\)"):
        edited(path, tmp_path, reshape)

    def integers(tensors: dict) -> None:
        tensors["norm.weight"] = torch.zeros(32, dtype=torch.int32)

    with pytest.raises(CheckpointError, match=r"norm\.weight is torch\.int32"):
        edited(path, tmp_path, integers)

    def normed(tensors: dict) -> None:
        tensors["blocks.0.attn.q_norm.weight"] = torch.zeros(16)

    with pytest.raises(CheckpointError, match=r"7 missing: blocks\.0\.attn\.q_norm\.bias"):
        edited(path, tmp_path, normed)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no-such-model", "neither an existing path nor a known model"),
        ("vit-b/17", "Did you mean vit-b/16"),
        ("hf:nobody", "write hf:owner/name"),
        ("timm:../../etc", "write timm:name"),
    ],
)
def test_unknown_sources(source: str, words: str) -> None:
    with pytest.raises(VitkitError, match=words):
        vitkit.load(source)


def test_wrong_requests_are_explained(saved, tmp_path) -> None:
    _, path = saved
    with pytest.raises(CheckpointError, match="nearest sizes are 32x32 and 40x40"):
        vitkit.load(path, image_size=33)
    with pytest.raises(CheckpointError, match="is not known"):
        vitkit.load(path, resize="lanczos")
    with pytest.raises(CheckpointError, match=r"has no option 'head'.*Did you mean heads"):
        vitkit.load(path, head=3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no weights"):
        vitkit.load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"Did you mean m\.safetensors"):
        vitkit.load(tmp_path / "n.safetensors")


def test_heads_that_no_file_tells_must_be_stated(saved, tmp_path) -> None:
    from vitkit.checkpoints.writing import write

    _, path = saved
    write(open_checkpoint(path), tmp_path / "w.pth", "torchvision")
    with pytest.raises(CheckpointError, match="pass heads=N"):
        vitkit.load(tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="heads=5 must divide"):
        vitkit.load(tmp_path / "w.pth", heads=5)


def test_published_widths_have_known_heads(tmp_path) -> None:
    for width, heads in ((192, 3), (384, 6), (768, 12), (1280, 16), (1536, 24)):
        notes: list[str] = []
        assert guess_heads(width, ModelOptions(), notes) == heads
        assert len(notes) == 1


def test_heads_are_never_guessed_for_a_width_that_nobody_published(tmp_path) -> None:
    """A model of width 128 with 4 heads: another number would load, and compute something else."""
    model = peers.randomize(vitkit.create("mu", width=128, heads=4, mlp_width=128), scale=0.1)
    vitkit.save(model, tmp_path / "m.safetensors")
    notes = write(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "m.pth", "torchvision")
    assert any("heads=4" in line for line in notes)
    with pytest.raises(CheckpointError, match="heads=N"):
        vitkit.load(tmp_path / "m.pth")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(vitkit.load(tmp_path / "m.pth", heads=4)(images), model.eval()(images))


def test_wrapping_by_timms_training_script_changes_nothing(tmp_path) -> None:
    """Its checkpoints hold the model as `state_dict`; DeiT's own hold it as `model` and mean ImageNet's statistics."""
    model = vitkit.create("vit-ti/16", image_size=32, depth=1)
    vitkit.save(model, tmp_path / "m.safetensors")
    write(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "timm", "timm")
    tensors = load_file(tmp_path / "timm" / "model.safetensors")
    torch.save(tensors, tmp_path / "bare.pth")
    torch.save({"state_dict": tensors, "arch": "vit_tiny_patch16_224", "epoch": 3}, tmp_path / "wrapped.pth")
    torch.save({"model": tensors}, tmp_path / "deit.pth")
    files = [tmp_path / f"{name}.pth" for name in ("bare", "wrapped", "deit")]
    bare, wrapped, deit = (vitkit.load(file, heads=3).config for file in files)
    assert bare == wrapped
    assert bare.preprocessing.mean == (0.5,)
    assert deit.preprocessing.mean[0] == 0.485


def test_distilled_models_of_timm_want_imagenets_statistics(tmp_path) -> None:
    timm = peers.import_timm()
    model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, img_size=32)
    torch.save(model.state_dict(), tmp_path / "deit.pth")
    ours = vitkit.load(tmp_path / "deit.pth", heads=3)
    assert ours.config.preprocessing.mean == pytest.approx(model.default_cfg["mean"])


def test_a_published_width_with_another_depth_does_not_tell_the_heads(tmp_path) -> None:
    """Small ViTs of this width are made with 3, 4 or 12 heads."""
    model = peers.import_timm().create_model("vit_tiny_patch16_224", depth=6, num_heads=12, img_size=32)
    torch.save(model.state_dict(), tmp_path / "small.pth")
    with pytest.raises(CheckpointError, match=r"heads its layers of width 192 have.*pass heads=N"):
        vitkit.load(tmp_path / "small.pth")
    ours = vitkit.load(tmp_path / "small.pth", heads=12)
    assert any("common to all published models" in line and "norm_eps=1e-06" in line for line in ours.load_report)
