"""Search by a patch, what to label next with a model, tables for pandas, and what classes and splits share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data as images

import vitkit
from data.making import photo
from peers import randomize
from vitkit.curation import build_index
from vitkit.curation.balance import overlaps, unbalanced
from vitkit.curation.index import Index
from vitkit.curation.suggest import suggest_uncertain
from vitkit.errors import ConfigError

CONFIG = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 1, "heads": 3, "mlp_width": 48}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = randomize(vitkit.create("vit-ti/16", classes=2, **CONFIG))
    vitkit.save(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_a_patch_finds_the_images_that_hold_it(tmp_path: Path, checkpoint: Path, command) -> None:
    """A square of one image is put into the same place of two others: these come after the image itself."""
    squares = np.stack([np.asarray(photo(i, (32, 32))) for i in range(30)])
    squares[[11, 23], 8:16, 16:24] = squares[4, 8:16, 16:24]
    for i, pixels in enumerate(squares):
        (tmp_path / "set").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "set" / f"{i:02d}.png")
    index = build_index(tmp_path / "set", checkpoint, tmp_path / "i")
    hits = index.search(tmp_path / "set" / "04.png", 3, patch=(1, 2))
    assert [Path(h.path).stem for h in hits[:1]] == ["04"]
    assert {Path(h.path).stem for h in hits} == {"04", "11", "23"}
    assert hits[0].score == pytest.approx(1, abs=1e-5)
    words = ("search", tmp_path / "i", tmp_path / "set" / "04.png")
    assert command(*words, "--patch", "1,2", "--top", "2")[0] == 0
    for wrong, message in (("4,0", "from 0,0 to 3,3"), ("1", "must be 2 whole numbers: ROW,COLUMN")):
        code, _, err = command(*words, "--patch", wrong)
        assert code == 2
        assert message in err
    code, _, err = command("search", tmp_path / "i")
    assert "give either an IMAGE or --text WORDS" in err
    code, _, err = command("search", tmp_path / "i", "--text", "a cat")
    assert code == 2
    assert "has no text tower; index the set with --model and a folder of CLIP or SigLIP" in err
    plain = build_index(tmp_path / "set", out=tmp_path / "p")
    with pytest.raises(ConfigError, match="knows no patches; use --box"):
        plain.search(tmp_path / "set" / "04.png", patch=(0, 0))


def test_options_of_the_model_belong_to_the_index(tmp_path: Path, checkpoint: Path, photos: Path, command) -> None:
    words = ("index", photos, "--out", tmp_path / "i")
    assert command(*words, "--model", checkpoint, "--image-size", "48")[0] == 0
    index = vitkit.open_index(tmp_path / "i")
    assert index.about["options"] == {"image_size": [48, 48]}
    vectors = vitkit.embed(checkpoint, index.paths, image_size=48)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(index.features, unit, atol=1e-5)
    assert index.search(index.paths[3], 1)[0].row == 3  # with the same options again
    code, _, err = command("index", photos, "--out", tmp_path / "p", "--image-size", "48")
    assert code == 2
    assert "--image-size is for a model; name one with --model" in err


def test_uncertain_images_come_first_and_differ() -> None:
    """Two directions: of the ten uncertain ones, one of each is taken, the least sure of it."""
    features = np.repeat(np.eye(4, dtype=np.float32), 25, axis=0)
    margin = np.full(100, 0.9, np.float32)
    margin[[3, 4, 30, 31, 32]] = 0.3, 0.1, 0.2, 0.05, 0.4
    chosen = suggest_uncertain(features[:50], margin[:50], 2)
    assert chosen.tolist() == [31, 4]
    with pytest.raises(ConfigError, match="must be from 1 to the 50 images"):
        suggest_uncertain(features[:50], margin[:50], 51)


def test_suggestions_of_a_model(tmp_path: Path, checkpoint: Path, photos: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("data", "suggest", photos, "--count", "20", "--model", checkpoint)
    assert code == 0
    found = vitkit.predict(checkpoint, out.split())
    sure = [abs(2 * p.probability - 1) for p in found]  # of two classes
    assert sure == sorted(sure)
    model = vitkit.create("vit-ti/16", classes=0, **CONFIG)
    vitkit.save(model, tmp_path / "none.safetensors")
    code, _, err = command("data", "suggest", photos, "--count", "2", "--model", tmp_path / "none.safetensors")
    assert code == 2
    assert "is no classifier of two classes or more" in err


def test_results_are_tables(tmp_path: Path, photos: Path) -> None:
    """Lists of dataclasses, of which pandas makes a column for each field."""
    pandas = pytest.importorskip("pandas")
    photograph = Image.fromarray(images.astronaut()).resize((256, 256))
    photograph.save(photos / "train" / "a" / "02.png")
    photograph.resize((200, 200)).save(photos / "test" / "a" / "smaller.jpg", quality=85)
    index = build_index(photos, out=tmp_path / "i")
    (group,) = pandas.DataFrame(index.duplicates()).to_dict("records")
    assert set(group) == {"rows", "exact", "score", "leaks", "paths"}
    assert [Path(path).name for path in group["paths"]] == ["02.png", "smaller.jpg"]
    hits = pandas.DataFrame(index.search(index.paths[3], 4))
    assert list(hits.columns) == ["row", "path", "label", "split", "score"]
    assert hits.row[0] == 3
    random = np.random.default_rng(0)
    truth = np.arange(90) % 3
    points = (np.eye(8)[truth] + random.normal(0, 0.1, (90, 8))).astype(np.float32)
    labels = np.where(np.arange(90) < 4, (truth + 1) % 3, truth)
    few = replace(made(points, labels.tolist(), ["train"] * 90, ("a", "b", "c")), paths=[f"{i}.png" for i in range(90)])
    errors = pandas.DataFrame(few.label_errors())
    assert {"row", "path", "label_name", "suggested_name", "score"} <= set(errors.columns)
    assert sorted(errors.path) == ["0.png", "1.png", "2.png", "3.png"]
    assert errors.set_index("path").suggested_name["1.png"] == "b"


def made(features: np.ndarray, labels: list[int], splits: list[str], classes: tuple[str, ...]) -> Index:
    return Index(Path("none"), features, [], np.array(labels), splits, [], classes, {})  # type: ignore[arg-type]


def test_classes_that_lie_in_each_other_overlap() -> None:
    """Classes a and b are drawn from one direction, c from another: of the neighbours half are of the other."""
    random = np.random.default_rng(0)
    points = np.concatenate(
        [np.eye(8)[0] + random.normal(0, 0.1, (200, 8)), np.eye(8)[1] + random.normal(0, 0.1, (100, 8))]
    )
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    (found,) = overlaps(made(points, [0, 1] * 100 + [2] * 100, ["train"] * 300, ("a", "b", "c")))
    assert (found.first, found.second) == ("a", "b")
    assert found.share == pytest.approx(0.5, abs=0.05)


def test_shares_of_splits_are_compared() -> None:
    points = np.zeros((400, 2), np.float32)
    labels = [0] * 150 + [1] * 150 + [0] * 10 + [1] * 90
    found = unbalanced(made(points, labels, ["train"] * 300 + ["test"] * 100, ("a", "b")))
    assert {(u.split, u.label, u.share, u.share_of_train) for u in found} == {
        ("test", "a", 0.1, 0.5),
        ("test", "b", 0.9, 0.5),
    }
    assert unbalanced(made(points, [0, 1] * 200, ["train"] * 300 + ["test"] * 100, ("a", "b"))) == []


def test_values_are_no_classes(photos: Path, tmp_path: Path, command, monkeypatch) -> None:
    """A column of numbers under the name `label`: one sentence, not a class of one image for each of them."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{path},{1.37 * i}" for i, path in enumerate(sorted(photos.rglob("*.png")))]
    (tmp_path / "sizes.csv").write_text("path,label\n" + "\n".join(rows))
    _, out, _ = command("data", "clean", "sizes.csv", "--out", "report")
    assert "20 classes for 20 images" in out
    assert "a column of names or values rather than classes" in out
    assert "small-class" not in out


def test_a_damaged_index_says_so_once(photos: Path, tmp_path: Path, command) -> None:
    build_index(photos, out=tmp_path / "i")
    (tmp_path / "i" / "about.json").write_text("{}")
    for words in (("search", tmp_path / "i", "x.png"), ("index", photos, "--out", tmp_path / "i")):
        code, _, err = command(*words)
        assert code == 2
        assert f"about.json has no 'format'); make it again: vitkit index DATA --out {tmp_path / 'i'} --force" in err
