"""Damaged and hostile files: always an error of ours that names the file, never a crash, a hang or a wrong model."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import CANARY, bombs, damaged_bytes, damaged_tensors, write_all
from safetensors.torch import save_file

from vitkit.checkpoints.family import Written
from vitkit.checkpoints.files import open_tensors
from vitkit.checkpoints.load import load
from vitkit.checkpoints.writing import write_file
from vitkit.errors import CheckpointError

STATED = {"heads": 2}
# Some damage makes another model that makes sense, such as one without a class token. Then it must be said.
SAID = ("not square", "no class token", "no position table")
FORMATS = ("native", "google", "big_vision", "timm", "torchvision", "huggingface", "facebook", "legacy", "clip")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("good"))


def weights_of(path: Path) -> Path:
    return path / "model.safetensors" if path.is_dir() else path


def beside(path: Path, to: Path) -> None:
    """A folder's other files, so that only the weights differ."""
    if path.is_dir():
        for name in ("config.json", "preprocessor_config.json"):
            (to / name).write_bytes((path / name).read_bytes())


def check(path: Path, right: dict[str, torch.Tensor], what: str) -> bool:
    """True when refused. Otherwise the damage must have missed everything that matters."""
    source = path.parent if path.name == "model.safetensors" else path
    try:
        model = load(source, **STATED)
    except CheckpointError as e:
        message = str(e)
    else:
        message = ""
    if message:
        assert path.name in message or path.parent.name in message, f"{what}: the file is not named in: {message}"
        return True
    if any(word in line for line in model.load_report for word in SAID):
        return True
    state = model.state_dict()
    assert state.keys() == right.keys(), what
    for name, tensor in right.items():
        assert torch.equal(state[name], tensor), f"{what}: a silently wrong model ({name})"
    return False


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes(kind: str, good: dict[str, Path], tmp_path) -> None:
    raw = weights_of(good[kind]).read_bytes()
    right = load(good[kind], **STATED)
    path = tmp_path / weights_of(good[kind]).name
    beside(good[kind], tmp_path)
    refused = total = 0
    for what, bad in damaged_bytes(raw, 150, random.Random(kind)):
        path.write_bytes(bad)
        refused += check(path, right.state_dict(), f"{kind}, {what}")
        total += 1
    assert total >= 150
    assert refused >= 60  # the rest hit padding or unused bytes, and gave the right model


@pytest.mark.parametrize("kind", FORMATS)
def test_wrong_content(kind: str, good: dict[str, Path], tmp_path) -> None:
    source = weights_of(good[kind])
    right = load(good[kind], **STATED).state_dict()
    tensors = dict(open_tensors(source)[0])
    path = tmp_path / source.name
    beside(good[kind], tmp_path)
    total = 0
    for what, changed in damaged_tensors(tensors, 70, random.Random(kind)):
        if path.suffix == ".npz":
            write_file(path, Written(changed))
        elif path.suffix == ".safetensors":
            _, metadata = open_tensors(source)
            save_file({k: v.contiguous() for k, v in changed.items()}, path, metadata)
        else:
            torch.save(_nested(changed), path, _use_new_zipfile_serialization=kind != "legacy")
        assert check(path, right, f"{kind}, {what}"), f"{kind}, {what}: accepted"
        total += 1
    assert total >= 50


def _nested(flat: dict[str, torch.Tensor]) -> dict:
    nested: dict = {}
    for name, tensor in flat.items():
        place = nested
        *outer, last = name.split("/")
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor.clone()
    return nested


def test_bombs_and_payloads(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = 0
    for what, path in bombs(tmp_path):
        with pytest.raises(CheckpointError) as error:
            load(path)
        assert path.name in str(error.value), what
        assert CANARY not in os.environ, f"{what} was executed"
        assert not Path(CANARY).exists(), f"{what} was executed"
        seen += 1
    assert seen >= 20


def test_the_payloads_would_have_worked(tmp_path) -> None:
    """The test above is worth something: Python's own loader does run them."""
    import pickle

    from damage import Trap

    try:
        pickle.loads(pickle.dumps(Trap()))
        assert os.environ[CANARY] == "1"
    finally:
        os.environ.pop(CANARY, None)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"model_type": 3}', b'{"model_type": "bert"}', b"\xff\xfe"]
)
def test_bad_configs(content: bytes, good: dict[str, Path], tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes((good["huggingface"] / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=tmp_path.name):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"need the config\.json"):
        load(tmp_path)


def test_every_field_of_a_config_may_be_wrong(good: dict[str, Path], tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes((good["huggingface"] / "model.safetensors").read_bytes())
    for file in ("config.json", "preprocessor_config.json"):
        right = json.loads((good["huggingface"] / file).read_text())
        beside(good["huggingface"], tmp_path)
        for key in right:
            for value in (None, -1, 10**12, "x", [], {}, 1.5):
                (tmp_path / file).write_text(json.dumps({**right, key: value}))
                with contextlib.suppress(CheckpointError):  # any other error fails the test
                    load(tmp_path)
        (tmp_path / file).write_text(json.dumps(right))


def test_other_files_are_named_for_what_they_are(tmp_path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.txt").write_text("hello, this is not a checkpoint at all")
    (tmp_path / "config.json").write_text("{}   ")
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    torch.save({"weird": torch.zeros(3)}, tmp_path / "weird.pth")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "script.pt")
    words = {
        "one.npy": "single .npy array",
        "text.txt": "begins like none of",
        "config.json": "JSON file",
        "list.pth": "holds no tensors",
        "weird.pth": "names of no known family, such as 'weird'",
        "script.pt": "TorchScript archive",
    }
    for name, expected in words.items():
        with pytest.raises(CheckpointError, match=expected):
            load(tmp_path / name)


def test_nothing_is_left_behind(good: dict[str, Path], tmp_path) -> None:
    path = tmp_path / "cut.npz"
    path.write_bytes(good["google"].read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut\.npz is damaged or cut short"):
        load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["cut.npz"]
