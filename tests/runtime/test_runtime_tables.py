"""One row per runtime and per format: a toy of each, the device a runtime states, and pages that read the tables."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from peers import randomize
from runtime import toy_runtime as toy
from vitkit.errors import ConfigError
from vitkit.io import sha256
from vitkit.model.config import ViTConfig
from vitkit.runtime import FORMATS, RUNTIMES, open_runtime
from vitkit.runtime.base import device_for, made_up
from vitkit.runtime.table import Row
from vitkit.runtime.tune import tune
from vitkit.runtime.verify import Images

ROOT = Path(__file__).parents[2]
CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=3)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and an image; the toy has its rows, and nothing else knows of it."""
    monkeypatch.setitem(RUNTIMES, "toy", Row("runtime.toy_runtime", "a toy"))
    monkeypatch.setitem(FORMATS, "toy", Row("runtime.toy_runtime", "a toy", suffix=".toy"))
    torch.manual_seed(0)
    vitkit.save(randomize(vitkit.create(CONFIG)), tmp_path / "m.safetensors", class_names=("ant", "bee", "cow"))
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path


def test_a_toy_runtime_states_its_device_and_gets_its_images_there(command, stage: Path) -> None:
    toy.SEEN.clear()
    code, text, err = command("predict", stage / "m.safetensors", stage / "a.png", "--runtime", "toy", "--json")
    assert code == 0, err
    answer = json.loads(text)
    assert (answer["runtime"], answer["predictions"][0]["class"], set(toy.SEEN)) == ("toy", "bee", {"meta"})
    assert command("predict", stage / "m.safetensors", stage / "a.png", "--runtime", "tyo")[2].count("Did you mean toy")
    model = vitkit.load(stage / "m.safetensors")
    found = tune(model, Images(made_up(CONFIG, 24)), max_drop=1.0, kinds=["toy"], seconds=0.0)
    assert (found.winner.choice.runtime, set(toy.SEEN)) == ("toy", {"meta"})
    with pytest.raises(ConfigError, match="the runtime toy has no int8; choose onnx or openvino"):
        open_runtime(model, "toy", int8=True)


def test_a_toy_format_is_written_compared_and_predicted_with(command, stage: Path) -> None:
    out = stage / "m.toy"
    code, text, err = command("export", stage / "m.safetensors", "--to", "toy", "--out", out)
    assert (code, "the same first class for 100.00%" in text) == (0, True), err
    answers = [json.loads(command("predict", m, stage / "a.png", "--json")[1]) for m in (out, stage / "m.safetensors")]
    assert answers[0]["predictions"] == answers[1]["predictions"]
    code, _, err = command("export", stage / "m.safetensors", "--to", "toy", "--out", out, "--int8")
    assert (code, "--to toy has no int8" in err) == (2, True)


def test_help_and_docs_name_every_row(command) -> None:
    predict, export = (command(c, "--help")[1] for c in ("predict", "export"))
    fast, deploy = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("fast.md", "deploy.md"))
    for name, row in RUNTIMES.items():
        assert name in predict
        assert f"| `{name}` | {row.about} |" in fast
    for name, row in FORMATS.items():
        assert name in export
        assert row.suffix in export
        assert f"| `{name}` | `{row.suffix}`" in deploy
        assert f"| {row.about} |" in deploy


def test_a_device_that_the_runtime_cannot_use_is_refused(command, stage: Path) -> None:
    """`meta` stands for a GPU: PyTorch could use it, ONNX Runtime here could not."""
    assert device_for("onnx", None).type == "cpu"
    assert device_for("eager", "meta").type == "meta"
    for args in (("predict",), ("embed", "--out", stage / "f.npz")):
        model = stage / "m.safetensors"
        code, _, err = command(args[0], model, stage / "a.png", *args[1:], "--runtime", "onnx", "--device", "meta")
        assert (code, "computes on the CPU" in err) == (2, True), err
    for name in ("predict", "embed", "export", "tune"):
        args = {"export": ("--to", "toy", "--out", stage / "m.toy"), "embed": ("--out", stage / "f.npz")}
        images = () if name in ("export", "tune") else (stage / "a.png",)
        code, _, err = command(name, stage / "m.safetensors", *images, *args.get(name, ()), "--device", "cuda:99")
        assert (code, "--device cuda:99 cannot be used here" in err) == (2, True), (name, err)


def test_tune_and_verify_run_the_model_where_it_is(command, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is moved to --device, and so the reference that everything is compared with computes there."""
    from vitkit.runtime.eager import Eager

    seen = []

    def compute(self: Eager, images: torch.Tensor) -> torch.Tensor:
        seen.append((self.device.type, images.device.type, next(self.model.parameters()).device.type))
        return torch.zeros(len(images), 3)

    monkeypatch.setattr(Eager, "compute", compute)
    for name in ("tuned.fingerprint", "tune.digest_of"):
        monkeypatch.setattr(f"vitkit.runtime.{name}", lambda model: "0")
    command("tune", stage / "m.safetensors", "--runtimes", "eager", "--seconds", 0, "--device", "meta")
    assert set(seen) == {("meta", "meta", "meta")}
    stored = json.loads((stage / "m.safetensors.tuned" / "tuned.json").read_text())
    assert stored["report"]["device"] == "meta"
    _, text, err = command("predict", stage / "m.safetensors", stage / "a.png", "--json")
    assert "--device meta" in err
    assert json.loads(text)["runtime"] == "eager"


@pytest.mark.parametrize("name", ["predict", "embed", "export", "tune"])
def test_a_place_that_cannot_be_written_is_a_sentence(command, stage: Path, name: str) -> None:
    """In /proc nobody may write, not even root."""
    model, image = stage / "m.safetensors", stage / "a.png"
    (stage / "m.safetensors.tuned").write_text("a file where the folder should be")
    calls = {
        "predict": (image, "--out", "/proc/vitkit/out.csv"),
        "embed": (image, "--out", "/proc/vitkit/out.npz"),
        "export": ("--to", "toy", "--out", "/proc/out.toy"),
        "tune": ("--runtimes", "eager", "--seconds", "0"),
    }
    code, _, err = command(name, model, *calls[name])
    assert code == 2
    assert "cannot be written" in err
    assert "Traceback" not in err


def test_a_table_that_cannot_be_written_can_be_caught(stage: Path) -> None:
    """Version 0.1 raised CheckpointError, which is no OSError, from a job that writes a table."""
    from vitkit.errors import WriteError
    from vitkit.prediction import open_inputs, open_model, run_job

    opened = open_model(stage / "m.safetensors", "eager")
    (stage / "out.csv.parts" / "job.json" / "in the way").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"job\.json cannot be written"):
        run_job(opened, open_inputs([str(stage / "a.png")]), stage / "out.csv")
    assert issubclass(WriteError, OSError)


# --- files of version 0.1 ------------------------------------------------------------------------------

OLD = ROOT / "tests" / "data_made_by_0_1" / "exports"


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "int8.onnx", "model.xml", "model.pt2"])
def test_files_of_version_0_1_still_predict(command, name: str) -> None:
    if name != "model.safetensors":
        pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino", ".pt2": "torch"}[Path(name).suffix])
    trust = ["--trust", sha256(OLD / name)] if name.endswith(".pt2") else []
    code, text, err = command("predict", OLD / name, OLD / "photo.png", "--runtime", "auto", *trust)
    assert code == 0, err
    assert text == f"{OLD / 'photo.png'}: cow 99.7%, bee 0.3%, ant 0.1%\n"


def test_what_version_0_1_tuned_is_still_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    stored = json.loads((OLD / "model.safetensors.tuned" / "tuned.json").read_text())
    monkeypatch.setattr("vitkit.runtime.tuned.machine", lambda: stored["machine"])
    runtime = open_runtime(vitkit.load(OLD / "model.safetensors"), source=OLD / "model.safetensors")
    assert (runtime.name, runtime.batch_size) == ("onnx", 1)
    assert runtime.run(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


# --- values --------------------------------------------------------------------------------------------


@pytest.fixture
def values(tmp_path: Path):
    """A model that predicts two numbers, in units far from those of its outputs."""
    from vitkit.model.base import Outputs

    torch.manual_seed(0)
    model = randomize(vitkit.create(CONFIG.replace(classes=2)), scale=0.3).eval()
    model.outputs = Outputs("values", ("age", "height"), (40.0, 1.7), (12.0, 0.1))
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    return model


def test_exported_values_are_those_of_the_checkpoint(command, values, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from vitkit.runtime.export import export, open_exported

    vitkit.save(values, tmp_path / "m.safetensors")
    check = export(values, "onnx", tmp_path / "m.onnx", Images(made_up(values.config, 9))).check
    assert check.difference < 1e-4
    assert not check.classifies
    rows = []
    for name in ("m.safetensors", "m.onnx"):
        out = tmp_path / f"{name}.csv"
        code, _, err = command("predict", tmp_path / name, tmp_path / "a.png", "--out", out)
        assert code == 0, err
        rows += csv.DictReader(out.open())
    assert list(rows[0]) == ["path", "age", "height", "error"]
    for name in ("age", "height"):
        assert float(rows[0][name]) == pytest.approx(float(rows[1][name]), rel=1e-4)
    images = Images(made_up(values.config, 9, (20, 24)))
    check = export(values, "onnx", tmp_path / "raw.onnx", images, raw=True).check
    assert check.difference < 1e-4
    runtime, about = open_exported(tmp_path / "raw.onnx")
    assert (about.outputs, about.raw) == (values.outputs, True)
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "a.png")))[None]
    assert runtime.run(pixels)[0].tolist() == pytest.approx([float(rows[0][n]) for n in ("age", "height")], rel=1e-4)


def test_tune_on_values_compares_by_r2(values) -> None:
    pixels = made_up(values.config, 40)
    truth = open_runtime(values, "eager").run(next(Images(pixels).batches(values.config, 40))).double()
    labels = truth * torch.tensor(values.outputs.std) + torch.tensor(values.outputs.mean)
    found = tune(values, Images(pixels, labels), max_drop=0.01, kinds=["eager"], seconds=0.0)
    check = found.winner.check
    assert check is not None
    assert check.metric is not None
    assert (check.metric.key, found.score_words) == ("r2", "R2")
    assert check.accuracy_before == pytest.approx(1.0)
    assert check.accuracy == pytest.approx(check.agreement)


def test_the_commands_find_the_values_of_a_list(command, values, tmp_path: Path) -> None:
    """export and tune open the columns that the model predicts, and report R2."""
    pytest.importorskip("onnxruntime")
    vitkit.save(values, tmp_path / "m.safetensors")
    random, lines = np.random.default_rng(1), ["path,age,height,note"]
    for i in range(30):
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{20 + i},{1.5 + i / 100},n")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    model, data = tmp_path / "m.safetensors", tmp_path / "list.csv"
    code, text, err = command("export", model, "--to", "onnx", "--out", tmp_path / "m.onnx", "--data", data)
    assert (code, "in an output" in text, "R2 " in text) == (0, True, True), err
    code, text, err = command("tune", model, data, "--runtimes", "eager", "--seconds", 0)
    assert (code, "R2" in text) == (0, True), err


@pytest.mark.parametrize("listed", [True, False], ids=["list", "folders"])
def test_tune_needs_no_training_images(command, stage: Path, listed: bool) -> None:
    """They only calibrate int8: a set of test images has labels all the same."""
    lines = ["path,label,split"]
    for i, label in enumerate(("ant", "bee", "cow") * 2):
        path = stage / "set" / ("test", "val")[i // 3] / label / f"{i}.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(np.full((16, 16, 3), 40 * i, dtype=np.uint8)).save(path)
        lines.append(f"{path.relative_to(stage)},{label},test")
    (stage / "list.csv").write_text("\n".join(lines))
    data = stage / ("list.csv" if listed else "set")
    code, text, err = command("tune", stage / "m.safetensors", data, "--runtimes", "eager", "--seconds", 0)
    assert (code, "accuracy" in text) == (0, True), f"{text}{err}"


@pytest.mark.parametrize(("other", "score"), [("bee", "accuracy"), ("dog", "agreement")])
def test_tune_takes_a_part_of_the_classes_and_says_which_labels_it_cannot(
    command, stage: Path, other: str, score: str
) -> None:
    for i, label in enumerate(("ant", other) * 4):
        path = stage / "set" / label / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16, 3), 30 * i, dtype=np.uint8)).save(path)
    lines = [f"{path.relative_to(stage)},{path.parent.name},test" for path in (stage / "set").rglob("*.png")]
    (stage / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    code, text, err = command(
        "tune", stage / "m.safetensors", stage / "list.csv", "--runtimes", "eager", "--seconds", 0
    )
    assert (code, score in text, "are not the model's" in err) == (0, True, score == "agreement"), f"{text}{err}"
