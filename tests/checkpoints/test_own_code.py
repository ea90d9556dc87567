"""A folder that brings its own code: one file cut out of vitkit's source, equal to vitkit, run without it."""

import ast
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import vitkit
from peers import randomize
from strategies import PUBLISHED
from vitkit.checkpoints import load, writing
from vitkit.checkpoints.huggingface_code import code
from vitkit.errors import CheckpointError
from vitkit.model.base import Outputs
from vitkit.model.config import ConvStemConfig, Preprocessing, ResNetConfig, RotaryConfig, StemConfig, ViTConfig

BASE = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_width=48, classes=10)
CONV = ConvStemConfig((4, 8))
KINDS = {
    "convolutions": {"stem": CONV, "pooling": "mean", "class_token": False},
    "paper": {},
    "timm": {"position_resize": "timm", "registers": 2, "layer_scale": 0.1},
    "hybrid": {"stem": StemConfig(layers=(1, 1), width=8, root="small")},
    "resnet-d": {"stem": StemConfig(layers=(1,), width=8, variant="d")},
    "learned-2d": {"positions": "learned-2d", "patch_embedding": "linear"},
    "sincos": {"positions": "sincos-2d", "pooling": "map"},
    "relative": {"positions": "learned+relative", "position_resize": "timm"},
    "relative-mlp": {"positions": "relative-mlp-shared"},
    "rope": {"positions": "rope-2d", "stem": CONV},
    "mixed": {"rotary": RotaryConfig(kind="mixed", axes="xy", base=10.0)},
    "distilled": {"distillation_token": True},
    "no classifier": {"classes": 0},
    **PUBLISHED,
}


def model_of(kind: str):
    torch.manual_seed(0)
    if kind == "resnet":
        config = ResNetConfig(image_size=32, classes=10, stem=StemConfig(layers=(1, 1), width=8, root="small"))
        return randomize(vitkit.create(config), scale=0.15).eval()
    return randomize(vitkit.create(BASE.replace(**KINDS[kind])), scale=0.15).eval()


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The file as a module, with the few names of transformers that it takes as a base."""
    outputs = types.ModuleType("transformers.modeling_outputs")
    outputs.BaseModelOutputWithPooling = outputs.ImageClassifierOutput = dict
    peer = types.ModuleType("transformers")
    peer.PretrainedConfig, peer.PreTrainedModel = object, torch.nn.Module
    module = types.ModuleType("modeling_vitkit")
    for one in (peer, outputs, module):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    exec(compile(text, "modeling_vitkit.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("kind", [*KINDS, "resnet"])
def test_the_file_computes_what_the_model_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, on several sizes: it is the same code."""
    model = model_of(kind)
    text = code(model.config)
    imported = {(n.module or "").partition(".")[0] for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    imported |= {
        a.name.partition(".")[0] for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names
    }
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    module = run(text, monkeypatch)
    config_of, model_of_file = module.MODELS[model.config.kind]
    theirs = model_of_file(config_of.from_dict(json.loads(json.dumps(model.config.to_dict())))).eval()
    theirs.load_state_dict(model.state_dict())
    assert type(theirs).__module__ == "modeling_vitkit"
    for height, width in ((32, 32), (48, 40)):
        images = torch.randn(2, 3, height, width)
        assert torch.equal(theirs(images), model(images))
        assert torch.equal(theirs.pooled(images), model.pooled(images))


def test_what_the_model_does_not_have_is_left_out() -> None:
    found, hybrid = code(BASE.replace(stem=CONV)), code(BASE.replace(**KINDS["hybrid"]))
    assert "class ConvStem(Part)" in found
    assert "class ResNetStem" in hybrid
    for name in ("class ResNetStem", "class SinCos2D", "class MapPool", "def push_to_hub", "import einops"):
        assert name not in found, name
    assert "# B out_channels H/stride W/stride" in found, "comments stay"


def test_no_name_is_undefined(tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff").find_ruff_bin()
    for i, kind in enumerate(("convolutions", "relative", "mixed")):
        (tmp_path / f"m{i}.py").write_text(code(BASE.replace(**KINDS[kind])))
    found = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F,E9", tmp_path], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout


def folder_of(model, tmp_path: Path) -> Path:
    vitkit.save(model, tmp_path / "m.safetensors")
    assert (
        writing.write(load.open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "folder", "huggingface_code") == []
    )
    return tmp_path / "folder"


def test_a_folder_is_read_back_without_running_it(tmp_path: Path) -> None:
    model = model_of("convolutions")
    model.outputs = Outputs("values", tuple("abcdefghij"), (1.0,) * 10, (2.0,) * 10)
    folder = folder_of(model, tmp_path)
    (folder / "modeling_vitkit.py").write_text("raise SystemExit('this code was run')")
    again = vitkit.load(folder)
    assert (again.config, again.outputs) == (model.config, model.outputs)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(again.eval()(images), model(images))
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"kind": "CNN"}))
    with pytest.raises(CheckpointError, match="vitkit reads ViT, ResNet"):
        vitkit.load(folder)


def test_the_command(command, tmp_path: Path) -> None:
    vitkit.save(model_of("convolutions"), tmp_path / "m.safetensors")
    code_, _, err = command("convert", tmp_path / "m.safetensors", tmp_path / "f", "--to", "huggingface")
    assert (code_, "--to huggingface_code" in err) == (2, True), err
    code_, out, err = command("convert", tmp_path / "m.safetensors", tmp_path / "f", "--to", "huggingface_code")
    assert (code_, "native -> huggingface_code" in out) == (0, True), err
    names = ["README.md", "config.json", "model.safetensors", "modeling_vitkit.py", "preprocessor_config.json"]
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == sorted(names)


ALONE = """
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [sys.argv[1]]
for name in ("vitkit", "einops", "timm", "torchvision"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")
import torch
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
folder, given = sys.argv[2], torch.load(sys.argv[3])
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    for images, logits in given["pairs"]:
        torch.testing.assert_close(model(images).logits, logits, atol=1e-5, rtol=1e-5)
    states = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()(given["pairs"][0][0])
    torch.testing.assert_close(states.pooler_output, given["pooled"], atol=1e-5, rtol=1e-5)
assert model.config.id2label[3] == "class 3", model.config.id2label
pixels = AutoImageProcessor.from_pretrained(folder)(given["photo"], return_tensors="pt")["pixel_values"]
torch.testing.assert_close(pixels, given["prepared"], atol=0.02, rtol=0)  # Pillow's rounding is in levels of 1/255
loss = model(images, labels=torch.zeros(len(images), dtype=torch.long)).loss
loss.backward()
print("loss", float(loss))
"""


@pytest.mark.slow
def test_it_loads_and_agrees_where_there_is_no_vitkit(tmp_path: Path) -> None:
    """An interpreter with torch and transformers, and none of vitkit, einops, timm and torchvision."""
    peer = pytest.importorskip("transformers")
    from data.making import photo
    from vitkit.data import normalise, prepare, to_tensor

    model = model_of("convolutions")
    pre = Preprocessing(size=(32, 32), interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    model.config = model.config.replace(preprocessing=pre)
    model.class_names = tuple(f"class {i}" for i in range(10))
    folder, image = folder_of(model, tmp_path), photo(3, (40, 52))
    pairs = [(images, model(images).detach()) for images in (torch.randn(2, 3, 32, 32), torch.randn(1, 3, 24, 48))]
    given = {"pairs": pairs, "pooled": model.pooled(pairs[0][0]).detach(), "photo": to_tensor(image)}
    torch.save(given | {"prepared": normalise(to_tensor(prepare(image, pre))[None], pre)}, tmp_path / "given.pt")
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(peer.__file__).parents[1].iterdir():
        if (
            not entry.name.startswith(("vitkit", "__editable__", "einops", "timm", "torchvision"))
            and entry.suffix != ".pth"
        ):
            (site / entry.name).symlink_to(entry)
    (tmp_path / "alone.py").write_text(ALONE)
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "HOME", "SYSTEMROOT") if name in os.environ}
    keep |= {"HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-S", tmp_path / "alone.py", site, folder, tmp_path / "given.pt"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=keep, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.startswith("loss")
