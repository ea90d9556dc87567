"""A job is bound to its model, data and options: nothing of one job enters the result of another."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from peers import randomize
from vitkit.locks import only_one
from vitkit.model.config import ViTConfig
from vitkit.prediction import Opened

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_width=16, classes=3)


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Two models and 24 images."""
    for seed in (0, 1):
        vitkit.save(randomize(vitkit.create(CONFIG), scale=0.5 + seed / 5), tmp_path / f"{seed}.safetensors")
    (tmp_path / "photos").mkdir()
    random = np.random.default_rng(0)
    for i in range(24):
        Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{i:02d}.png")
    return tmp_path


def arguments(stage: Path, model: int, *more: object) -> tuple[object, ...]:
    out = stage / "out.csv"
    return ("predict", stage / f"{model}.safetensors", stage / "photos", "--out", out, "--batch-size", 2, *more)


def stop_after(command, monkeypatch: pytest.MonkeyPatch, batches: int, *words: object) -> None:
    """The job ends with Ctrl-C in the batch after so many."""
    before, seen = Opened.__call__, list[int]()

    def stop(self: Opened, images: torch.Tensor) -> object:
        seen.append(len(images))
        if len(seen) > batches:
            raise KeyboardInterrupt
        return before(self, images)

    with monkeypatch.context() as patched:
        patched.setattr(Opened, "__call__", stop)
        assert command(*words)[0] == 130


def whole(command, stage: Path, model: int) -> bytes:
    alone = stage / "alone.csv"
    words = ("predict", stage / f"{model}.safetensors", stage / "photos", "--batch-size", 2, "--force")
    assert command(*words, "--out", alone)[0] == 0
    return alone.read_bytes()


def test_pieces_of_a_dead_job_do_not_enter_another(command, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while a job removes its pieces leaves some of them without job.json."""
    stop_after(command, monkeypatch, 8, *arguments(stage, 0))
    (stage / "out.csv.parts" / "job.json").unlink()
    assert list((stage / "out.csv.parts").glob("*.jsonl"))
    code, _, err = command(*arguments(stage, 1))
    assert code == 0, err
    assert (stage / "out.csv").read_bytes() == whole(command, stage, 1)


def test_images_that_changed_are_another_job(command, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(command, monkeypatch, 8, *arguments(stage, 0))
    Image.new("RGB", (16, 16)).save(stage / "photos" / "00.png")
    code, _, err = command(*arguments(stage, 0, "--resume"))
    assert (code, "another one: data" in err) == (2, True)
    assert command(*arguments(stage, 0, "--force"))[0] == 0
    assert (stage / "out.csv").read_bytes() == whole(command, stage, 0)


def test_resume_knows_whose_result_is_there(command, stage: Path) -> None:
    assert command(*arguments(stage, 0))[0] == 0
    assert "finished already" in command(*arguments(stage, 0, "--resume"))[1]
    code, _, err = command(*arguments(stage, 1, "--resume"))
    assert (code, "result of another job: model" in " ".join(err.split())) == (2, True)
    code, _, err = command(*arguments(stage, 0, "--resume", "--top", 1))
    assert (code, "top (5 before, 1 now)" in " ".join(err.split())) == (2, True)
    with (stage / "out.csv").open("a") as file:
        file.write("more\n")
    code, _, err = command(*arguments(stage, 0, "--resume"))
    assert (code, "was changed after" in " ".join(err.split())) == (2, True)
    (stage / "out.csv.job.json").unlink()
    code, _, err = command(*arguments(stage, 0, "--resume"))
    assert (code, "nothing says whose result" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 9999])
def test_damaged_files_of_a_job_are_told_in_words(command, stage: Path, content: bytes) -> None:
    assert command(*arguments(stage, 0))[0] == 0
    (stage / "out.csv.job.json").write_bytes(content)
    code, _, err = command(*arguments(stage, 0, "--resume"))
    assert (code, "Traceback" in err, "--force" in err) == (2, False, True)


def test_a_damaged_piece_is_computed_again(command, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(command, monkeypatch, 8, *arguments(stage, 0))
    piece = sorted((stage / "out.csv.parts").glob("*.jsonl"))[0]
    rows = piece.read_bytes().splitlines(keepends=True)
    for damage in (b"".join(rows[:-1]), b"\0" * 100, b"[]\n" * len(rows)):
        piece.write_bytes(damage)
        code, _, err = command(*arguments(stage, 0, "--resume"))
        assert (code, "--resume computes this piece again" in " ".join(err.split())) == (2, True), err
    assert command(*arguments(stage, 0, "--resume"))[0] == 0
    assert (stage / "out.csv").read_bytes() == whole(command, stage, 0)


def test_a_kill_while_the_pieces_are_removed(command, stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without their features must not count as a piece that is done."""
    words = ("embed", stage / "0.safetensors", stage / "photos", "--out", stage / "out.npz", "--batch-size", 2)
    assert command(*words)[0] == 0
    result = (stage / "out.npz").read_bytes()

    def half(folder: Path, **_: object) -> None:
        for path in Path(folder).glob("*.npy"):
            path.unlink()
        raise KeyboardInterrupt

    for more in ("--resume", "--force"):
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", half)
            assert command(*words, "--force")[0] == 130
        assert command(*words, more)[0] == 0
        assert (stage / "out.npz").read_bytes() == result
        left = [path.name for path in stage.iterdir() if path.suffix in (".parts", ".part")]
        assert not left


def test_two_jobs_for_one_file(command, stage: Path) -> None:
    with only_one(stage / ".out.csv.lock", "it", "x"):
        code, _, err = command(*arguments(stage, 0))
    assert (code, f"in use by process {os.getpid()}" in " ".join(err.split())) == (2, True)
    assert command(*arguments(stage, 0))[0] == 0
    assert json.loads((stage / "out.csv.job.json").read_text())["pictures"] == 24
