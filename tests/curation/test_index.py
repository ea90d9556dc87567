"""An index is what its images and its model say, to the last byte, whatever happened while it was made."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from data.making import photo
from peers import randomize
from vitkit.curation import build_index, open_index, update_index
from vitkit.curation.embedding import _Describing
from vitkit.data.descriptor import SIDE, describe
from vitkit.errors import DataError
from vitkit.model.config import ViTConfig
from vitkit.prediction import Opened

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_width=16, classes=3)


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each batch computes from now on."""
    batches: list[int] = []
    before = _Describing.compute
    monkeypatch.setattr(_Describing, "compute", lambda self, x: (batches.append(len(x)), before(self, x))[1])
    return batches


def test_rows_are_the_images_in_the_order_of_the_set(photos: Path, tmp_path: Path) -> None:
    made = build_index(photos, out=tmp_path / "i")
    assert made.features.shape == (20, 692)
    assert not isinstance(made.features, np.memmap)  # it owns them
    assert made.splits.count("test") == 4
    assert made.classes == ("a", "b")
    for row in (0, 7, 19):
        image = Image.open(made.paths[row]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        vector = describe(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[0].numpy()
        np.testing.assert_allclose(made.features[row], vector / np.linalg.norm(vector), atol=1e-6)
        assert Path(made.paths[row]).parent.name == made.label_name(row)
        assert made.splits[row] in made.paths[row]


def test_cleaning_takes_the_index_of_whatever_model(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vitkit index photos --model ...` and then `vitkit data clean photos`, as the README has it."""
    monkeypatch.chdir(tmp_path)
    descriptor = update_index(photos)
    assert descriptor.path.name == f"{photos.name}.index"
    assert update_index(photos).about == descriptor.about
    vitkit.save(randomize(vitkit.create(CONFIG)), tmp_path / "m.safetensors")
    made = build_index(photos, "m.safetensors", force=True)
    again = update_index(photos)
    assert again.about == made.about
    np.testing.assert_array_equal(again.features, made.features)


def test_a_model_gives_its_own_features(photos: Path, tmp_path: Path) -> None:
    model = randomize(vitkit.create(CONFIG))
    vitkit.save(model, tmp_path / "m.safetensors")
    made = build_index(photos, tmp_path / "m.safetensors", tmp_path / "i")
    vectors = vitkit.embed(model, made.paths)
    np.testing.assert_allclose(made.features, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
    with pytest.raises(DataError, match="another model; choose another --out"):
        build_index(photos, out=tmp_path / "i")
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.7), tmp_path / "m.safetensors")
    with pytest.raises(DataError, match=r"not with these weights. Name that checkpoint with --model"):
        made.embedder()


def test_only_what_changed_is_computed(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_index(photos, out=tmp_path / "i")
    batches = counted(monkeypatch)
    build_index(photos, out=tmp_path / "i")
    assert batches == []
    photo(50).save(photos / "train" / "a" / "new.png")
    photo(51).save(photos / "train" / "a" / "02.png")
    (photos / "test" / "b" / "05.png").unlink()
    (photos / "train" / "b" / "01.png").rename(photos / "train" / "a" / "01.png")
    updated = build_index(photos, out=tmp_path / "i")
    assert sum(batches) == 3
    fresh = build_index(photos, out=tmp_path / "fresh")
    assert content(tmp_path / "i") == content(tmp_path / "fresh")
    assert len(updated) == len(fresh) == 20


def test_a_stopped_index_continues_and_is_the_same(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(photos, out=tmp_path / "whole", batch_size=1)
    before, seen = Opened.__call__, list[int]()

    def stop(self: Opened, images: torch.Tensor) -> object:
        seen.append(len(images))
        if len(seen) == 11:
            raise KeyboardInterrupt
        return before(self, images)

    monkeypatch.setattr(Opened, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        build_index(photos, out=tmp_path / "i", batch_size=1)
    assert not (tmp_path / "i").exists()
    build_index(photos, out=tmp_path / "i", batch_size=1)
    assert len(seen) == 11 + 12  # two pieces of four images were kept
    assert content(tmp_path / "whole") == content(tmp_path / "i")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i", "photos", "whole"]


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    for i in range(300):
        photo(100 + i).save(photos / "train" / "a" / f"more{i}.png")
    build_index(photos, out=tmp_path / "whole", batch_size=4)
    words = [sys.executable, "-m", "vitkit", "index", str(photos), "--out", str(tmp_path / "i"), "--batch-size", "4"]
    parts, kills = tmp_path / "i.features.parts", 0
    for wanted in (1, 6, 14):
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while running.poll() is None and len(list(parts.glob("*.jsonl"))) < wanted:
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
        kills += running.wait() == -signal.SIGKILL
    assert kills >= 1
    assert subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert content(tmp_path / "whole") == content(tmp_path / "i")


def test_unreadable_images_are_named_and_left_out(photos: Path, tmp_path: Path, command) -> None:
    (photos / "train" / "a" / "broken.png").write_bytes(b"no image")
    code, out, _ = command("index", photos, "--out", tmp_path / "i")
    assert code == 0
    assert "20 images, 692 features each by the descriptor of edges and colours" in out
    assert "1 unreadable" in out
    assert "broken.png: not an image" in out
    assert len(open_index(tmp_path / "i").catalogue()) == 20


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    (tmp_path / "loose").mkdir()
    for i in range(3):
        photo(i).save(tmp_path / "loose" / f"{i}.png")
    made = build_index(tmp_path / "loose", out=tmp_path / "i")
    assert made.labels.tolist() == [-1, -1, -1]
    assert made.classes == ()
    assert len(made.catalogue()) == 3


def test_the_index_knows_when_its_set_is_another(photos: Path, tmp_path: Path) -> None:
    made = build_index(photos, out=tmp_path / "i")
    photo(77).save(photos / "train" / "a" / "new.png")
    with pytest.raises(DataError, match=r"1 image is new or changed. Update it: vitkit index"):
        made.catalogue()
    with pytest.raises(DataError, match="does not fit digits as it is now"):
        made.catalogue(data="digits")


def damage_header(folder: Path, **changes: object) -> None:
    about = json.loads((folder / "about.json").read_text())
    (folder / "about.json").write_text(json.dumps({**about, **changes}))


DAMAGES = {
    "a bit of features": lambda f: _flip(f / "features.npy", -3),
    "a letter of a path": lambda f: _flip(f / "samples.jsonl", 40),
    "cut short": lambda f: os.truncate(f / "features.npy", 2000),
    "a file is gone": lambda f: (f / "samples.jsonl").unlink(),
    "no JSON": lambda f: (f / "about.json").write_text("{"),
    "a list": lambda f: (f / "about.json").write_text("[]"),
    "another width": lambda f: damage_header(f, width=3),
    "no files": lambda f: damage_header(f, files=None),
    "fewer classes": lambda f: damage_header(f, classes=[]),
}


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused_with_the_command_that_helps(damage: str, photos: Path, tmp_path: Path) -> None:
    build_index(photos, out=tmp_path / "i")
    DAMAGES[damage](tmp_path / "i")
    with pytest.raises(DataError, match=r"is damaged .*make it again: vitkit index DATA --out .* --force"):
        open_index(tmp_path / "i")
    assert len(build_index(photos, out=tmp_path / "i", force=True)) == 20


def test_other_folders_and_versions_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no index; make one"):
        open_index(photos)
    with pytest.raises(DataError, match="exists and is no index; choose another --out"):
        build_index(photos, out=photos, force=True)
    build_index(photos, out=tmp_path / "i")
    damage_header(tmp_path / "i", version=2)
    with pytest.raises(DataError, match="of version 2, and this vitkit reads version 1"):
        open_index(tmp_path / "i")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        build_index(tmp_path / "empty", out=tmp_path / "j")
    (tmp_path / "bad" / "a").mkdir(parents=True)
    (tmp_path / "bad" / "a" / "1.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"no image of .*/bad can be read, such as .*1.png"):
        build_index(tmp_path / "bad", out=tmp_path / "j")


def test_a_cut_file_is_told_by_its_size(photos: Path, tmp_path: Path) -> None:
    build_index(photos, out=tmp_path / "i")
    os.truncate(tmp_path / "i" / "features.npy", 2000)
    with pytest.raises(DataError, match=r"features.npy has 2,000 bytes, not "):
        open_index(tmp_path / "i")
