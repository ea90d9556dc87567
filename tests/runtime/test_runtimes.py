"""Every runtime against PyTorch as it is, what is missing by name, and what `vitkit tune` finds and keeps."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from peers import randomize
from vitkit.errors import ConfigError, MissingPackage
from vitkit.model.config import ViTConfig
from vitkit.runtime import open_runtime
from vitkit.runtime.base import Choice, Spec, build, made_up
from vitkit.runtime.reductions import merges
from vitkit.runtime.table import compiler
from vitkit.runtime.tune import tune, whole_images
from vitkit.runtime.verify import Images, compare_outputs
from vitkit.world import has_bf16

CONFIG = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_width=48, classes=10)


def model_of(config: ViTConfig = CONFIG, **changes):
    torch.manual_seed(0)
    return randomize(vitkit.create(config.replace(**changes)), scale=0.15)


@pytest.mark.parametrize("kind", ["onnx", "openvino", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("merge", [0, 3])
def test_the_same_as_eager(kind: str, merge: int) -> None:
    if kind == "compiled" and compiler() is None:
        pytest.skip("no C++ compiler")
    if kind != "compiled":
        pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[kind])
    model = model_of()
    runtime, eager = (open_runtime(model, k, merge=merge) for k in (kind, "eager"))
    for count in (1, 5):
        images = torch.randn(count, 3, 32, 32)
        torch.testing.assert_close(runtime.run(images), eager.run(images), atol=2e-5, rtol=1e-4)
    assert runtime.name == (f"{kind} merge 3" if merge else kind)


@pytest.mark.parametrize("kind", ["eager", "openvino"])
def test_bf16_is_named_close_and_not_exact(kind: str) -> None:
    """8 bits of precision: relative differences of some 2^-8; the model itself stays as it is."""
    if kind == "openvino":
        pytest.importorskip("openvino")
    model, images = model_of(), torch.randn(4, 3, 32, 32)
    choice = Choice(kind, bf16=True)
    assert (choice.name, choice.precision, choice.exact) == (f"{kind} bf16", "bf16", False)
    exact, found = build(model, Choice()).run(images), build(model, choice).run(images)
    assert found.dtype == torch.float32
    error = (found - exact).norm() / exact.norm()
    assert error < 0.03
    if kind == "eager" or has_bf16(
        torch.device("cpu")
    ):  # OpenVINO computes in fp32 where the processor has nothing else
        assert error > 1e-5
    assert next(model.parameters()).dtype == torch.float32


def test_bf16_is_tried_where_it_is_faster() -> None:
    tried = list(whole_images(["eager", "onnx"], 8, calibrated=False, bf16=True))
    assert [choice.name for choice in tried if choice.bf16] == ["eager bf16"]
    assert not any(choice.bf16 for choice in whole_images(["eager"], 8, calibrated=False, bf16=False))


def test_a_file_for_this_processor_alone_has_finer_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 bits where the processor adds their products exactly; 7 in a file that may travel."""
    onnx = pytest.importorskip("onnx")
    module = pytest.importorskip("vitkit.runtime.onnx")

    def largest(spec: Spec) -> int:
        module.write(model_of(), tmp_path / "model.onnx", {}, spec)
        tensors = onnx.load(tmp_path / "model.onnx").graph.initializer
        arrays = (onnx.numpy_helper.to_array(t) for t in tensors if t.data_type == onnx.TensorProto.INT8)
        return max(int(abs(array.astype(int)).max()) for array in arrays)

    monkeypatch.setattr(module, "has_vnni", lambda: True)
    assert largest(Spec(int8=True)) == 63
    assert largest(Spec(int8=True, here=True)) == 127
    monkeypatch.setattr(module, "has_vnni", lambda: False)
    assert largest(Spec(int8=True, here=True)) == 63


def test_int8_is_named_and_close() -> None:
    pytest.importorskip("onnxruntime")
    model, images = model_of(), torch.randn(8, 3, 32, 32)
    runtime = open_runtime(model, "onnx", int8=True)
    assert runtime.name == "onnx int8"
    check = compare_outputs(model, open_runtime(model).run(images), runtime.run(images), Images(images), exact=False)
    assert 1e-4 < check.spread < 0.1


def test_half_precision_and_gradients_are_left_alone() -> None:
    model = model_of().to(torch.bfloat16)
    logits = open_runtime(model, "eager").run(torch.randn(2, 3, 32, 32))
    assert (logits.dtype, logits.requires_grad) == (torch.float32, False)


@pytest.mark.parametrize(("kind", "package"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_a_missing_package_is_named(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"pip install 'vitkit\[{kind}\]'"):
        open_runtime(model_of(), kind)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean eager"):
        open_runtime(model_of(), "eagre")
    with pytest.raises(ConfigError, match="no int8"):
        open_runtime(model_of(), "eager", int8=True)
    with pytest.raises(ConfigError, match="no tokens"):
        open_runtime(vitkit.create("resnet-28px"), merge=2)


def test_merging_fits_the_model() -> None:
    assert merges(vitkit.create("mu")) != [0]
    assert 8 in merges(vitkit.create("vit-ti/16"))  # the paper's
    assert merges(model_of(positions="rope-2d")) == []


def test_tune_takes_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With speeds and answers that are given: merging is fastest but wrong, int8 is right, eager is slow."""
    from vitkit.runtime import tune as module

    class Fake:
        def __init__(self, name: str, speed: float, wrong: int) -> None:
            self.name, self.speed, self.wrong = name, speed, wrong

        def run(self, images: torch.Tensor) -> torch.Tensor:
            logits = torch.eye(10)[torch.arange(len(images)) % 10] * 5
            if self.wrong:
                logits[:: self.wrong] = logits[:: self.wrong].roll(1, dims=1)
            return logits

    def fake(model, choice, calibration=None):
        return Fake(choice.name, 1.0 + 2 * choice.int8 + 4 * bool(choice.merge), 2 if choice.merge else 0)

    monkeypatch.setattr(module, "build", fake)
    monkeypatch.setattr(module, "images_per_second", lambda rs, images, s: {n: r.speed for n, r in rs.items()})
    model = model_of()
    found = tune(model, Images(made_up(CONFIG, 40)), 0.05, kinds=["eager", "onnx"])
    assert (found.winner.choice.runtime, found.winner.choice.int8, found.winner.choice.merge) == ("onnx", True, 0)
    assert found.winner.ratio == 3.0
    measured = [bool(row.choice.merge) for row in found.rows if row.check is not None and row.ratio is not None]
    assert measured.count(False) == 1, "what is slower than the winner is not compared"
    loose = tune(model, Images(made_up(CONFIG, 40)), max_drop=0.6, kinds=["eager", "onnx"])
    assert loose.winner.choice.merge


def test_tune_predict_and_what_makes_a_choice_invalid(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "m.safetensors"
    vitkit.save(model_of(), path, class_names=[f"class {i}" for i in range(10)])
    images = np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)
    (tmp_path / "loose").mkdir()
    for i, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / "loose" / f"{i}.png")
    code, text, err = command("tune", path, tmp_path / "loose", "--runtimes", "onnx", "--seconds", 0)
    assert code == 0, err
    assert "best: onnx" in text
    assert "stored in" in text
    assert "agreement with the model" in text
    folder = tmp_path / "m.safetensors.tuned"
    assert {p.name for p in folder.iterdir()} == {"tuned.json", "model.onnx"}
    image = tmp_path / "loose" / "0.png"
    answer = json.loads(command("predict", path, image, "--json")[1])
    assert answer["runtime"].startswith("onnx")
    assert json.loads(command("predict", path, image, "--json", "--runtime", "eager")[1])["runtime"] == "eager"
    with monkeypatch.context() as patched:
        patched.setattr("vitkit.runtime.tuned.machine", lambda: {"cpu": "another"})
        code, text, err = command("predict", path, image, "--json")
        assert json.loads(text)["runtime"] == "eager"
        assert "another machine" in err
    vitkit.save(model_of(depth=1), path, class_names=[f"class {i}" for i in range(10)])
    code, text, err = command("predict", path, image, "--json")
    assert json.loads(text)["runtime"] == "eager"
    assert "other weights" in err
    (folder / "tuned.json").write_text("{")
    assert "damaged" in command("predict", path, image)[2]


def test_tune_says_what_does_not_fit(command, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    vitkit.save(model_of(), path)
    for args, words in (
        (("--max-drop", "3"), "such as 0.5%"),
        (("--runtimes", "onx"), "Did you mean onnx"),
        (("nowhere",), "no file or folder"),
    ):
        code, _, err = command("tune", path, *args)
        assert (code, words in err) == (2, True), err


@pytest.mark.parametrize(("count", "lossy"), [(6, False), (24, True)])
def test_nothing_lossy_is_chosen_by_a_handful_of_images(
    count: int, lossy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speeds(runtimes, images, seconds):
        return {name: 5.0 if "merge" in runtime.name else 1.0 for name, runtime in runtimes.items()}

    monkeypatch.setattr("vitkit.runtime.tune.images_per_second", speeds)
    images = Images(torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8))
    found = tune(model_of(), images, max_drop=1.0, kinds=["eager"], seconds=0.0)
    assert bool(found.winner.choice.merge) is lossy
