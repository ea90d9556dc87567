"""Home-made ViTs through a map of names: exact, or a question, or refused with the reason; never a guess.

Tolerance: 2e-6 of the largest logit; both compute in float32, ours with fused attention.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import peers
import vitkit
from checkpoints import tutorials
from vitkit.checkpoints import mapped, nearest
from vitkit.errors import CheckpointError


def write_map(path: Path, **tables: dict) -> Path:
    lines = []
    for name, rows in tables.items():
        lines += [f"[{name}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in rows.items())]
    path.write_text("\n".join(lines))
    return path


def saved(name: str, folder: Path) -> tuple[nn.Module, dict[str, dict]]:
    make, names, config, layout = tutorials.MODELS[name]
    torch.manual_seed(0)
    model = peers.randomize(make(), scale=0.2)
    torch.save(model.state_dict(), folder / "vit.pth")
    return model, {"names": dict(names), "config": dict(config), "layout": dict(layout)}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("name", tutorials.MODELS)
def test_a_tutorials_model_loads_exactly(tmp_path, name: str) -> None:
    theirs, tables = saved(name, tmp_path)
    images = torch.randn(2, 3, tutorials.SIZE, tutorials.SIZE)
    ours = vitkit.load(tmp_path / "vit.pth", map=write_map(tmp_path / "names.toml", **tables))
    close(ours(images), theirs(images))
    close(vitkit.load(tmp_path / "vit.pth", map=tables)(images), theirs(images))  # the tables themselves


@torch.no_grad()
def test_the_commands_take_the_map(tmp_path, command) -> None:
    theirs, tables = saved("article", tmp_path)
    path = write_map(tmp_path / "names.toml", **tables)
    code, out, err = command("load", tmp_path / "vit.pth", "--map", path, "--out", tmp_path / "m.safetensors")
    assert (code, err) == (0, "")
    assert "map" in out
    images = torch.randn(1, 3, 32, 32)
    close(vitkit.load(tmp_path / "m.safetensors")(images), theirs(images))
    assert command("load", tmp_path / "vit.pth", "--map", path, "--out", tmp_path / "m.safetensors")[0] == 2
    assert command("load", tmp_path / "vit.pth", "--map", path, "--out", tmp_path / "m.safetensors", "--force")[0] == 0
    assert command("inspect", tmp_path / "vit.pth", "--name-map", path)[0] == 0
    assert command("summary", tmp_path / "vit.pth", "--map", path)[0] == 0
    code, out, err = command("load", tmp_path / "vit.pth", "--map", path, "--json", "--image-size", "64")
    assert json.loads(out)["config"]["image_size"] == [64, 64]


def test_the_articles_layout_matters(tmp_path) -> None:
    """Read in the usual order it would be another model: so the order is asked for, not assumed."""
    theirs, tables = saved("article", tmp_path)
    images = torch.randn(2, 3, 32, 32)
    other = vitkit.load(tmp_path / "vit.pth", map=tables | {"layout": {"qkv": "qkv h d", "patches": "p q c"}})
    assert not torch.allclose(other(images), theirs(images), atol=1e-3)
    with pytest.raises(CheckpointError, match=r'(?s)\[layout\]\n  qkv = "qkv h d".*\n  patches = "p q c"'):
        vitkit.load(tmp_path / "vit.pth", map=tables | {"layout": {}})
    with pytest.raises(CheckpointError, match="is not an order of axes"):
        vitkit.load(tmp_path / "vit.pth", map=tables | {"layout": {"qkv": "h d"}})


def test_a_scale_after_the_softmax_and_a_norm_after_the_sum_are_refused_with_the_reason(tmp_path) -> None:
    model = tutorials.Sequentials("qkv h d", "after-softmax")
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    _, names, config, layout = tutorials.MODELS["scaled by width"]
    tables = {"names": names, "config": config | {"score_scale": "after-softmax"}, "layout": layout}
    with pytest.raises(CheckpointError, match=r"leaves the scores unscaled .* Move the scale inside the softmax"):
        vitkit.load(tmp_path / "vit.pth", map=tables)
    tables["config"] = config | {"block": "post-ln"}
    with pytest.raises(CheckpointError, match=r"nn\.TransformerEncoderLayer.* norm_first=True"):
        vitkit.load(tmp_path / "vit.pth", map=tables)


@pytest.mark.parametrize("left", ["heads", "activation", "norm_eps", "block", "score_scale", "pooling", "patch_size"])
def test_what_no_tensor_shows_is_asked_for(tmp_path, left: str) -> None:
    _, tables = saved("article", tmp_path)
    del tables["config"][left]
    with pytest.raises(CheckpointError, match=rf"(?s)the map must, in these rows.*\[config\]\n  {left} = "):
        vitkit.load(tmp_path / "vit.pth", map=tables)
    if left == "heads":
        vitkit.load(tmp_path / "vit.pth", map=tables, heads=4)  # stated beside the map


def test_unmatched_names_are_listed_with_candidates_by_shape(tmp_path) -> None:
    """Without any row, the list is the start of the map: the right name is among the three likeliest for most."""
    _, tables = saved("article", tmp_path)
    with pytest.raises(CheckpointError) as error:
        vitkit.load(tmp_path / "vit.pth", map={})
    text = str(error.value)
    assert "says nothing of 32 tensors of the file" in text
    assert '"1.{i}.0.fn.1.qkv.weight" (144, 48) in 2 blocks: encoder.blocks.{i}.attention.qkv.weight' in text
    assert '"1.{i}.1.fn.1.0.weight" (192, 48) in 2 blocks: encoder.blocks.{i}.mlp.up.weight' in text
    assert '"1.{i}.1.fn.1.3.weight" (48, 192) in 2 blocks: encoder.blocks.{i}.mlp.down.weight' in text
    assert '"0.cls_token" (1, 1, 48): class_token or ' in text
    assert '"0.positions" (17, 48): positions.learned or ' in text
    names = tables["names"]
    del names["1.{i}.0.fn.0.*"]
    with pytest.raises(CheckpointError, match=r"says nothing of 4 tensors") as error:
        vitkit.load(tmp_path / "vit.pth", map=tables)
    rows = str(error.value).splitlines()[1:]
    assert [row.split(": ")[1].split(" or ")[0] for row in rows] == [
        "encoder.blocks.{i}.norm1.weight",
        "encoder.blocks.{i}.norm1.bias",
    ]


def test_the_right_name_is_among_the_candidates() -> None:
    """For every tensor of every tutorial: planted truth, the map that loads it exactly."""
    for make, names, _, _ in tutorials.MODELS.values():
        shapes = {name: tuple(t.shape) for name, t in make().state_dict().items() if name != "steps"}
        width = nearest.width_of(shapes.values())
        assert width == tutorials.WIDTH
        translate = mapped.NameMap(*((theirs, ours) for theirs, ours in names.items() if ours)).ours
        for pattern, group in nearest.patterns(shapes).items():
            ours = translate(group[0]).replace("blocks.0.", "blocks.{i}.").replace("blocks.1.", "blocks.{i}.")
            assert ours in nearest.candidates(pattern, shapes[group[0]], width), pattern


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"name": {}}, r"tables \[names\], \[config\] and \[layout\]"),
        ({"names": {"a": 3}}, r'\[names\] must hold rows such as "theirs" = "ours"'),
        ({"config": {"head": 3}}, "no field of ViTConfig. Did you mean heads"),
        ({"names": {"a": "encoder.blocks.{i}.norm3.*"}}, r"vitkit has no such name. Did you mean encoder\.blocks"),
        ({"names": {"2.1.*": "norm.*", "2.2.*": "norm.*"}}, "the same name, 'norm.weight'"),
    ],
)
def test_a_map_that_is_wrong_says_where(tmp_path, tables: dict, reason: str) -> None:
    saved("article", tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        vitkit.load(tmp_path / "vit.pth", map=tables)


def test_a_map_that_cannot_be_read_says_so(tmp_path) -> None:
    _, tables = saved("article", tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        vitkit.load(tmp_path / "vit.pth", map=tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[names]\na.b = \n")
    with pytest.raises(CheckpointError, match=r"bad\.toml is not a TOML file .*line 2"):
        vitkit.load(tmp_path / "vit.pth", map=tmp_path / "bad.toml")
    with pytest.raises(CheckpointError, match="is no map of names"):
        vitkit.load(tmp_path / "vit.pth", map=3)
    tables["config"]["heads"] = 5
    with pytest.raises(CheckpointError, match=r"cannot be divided as the map says \(heads=5"):
        vitkit.load(tmp_path / "vit.pth", map=tables)
    tables["config"] |= {"heads": 4, "classes": 3}
    with pytest.raises(CheckpointError, match=r"2\.2\.weight is \(7, 48\), should be \(3, 48\)"):
        vitkit.load(tmp_path / "vit.pth", map=tables)
    del tables["names"]["0.projection.1.*"]
    tables["names"]["0.projection.1.*"] = ""
    with pytest.raises(CheckpointError, match=r"gives no tensor the name 'patches\.weight'"):
        vitkit.load(tmp_path / "vit.pth", map=tables)
