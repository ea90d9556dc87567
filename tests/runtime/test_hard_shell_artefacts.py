"""Exported and tuned files of strangers, or damaged ones: they run no code, and answer right or not at all."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import vitkit
from peers import randomize
from vitkit.data import normalise
from vitkit.errors import ConfigError
from vitkit.io import sha256
from vitkit.model.config import ViTConfig
from vitkit.progress import Progress
from vitkit.runtime import FORMATS, open_runtime
from vitkit.runtime.base import made_up
from vitkit.runtime.export import export, open_exported
from vitkit.runtime.tune import tune
from vitkit.runtime.tuned import store
from vitkit.runtime.verify import Images

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_width=16, classes=3)
PHOTO = Path(__file__).parents[1] / "data_made_by_0_1" / "exports" / "photo.png"


def model_of(seed: int = 0):
    return randomize(vitkit.create(CONFIG), scale=0.5 + seed / 5).eval()


def written(to: str, path: Path, seed: int = 0) -> Path:
    model = model_of(seed)
    return export(model, to, path, Images(made_up(model.config, 4))).path


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


def with_evil_inputs(path: Path, ran: Path) -> None:
    """The example inputs of a .pt2 replaced by an object that runs code."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    evil = io.BytesIO()
    torch.save(Evil(ran), evil)
    (inputs,) = [name for name in parts if "sample_inputs" in name]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, evil.getvalue() if name == inputs else content)


@pytest.mark.parametrize("command_name", ["predict", "embed", "inspect", "serve", "evaluate", "convert"])
def test_a_pt2_runs_no_code(command, command_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = written("torch-export", tmp_path / "m.pt2"), tmp_path / "ran"
    with_evil_inputs(path, ran)
    rest = {"predict": [PHOTO], "embed": [PHOTO, "--out", tmp_path / "e.npz"], "evaluate": ["digits"]}
    rest["convert"] = ["--to", "timm", tmp_path / "c.pth"]
    code, _, err = command(command_name, path, *rest.get(command_name, []))
    assert (code, ran.exists()) == (2, False)
    assert "Traceback" not in err
    if command_name == "predict":
        assert sha256(path) in err
        code, _, err = command("predict", path, PHOTO, "--trust", "0" * 64)
        assert (code, ran.exists(), sha256(path) in err) == (2, False, True)
        command("predict", path, PHOTO, "--trust", sha256(path))
        assert ran.exists(), "the attack itself works, once it is trusted"


def test_a_pt2_is_opened_when_it_is_trusted(command, tmp_path: Path) -> None:
    vitkit.save(model_of(), tmp_path / "m.safetensors")
    path = tmp_path / "m.pt2"
    code, text, _ = command("export", tmp_path / "m.safetensors", "--to", "torch-export", "--out", path)
    assert (code, f"--trust {sha256(path)}" in text) == (0, True)
    assert command("predict", path, PHOTO)[0] == 2
    code, text, err = command("predict", path, PHOTO, "--trust", sha256(path))
    assert code == 0, err
    assert text == command("predict", tmp_path / "m.safetensors", PHOTO)[1]
    rows = vitkit.predict(path, PHOTO, trust=sha256(path))
    assert rows[0]["error"] is None
    with pytest.raises(ConfigError, match="--trust"):
        vitkit.predict(path, PHOTO)


# --- digests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_damaged_exports_are_refused(to: str, tmp_path: Path) -> None:
    """A block of zeros in the middle of the weights: both runtimes would answer something."""
    pytest.importorskip({"onnx": "onnxruntime"}.get(to, to))
    path = written(to, tmp_path / f"m{FORMATS[to].suffix}")
    runtime, about = open_exported(path)
    images = normalise(made_up(about.config, 2), about.config.preprocessing)
    before = runtime.run(images)
    weights = path if to == "onnx" else path.with_suffix(".bin")
    content = weights.read_bytes()
    middle = len(content) // 2
    with weights.open("r+b") as file:  # in place
        file.seek(middle)
        file.write(bytes(512))
    with pytest.raises(ConfigError, match="not what was exported"):
        open_exported(path)
    with weights.open("r+b") as file:
        file.truncate(64)
    assert torch.equal(runtime.run(images), before), "a runtime owns its weights"
    with pytest.raises(ConfigError, match="export"):
        open_exported(path)


def test_weights_of_another_export_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    paths = [written("openvino", tmp_path / f"{seed}.xml", seed) for seed in (0, 1)]
    paths[1].with_suffix(".bin").replace(paths[0].with_suffix(".bin"))
    with pytest.raises(ConfigError, match="not what was exported"):
        open_exported(paths[0])


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A model whose fastest configuration is ONNX, as `tune` stores it."""
    pytest.importorskip("onnxruntime")
    vitkit.save(model_of(), tmp_path / "m.safetensors")
    model = vitkit.load(tmp_path / "m.safetensors")
    found = tune(model, Images(made_up(model.config, 24)), kinds=["onnx"], seconds=0)
    assert store(tmp_path / "m.safetensors", model, found, None) is not None
    return tmp_path / "m.safetensors"


def test_a_swapped_tuned_model_is_not_used(tuned: Path, tmp_path: Path) -> None:
    model, told = vitkit.load(tuned), Mock(spec=Progress)
    assert open_runtime(model, source=tuned, progress=told).name.startswith("onnx")
    other = written("onnx", tmp_path / "other.onnx", seed=1)
    other.replace(tuned.with_name("m.safetensors.tuned") / "model.onnx")
    assert open_runtime(model, source=tuned, progress=told).name == "eager"
    assert "model.onnx is not what `vitkit tune` wrote" in told.note.call_args[0][0]


CHANGES: list[tuple[str, object]] = [("choice", {"runtime": ["onnx"]}), ("choice", {"batch_size": "x"})]
CHANGES += [("choice", {"batch_size": -1}), ("choice", {"threads": {}}), ("choice", 3), ("machine", 3), ("model", [])]
CHANGES += [("report", []), ("files", []), ("files", {"../../x": "0"}), ("files", {"model.onnx": 3})]


def test_a_damaged_tuned_json_is_told_in_words(tuned: Path) -> None:
    path, model = tuned.with_name("m.safetensors.tuned") / "tuned.json", vitkit.load(tuned)
    sound = json.loads(path.read_text())
    texts = [json.dumps({**sound, key: value}) for key, value in CHANGES]
    for text in ["", "[]", "3", "{", "{}", "[" * 9999, *texts]:
        path.write_text(text)
        told = Mock(spec=Progress)
        assert open_runtime(model, source=tuned, progress=told).name == "eager", text[:80]
        assert "tune" in told.note.call_args[0][0]
