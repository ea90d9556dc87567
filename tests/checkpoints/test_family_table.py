"""One table of families: every row has the same shape, and one more row is one more format everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import vitkit
from vitkit.checkpoints import load, writing
from vitkit.checkpoints.families import FAMILIES, Row, family
from vitkit.errors import CheckpointError
from vitkit.model.base import Outputs

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_a_family_is_added_by_one_row(tmp_path, monkeypatch, command) -> None:
    model = vitkit.create("mu")
    vitkit.save(model, tmp_path / "m.safetensors")
    assert command("convert", tmp_path / "m.safetensors", tmp_path / "t.pth", "--to", "toy")[0] == 2
    monkeypatch.setitem(FAMILIES, "toy", Row("names turned round", (".pth",), package=""))
    code, out, err = command("convert", tmp_path / "m.safetensors", tmp_path / "t.pth", "--to", "toy")
    assert (code, "native -> toy" in out, "nothing else is kept" in err) == (0, True, True)
    again = vitkit.load(tmp_path / "t.pth")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"--to toy writes a file ending in \.pth"):
        writing.check_to(tmp_path / "t.npz", "toy")


def test_docs_and_help_list_every_family(command) -> None:
    page = DOCS.read_text(encoding="utf-8").splitlines()
    help_text = command("convert", "--help")[1]
    for name, row in FAMILIES.items():
        assert f"| {row.about} | {f'`{name}` ' if row.endings else ''}|" in page
        assert (name in help_text) == bool(row.endings) == hasattr(family(name), "write")


def test_hugging_face_says_what_the_outputs_mean(tmp_path) -> None:
    for kind, theirs in (("labels", "multi_label_classification"), ("values", "regression"), ("classes", None)):
        model = vitkit.create("mu", classes=3)
        model.outputs = Outputs(kind, ("a", "b", "c"))
        vitkit.save(model, tmp_path / f"{kind}.safetensors")
        writing.write(load.open_checkpoint(tmp_path / f"{kind}.safetensors"), tmp_path / kind, "huggingface")
        assert json.loads((tmp_path / kind / "config.json").read_text()).get("problem_type") == theirs
        assert vitkit.load(tmp_path / kind).outputs == Outputs(kind, ("a", "b", "c"))


def test_what_the_outputs_mean_is_not_lost_without_a_word(tmp_path) -> None:
    model = vitkit.create("mu", classes=1)
    model.outputs = Outputs("values", ("age",), (40.0,), (20.0,))
    vitkit.save(model, tmp_path / "m.safetensors")
    checkpoint = load.open_checkpoint(tmp_path / "m.safetensors")
    notes = "\n".join(writing.write(checkpoint, tmp_path / "o.npz", "google"))
    assert "that the outputs are values is not kept" in notes
    assert "value = output * std + mean" in notes
    assert writing.write(checkpoint, tmp_path / "o.safetensors", "native") == []


def test_looking_at_the_configuration_reads_no_tensor_and_loading_reads_the_file_once(tmp_path, monkeypatch) -> None:
    model = vitkit.create("mu", classes=3)
    vitkit.save(model, tmp_path / "m.safetensors", ["a", "b", "c"])
    writing.write(load.open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "m.npz", "google")
    opened: list[Path] = []
    read: list[str] = []
    from vitkit.checkpoints import files, source

    monkeypatch.setattr(source, "open_tensors", lambda path: opened.append(path) or files.open_tensors(path))
    original = files._read_npy
    monkeypatch.setattr(files, "_read_npy", lambda *args: read.append(args[1]) or original(*args))
    checkpoint = load.open_checkpoint(tmp_path / "m.npz")
    assert checkpoint.config.heads == 2
    assert not read
    again = vitkit.load(checkpoint, image_size=64)
    assert again.config.image_size == (64, 64)
    assert again.pretrained
    assert len(read) == len(set(read)) > 20
    assert opened == [tmp_path / "m.npz"]
