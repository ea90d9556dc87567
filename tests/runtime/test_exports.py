"""Exported files against the model they were made from, on images, for every format and kind of model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from data.making import photo
from peers import randomize
from strategies import PUBLISHED
from vitkit.data import normalise, prepare, to_tensor
from vitkit.errors import ConfigError
from vitkit.model.config import Preprocessing, StemConfig, ViTConfig
from vitkit.runtime import FORMATS
from vitkit.runtime.base import made_up, merged
from vitkit.runtime.eager import Eager
from vitkit.runtime.export import export, open_exported
from vitkit.runtime.raw import FromRaw
from vitkit.runtime.verify import Images, compare

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_width=48, classes=10)
SUFFIX = {name: row.suffix for name, row in FORMATS.items()}
PACKAGE = {name: row.packages[0] if row.packages else "torch" for name, row in FORMATS.items()}


def model_of(config: ViTConfig = BASE, **changes):
    torch.manual_seed(0)
    model = randomize(vitkit.create(config.replace(**changes)), scale=0.15)
    model.class_names = tuple(f"class {i}" for i in range(config.classes))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("to", SUFFIX)
@pytest.mark.parametrize("raw", [False, True])
def test_100_photographs(to: str, raw: bool, tmp_path: Path) -> None:
    """Top-1 identical, probabilities within 1e-4: from prepared and from raw images of many sizes."""
    pytest.importorskip(PACKAGE[to])
    pre = Preprocessing(size=(32, 32), crop=0.875, fit="crop", interpolation="bicubic", mean=(0.4, 0.5, 0.6))
    model = model_of(preprocessing=pre)
    written = export(
        model,
        to,
        tmp_path / f"model{SUFFIX[to]}",
        Images(made_up(model.config, 9, (40, 50))) if raw else Images(made_up(model.config, 9)),
        raw=raw,
    )
    assert written.check.difference < 1e-4
    runtime, about = open_exported(written.path, written.sha256)
    assert (about.config, about.outputs, about.raw) == (model.config, model.outputs, raw)
    photos = [photo(i, (40 + 3 * (i % 10), 36 + 5 * (i % 7))) for i in range(100)]
    prepared = torch.stack([to_tensor(prepare(p, pre)) for p in photos])
    images = normalise(prepared, pre)
    if raw:
        found = torch.cat([runtime.run(torch.from_numpy(np.array(p))[None]) for p in photos])
    else:
        found = torch.cat([runtime.run(part) for part in images.split(30)])  # and the last batch is smaller
    expected = Eager(model).run(images)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "box", "hamming"])
@pytest.mark.parametrize(
    ("size", "crop", "fit"), [((24, 24), 0.9, "crop"), ((24, 16), 0.8, "crop"), ((20, 28), 1.0, "squash")]
)
def test_raw_pixels_are_pillows(interpolation: str, size: tuple[int, int], crop: float, fit: str) -> None:
    """Exactly: the same weights of 22 bits, the same rounding, the same order of passes."""
    pre = Preprocessing(size=size, crop=crop, fit=fit, interpolation=interpolation)
    raw = FromRaw(model_of(), pre)
    for i, shape in enumerate([(33, 47), (60, 20), (16, 12), (24, 24), (101, 64)]):
        image = photo(i, shape)
        ours = raw.prepare(torch.from_numpy(np.array(image))[None])[0]
        theirs = to_tensor(prepare(image, pre)).float()
        assert torch.equal(ours, theirs), shape


KINDS = {
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map"},
    "distilled": {"distillation_token": True},
    "registers": {"registers": 3, "layer_scale": 0.1, "activation": "swiglu"},
    "relative": {"positions": "relative"},
    "rotary": {"positions": "rope-2d"},
    "sincos": {"positions": "sincos-2d", "activation": "quick-gelu"},
    "hybrid": {"stem": StemConfig(layers=(1, 1), width=8, root="small"), "patch_size": 8},
    "grey": {"channels": 1, "pre_norm": True, "activation": "gelu-tanh"},
    "no classifier": {"classes": 0, "projection": 12},
    "other size": {"image_size": (32, 48)},
    **{name: PUBLISHED[name] for name in ("sub-norms", "branches", "wide heads")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_in_onnx(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = model_of(**KINDS[kind])
    found = export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 5)))
    assert found.check.difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("to", SUFFIX)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_published_variant_in_every_format(kind: str, to: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE[to])
    model = model_of(**PUBLISHED[kind])
    found = export(model, to, tmp_path / f"m{SUFFIX[to]}", Images(made_up(model.config, 5)))
    assert found.check.difference < 1e-4


def test_positions_are_baked_at_another_size(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    vitkit.save(model_of(position_resize="timm"), tmp_path / "m.safetensors")
    model = vitkit.load(tmp_path / "m.safetensors", image_size=(48, 64))
    export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 5)))
    import onnx

    kinds = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert not kinds & {"Resize", "Upsample"}


@pytest.mark.parametrize("to", SUFFIX)
@pytest.mark.parametrize(
    ("pooling", "merge"),
    [
        ("cls", 3),
        pytest.param("mean", 3, marks=pytest.mark.slow),
        pytest.param("mean", "pitome:2", marks=pytest.mark.slow),
        pytest.param("cls", "prune:3:late", marks=pytest.mark.slow),
    ],
)
def test_merging_in_exported_graphs(to: str, pooling: str, merge: int | str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE[to])
    model = model_of(pooling=pooling, depth=3)
    images = Images(made_up(model.config, 9))
    written = export(model, to, tmp_path / f"m{SUFFIX[to]}", images, merge=merge)
    runtime, _ = open_exported(written.path, written.sha256)
    check = compare(merged(model, merge), runtime, images)
    assert check.difference < 1e-4
    assert check.agreement == 1
    assert model.merge == 0, "the given model stays as it is"


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_int8(to: str, calibrated: bool, tmp_path: Path) -> None:
    """8 bits leave the answers close: rounding of 1 in 127 in each of some products."""
    pytest.importorskip(PACKAGE[to])
    pytest.importorskip("nncf" if to == "openvino" else "onnx")
    model = model_of(width=64, mlp_width=128)
    images = Images(made_up(model.config, 32))
    calibration = list(Images(made_up(model.config, 16, seed=1)).batches(model.config, 8)) if calibrated else None
    plain = export(model, to, tmp_path / f"m{SUFFIX[to]}", images)
    found = export(model, to, tmp_path / f"q{SUFFIX[to]}", images, int8=True, calibration=calibration)
    assert 0 < found.check.spread < 0.3  # NNCF rounds attention too; the products alone stay below 0.1
    assert found.bytes < plain.bytes


def test_int8_weights_use_seven_bits_and_one_scale_per_output() -> None:
    from vitkit.runtime.onnx_graph import quantize_weight

    weight = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32) * np.logspace(-3, 2, 8, dtype=np.float32)
    values, scale = quantize_weight(weight)
    assert (np.abs(values).max(axis=0) == 63).all()
    assert (np.abs(values * scale - weight) <= scale / 2 * 1.001).all()


def test_a_failed_check_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from vitkit.runtime import onnx

    model, before = model_of(), onnx.to_onnx

    def wrong(model, spec):
        proto = before(model, spec)
        for tensor in proto.graph.initializer:
            if tensor.name.endswith("classifier.bias"):
                tensor.raw_data = np.linspace(-1, 1, 10, dtype=np.float32).tobytes()
        return proto

    monkeypatch.setattr(onnx, "to_onnx", wrong)
    with pytest.raises(ConfigError, match="nothing was kept"):
        export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 9)))
    assert not list(tmp_path.iterdir())


def test_the_command(command, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    vitkit.save(model_of(), tmp_path / "m.safetensors", class_names=[f"class {i}" for i in range(10)])
    code, text, _ = command("export", tmp_path / "m.safetensors", "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert code == 0
    assert "largest difference" in text
    assert "the same first class for 100.00%" in text
    photo(0).save(tmp_path / "photo.png")
    answers = []
    for model in ("m.safetensors", "m.onnx"):
        code, text, _ = command("predict", tmp_path / model, tmp_path / "photo.png", "--json")
        assert code == 0
        answers.append(json.loads(text)["predictions"][0])
    assert answers[0]["class"] == answers[1]["class"]
    assert answers[0]["probability"] == pytest.approx(answers[1]["probability"], abs=1e-4)


def test_what_is_said_when_something_does_not_fit(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitkit.save(model_of(), tmp_path / "m.safetensors")
    model = tmp_path / "m.safetensors"
    for args, words in (
        (("--to", "onxn", "--out", tmp_path / "m.onnx"), "Did you mean onnx"),
        (("--to", "onnx", "--out", tmp_path / "m.bin"), "must end with .onnx"),
        (("--to", "onnx", "--out", tmp_path / "no" / "m.onnx"), "does not exist"),
        (("--to", "torch-export", "--int8", "--out", tmp_path / "m.pt2"), "has no int8"),
    ):
        code, _, err = command("export", model, *args)
        assert (code, words in err) == (2, True), err
    monkeypatch.setitem(sys.modules, "onnx", None)
    code, _, err = command("export", model, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert (code, "pip install 'vitkit[onnx]'" in err) == (2, True), err
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.onnx").write_bytes(b"nothing")
    code, _, err = command("predict", tmp_path / "b.onnx", tmp_path / "a.png")
    assert (code, "cannot open" in err) == (2, True), err
