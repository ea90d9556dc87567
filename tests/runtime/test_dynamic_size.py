"""Exported files that take images of any size, weights beyond what one file holds, and classes beside logits."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vitkit
from peers import randomize
from strategies import PUBLISHED
from vitkit.errors import ConfigError
from vitkit.model.base import Outputs
from vitkit.model.config import ConvStemConfig, RotaryConfig, StemConfig, ViTConfig
from vitkit.model.resizing import OFFSET_RESIZES, RESIZES, resize_grid
from vitkit.model.symbolic import MATRICES, OFFSET_MATRICES, resize_in_graph
from vitkit.runtime.base import made_up
from vitkit.runtime.eager import Eager
from vitkit.runtime.export import export, open_exported
from vitkit.runtime.verify import Images

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_width=48, classes=10)
GRIDS = [(4, 4), (1, 1), (1, 9), (2, 3), (3, 2), (4, 5), (5, 4), (7, 7), (8, 8), (11, 6), (6, 13), (16, 15)]


def model_of(**changes):
    torch.manual_seed(0)
    model = randomize(vitkit.create(BASE.replace(**changes)), scale=0.15)
    model.class_names = tuple(f"class {i}" for i in range(model.config.classes))
    return model


@pytest.mark.parametrize("how", RESIZES)
def test_matrices_resize_as_each_family_does(how: str) -> None:
    """PyTorch's own resize, and scipy's rounding (16 -> 30, 28 -> 14), which the model uses, is the truth.

    PyTorch has its weights in float32, so that values of about 1 differ by some 1e-6.
    """
    random = torch.Generator().manual_seed(0)
    for old in [(14, 14), (7, 5), (1, 6), (2, 2), (16, 28)]:
        table = torch.randn(*old, 3, generator=random)
        for new in [old, (old[0], old[1] + 1), (1, 1), (2, 3), (30, 14), (13, 31)]:
            found = resize_in_graph(table, new, MATRICES[how])
            torch.testing.assert_close(found, resize_grid(table, new, how), atol=1e-5, rtol=0)
    for old in [(27, 27), (3, 5), (1, 7)]:
        table = torch.randn(*old, 2, generator=random)
        for new in [old, (old[0], old[1] + 2), (1, 1), (13, 31), (55, 9)]:
            found = resize_in_graph(table, new, OFFSET_MATRICES[how])
            torch.testing.assert_close(found, resize_grid(table, new, how, OFFSET_RESIZES), atol=1e-5, rtol=0)


def test_rounding_is_that_of_scipy_on_every_side() -> None:
    """Where a product rounds beyond the last place decides whether a row is zero: no rounding may differ."""
    for old in (4, 14, 16, 24, 28):
        table = torch.ones(old, 1, 1)
        for new in range(1, 60):
            found = resize_in_graph(table, (new, 1), MATRICES["official-exact"])
            torch.testing.assert_close(found, resize_grid(table, (new, 1), "official-exact"), atol=1e-6, rtol=0)


def test_no_resize_is_forgotten() -> None:
    assert MATRICES.keys() == RESIZES.keys()
    assert OFFSET_MATRICES.keys() == OFFSET_RESIZES.keys()


KINDS = {
    "dinov2": {"position_resize": "dinov2"},  # the only one that moves a table on its own grid too
    "timm": {"position_resize": "timm", "pooling": "mean"},
    "official-exact": {"position_resize": "official-exact", "registers": 2},
    "learned-2d": {"positions": "learned-2d"},
    "sincos": {"positions": "sincos-2d", "class_token": False, "pooling": "map"},
    "relative": {"positions": "relative", "position_resize": "timm"},
    "shared": {"positions": "learned+relative-shared", "position_resize": "huggingface"},
    "relative-mlp": {"positions": "relative-mlp"},
    "rope": {"positions": "rope-2d"},
    "box": {"rotary": RotaryConfig(kind="box", base=100.0, half=True)},
    "mixed": {"rotary": RotaryConfig(kind="mixed", axes="xy", base=10.0)},
    "pixels": {"rotary": RotaryConfig(pixels=True, reference=(2, 3)), "positions": "none"},
    "hybrid": {"stem": StemConfig(layers=(1, 1), width=8, root="small")},
    "convolutions": {"stem": ConvStemConfig((4, 8))},
    **{name: PUBLISHED[name] for name in ("sub-norms", "branches", "cut")},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_12_sizes_and_3_batches_in_plain_onnxruntime(kind: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = model_of(**KINDS[kind])
    written = export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 3)), dynamic_size=True)
    assert "5 other sizes" in written.check.summary()
    session = ort.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["vitkit"])["dynamic_size"]
    random = torch.Generator().manual_seed(1)
    for rows, columns in GRIDS:
        if kind == "hybrid" and rows * columns == 1:
            continue  # a toy ResNet cannot norm a single position
        for count in (1, 2, 5):
            extra = (3, 5) if kind == "cut" else (0, 0)  # rows and columns that fill no patch
            images = torch.randn(count, 3, 8 * rows + extra[0], 8 * columns + extra[1], generator=random)
            (found,) = session.run(None, {"images": images.numpy()})
            np.testing.assert_allclose(found, Eager(model).run(images).numpy(), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm", "relative"])
def test_openvino_reads_it_as_it_is(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    openvino = pytest.importorskip("openvino")
    model = model_of(**KINDS[kind])
    export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 2)), dynamic_size=True)
    compiled = openvino.Core().compile_model(str(tmp_path / "m.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for count, (rows, columns) in enumerate(GRIDS[:5], 1):
        images = torch.randn(count, 3, 8 * rows, 8 * columns)
        np.testing.assert_allclose(compiled(images.numpy())[0], Eager(model).run(images).numpy(), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_sizes_are_computed_once_and_not_in_every_block() -> None:
    pytest.importorskip("onnxscript")
    from vitkit.runtime.base import Spec
    from vitkit.runtime.onnx import to_onnx

    kinds = [[n.op_type for n in to_onnx(model_of(depth=d).eval(), Spec(dynamic_size=True)).graph.node] for d in (1, 3)]
    assert kinds[0].count("Range") == kinds[1].count("Range") > 0
    assert kinds[1].count("Shape") - kinds[0].count("Shape") <= 2


@pytest.mark.slow
def test_any_size_by_torch_export(tmp_path: Path) -> None:
    model = model_of(position_resize="timm")
    written = export(model, "torch-export", tmp_path / "m.pt2", Images(made_up(model.config, 3)), dynamic_size=True)
    runtime, _ = open_exported(written.path, written.sha256)
    for count, (rows, columns) in enumerate(GRIDS[3:8], 1):  # two patches or more on each side
        images = torch.randn(count, 3, 8 * rows, 8 * columns)
        torch.testing.assert_close(runtime.run(images), Eager(model).run(images), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_weights_beyond_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ort = pytest.importorskip("onnxruntime")
    onnx_checker = pytest.importorskip("onnx.checker")
    from vitkit.runtime import onnx

    model, images = model_of(), torch.randn(2, 3, 32, 32)
    monkeypatch.setattr(onnx, "LIMIT", 50_000)
    written = export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 3)), dynamic_size=True)
    data = tmp_path / "m.onnx.data"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert written.bytes == written.path.stat().st_size + data.stat().st_size
    assert data.stat().st_size > 4 * 0.9 * sum(p.numel() for p in model.parameters())
    onnx_checker.check_model(str(written.path))
    expected = Eager(model).run(images).numpy()
    session = ort.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], expected, atol=1e-4, rtol=0)
    runtime, about = open_exported(written.path)
    np.testing.assert_allclose(runtime.run(images).numpy(), expected, atol=1e-4, rtol=0)
    assert about.outputs.names == model.class_names
    in_memory = onnx.build(model, onnx.Choice("onnx"), onnx.Spec())
    np.testing.assert_allclose(in_memory.run(images).numpy(), expected, atol=1e-4, rtol=0)
    small = onnx.build(model, onnx.Choice("onnx", int8=True), onnx.Spec(int8=True))
    assert np.abs(small.run(images).numpy() - expected).max() < 0.5 * expected.std()

    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ConfigError, match="is not what was exported"):
        open_exported(written.path)
    monkeypatch.undo()  # a small file of the same name does not care for what lies beside it
    export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 3)))
    open_exported(tmp_path / "m.onnx")


@pytest.mark.parametrize("to", ["onnx", "torch-export", pytest.param("openvino", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_the_most_probable_classes_inside(to: str, kind: str, tmp_path: Path) -> None:
    from vitkit.runtime import FORMATS

    pytest.importorskip((FORMATS[to].packages or ("torch",))[0])
    model = model_of()
    model.outputs = Outputs(kind, model.class_names)
    written = export(model, to, tmp_path / f"m{FORMATS[to].suffix}", Images(made_up(model.config, 3)), top=4)
    runtime, about = open_exported(written.path, written.sha256)
    images = torch.randn(3, 3, 32, 32)
    logits = Eager(model).run(images)
    torch.testing.assert_close(runtime.run(images), logits, atol=1e-4, rtol=0)  # the first output, as without --top
    expected = (logits.softmax(-1) if kind == "classes" else logits.sigmoid()).topk(4)
    _, values, numbers = runtime.all_outputs(images)
    torch.testing.assert_close(values, expected.values, atol=1e-4, rtol=0)
    assert numbers.tolist() == expected.indices.tolist()
    assert about.outputs.names[int(numbers[0, 0])].startswith("class ")


def test_names_of_outputs_with_raw_pixels(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = model_of()
    written = export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 3, (40, 50))), raw=True, top=2)
    session = ort.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_outputs()] == ["logits", "probabilities", "classes"]
    pixels = made_up(model.config, 2, (33, 47)).permute(0, 2, 3, 1).contiguous().numpy()
    values, numbers = session.run(["probabilities", "classes"], {"pixels": pixels})
    assert values.shape == numbers.shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dynamic_size": True, "raw": True}, "do not go together.*leave one of them out"),
        ({"dynamic_size": True, "merge": 2}, "do not go together.*leave one of them out"),
        ({"top": 11}, "from 1 to the 10 classes"),
    ],
)
def test_what_does_not_go_together(options: dict, words: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ConfigError, match=words):
        export(model_of(), "onnx", tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_what_a_model_or_a_format_has_not(tmp_path: Path) -> None:
    model = model_of()
    model.outputs = Outputs("values", (), (0.0,) * 10, (1.0,) * 10)
    with pytest.raises(ConfigError, match="this model gives values; leave --top out"):
        export(model, "torch-export", tmp_path / "m.pt2", top=1)
    pytest.importorskip("openvino")
    with pytest.raises(ConfigError, match="--to onnx, which OpenVINO reads"):
        export(model_of(), "openvino", tmp_path / "m.xml", dynamic_size=True)


@pytest.mark.slow
def test_the_largest_model_of_the_paper(tmp_path: Path) -> None:
    """ViT-H/14, 2.5 GB: exported, read by plain onnxruntime, and equal for several numbers of images."""
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = vitkit.create("vit-h/14").eval()
    assert model.head.classifier is not None
    torch.nn.init.normal_(model.head.classifier.weight, std=0.05)
    written = export(model, "onnx", tmp_path / "m.onnx", Images(made_up(model.config, 2)))
    assert written.bytes > 4 * 632_045_800
    assert written.path.stat().st_size < 10e6
    session = ort.InferenceSession(written.path, providers=["CPUExecutionProvider"])
    for count in (1, 3):
        images = torch.randn(count, 3, 224, 224)
        (found,) = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(found, Eager(model).run(images).numpy(), atol=1e-4, rtol=0)
    (tmp_path / "m.onnx.data").unlink()  # pytest keeps its folders
