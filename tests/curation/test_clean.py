"""What is wrong with a set is found, against planted truths and peers; what a person decides becomes a new list."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from skimage import data as images

import vitkit
from vitkit.curation import build_index
from vitkit.curation.apply import Applied, apply, read_issues
from vitkit.curation.clean import COLUMNS, clean
from vitkit.curation.labels import confident_learning, cross_validated
from vitkit.curation.search import nearest
from vitkit.curation.suggest import suggest
from vitkit.errors import ConfigError, DataError

NAMES = ("astronaut", "coffee", "cat", "rocket", "camera", "coins", "moon", "page")
COPIES = {
    "crop": lambda im: im.crop((im.width // 8, im.height // 20, im.width, im.height - im.height // 12)),
    "flip": lambda im: im.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "bright": lambda im: ImageEnhance.Brightness(im).enhance(1.3),
    "turned": lambda im: im.rotate(5, Image.Resampling.BICUBIC),
    "small": lambda im: im.resize((im.width // 3, im.height // 3)),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photographs of scikit-image in train, a changed copy of some in test, and a blank image."""
    folder = tmp_path_factory.mktemp("set") / "photos"
    photographs = [Image.fromarray(getattr(images, name)()).convert("RGB") for name in NAMES]
    for split in ("train", "test"):
        for label in "ab":
            (folder / split / label).mkdir(parents=True)
    for n, (name, image) in enumerate(zip(NAMES, photographs, strict=True)):
        image.save(folder / "train" / "ab"[n % 2] / f"{name}.jpg", quality=90)
    for n, (kind, change) in enumerate(COPIES.items()):
        change(photographs[n]).save(folder / "test" / "ab"[n % 2] / f"{NAMES[n]}-{kind}.jpg", quality=60)
    Image.new("RGB", (80, 60), (200, 10, 10)).save(folder / "train" / "a" / "blank.png")
    return folder


def test_changed_copies_are_found_and_nothing_else(planted: Path, tmp_path: Path) -> None:
    found = build_index(planted, out=tmp_path / "i")
    groups = found.duplicates()
    names = [sorted(Path(found.paths[row]).stem.split("-")[0] for row in group.rows) for group in groups]
    assert sorted(names) == sorted([n, n] for n in NAMES[: len(COPIES)])
    assert all(group.leaks and not group.exact for group in groups)


def test_clean_and_apply_from_the_command_line(planted: Path, tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("data", "clean", planted, "--out", "report")
    assert code == 1
    assert "leak" in out
    rows = list(csv.DictReader((tmp_path / "report" / "issues.csv").open()))
    assert list(rows[0]) == ["path", "issue", "split", "label", "suggestion", "score", "group"]
    leaks = [row for row in rows if row["issue"] == "leak"]
    assert len(leaks) == 2 * len(COPIES)
    assert rows[: len(leaks)] == leaks  # first
    assert {row["split"] for row in leaks if row["suggestion"] == "drop"} == {"train", "val"}  # test stays
    assert any(row["issue"] == "junk" and row["path"].endswith("blank.png") for row in rows)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "astronaut.jpg" in page
    assert "data:image/jpeg;base64," in page
    code, out, err = command("data", "apply", "report/issues.csv", "--to", "new.csv")
    assert (code, err) == (0, "")
    assert len(list(planted.rglob("*.*"))) == 14  # untouched
    cleaned = vitkit.open_data("new.csv")
    assert cleaned.splits["test"] == len(COPIES)
    names = [Path(n).stem for n in cleaned.samples.names]
    assert "blank" not in names
    assert "astronaut" not in names
    assert "moon" in names


def test_only_accepted_rows_count_where_there_is_an_action(planted: Path, tmp_path: Path, command) -> None:
    path = planted / "train" / "a" / "coins.jpg" if (planted / "train" / "a" / "coins.jpg").exists() else None
    path = path or planted / "train" / "b" / "coins.jpg"
    moon = next(planted.rglob("moon.jpg"))
    head = "path,issue,split,label,suggestion,score,group,action\n"
    lines = f"{path},label,train,b,a,0.9,,accept\n{moon},outlier,train,a,drop,0.5,,reject\n"
    (tmp_path / "issues.csv").write_text(head + lines)
    words = ("data", "apply", tmp_path / "issues.csv", "--to", tmp_path / "new.csv")
    code, _, err = command(*words)
    assert code == 2
    assert "nothing says which set" in err
    assert "add --data DATA" in err
    code, out, _ = command(*words, "--data", planted)
    assert code == 0
    assert "14 images, 0 left out, 1 with a new label" in out
    listed = {Path(r["path"]).name: r["label"] for r in csv.DictReader((tmp_path / "new.csv").open())}
    assert listed["coins.jpg"] == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,issue\n1,leak\n", "has no column suggestion; keep the header"),
        ("path,issue,suggestion\n1,other,drop\n", "no issue is called 'other'"),
        ("path,issue,suggestion,action\n1,leak,drop,yes\n", "the action 'yes' must be accept or reject"),
        ("path,issue,suggestion\nnowhere.jpg,leak,drop\n", "nowhere.jpg is not in"),
        ("path,issue,suggestion\n{coins},label,c\n", "has no class 'c'"),
        ("path,issue,suggestion\n{coins},label,a\n{coins},label,b\n", "is to be 'a' and 'b'; remove one"),
        ("path,issue,suggestion\n{coins},outlier,delete\n", "row 2: the suggestion 'delete' must be drop, or empty"),
        ("", "has no column path"),
        ("path,issue,suggestion\n\udcff,leak,drop\n", "is not UTF-8 text"),
    ],
)
def test_a_wrong_list_of_issues_is_refused(text: str, message: str, planted: Path, tmp_path: Path, command) -> None:
    text = text.replace("{coins}", str(next(planted.rglob("coins.jpg"))))
    (tmp_path / "issues.csv").write_text(text, errors="surrogateescape")
    code, _, err = command("data", "apply", tmp_path / "issues.csv", "--to", tmp_path / "n.csv", "--data", planted)
    assert code == 2
    assert message in err


def test_sets_in_memory_cannot_be_listed(tmp_path: Path, command) -> None:
    (tmp_path / "issues.csv").write_text("path,issue,suggestion\n")
    code, _, err = command("data", "apply", tmp_path / "issues.csv", "--to", tmp_path / "n.csv", "--data", "digits")
    assert code == 2
    assert "no files that a list could name" in err


def flipped(labels: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rows = random.permutation(len(labels))[: int(share * len(labels))]
    wrong = labels.copy()
    wrong[rows] = (wrong[rows] + random.integers(1, 10, len(rows))) % 10
    return wrong, rows


def test_flipped_labels_of_digits_are_found(tmp_path: Path) -> None:
    found = build_index("digits", out=tmp_path / "i")
    labels, rows = flipped(found.labels, 0.1)
    probabilities = cross_validated(found.features, labels, 10)
    wrong = confident_learning(probabilities, labels)
    assert np.isin(wrong, rows).mean() > 0.9  # precision
    assert np.isin(rows, wrong).mean() > 0.75  # recall
    right = probabilities[np.intersect1d(wrong, rows)].argmax(axis=1) == found.labels[np.intersect1d(wrong, rows)]
    assert right.mean() > 0.9  # the suggested label is the one that was flipped away


@pytest.mark.parametrize("seed", range(5))
def test_confident_learning_is_cleanlabs(seed: int) -> None:
    """The same rows in the same order, for random probabilities of 4 classes with 15% of labels flipped."""
    filters = pytest.importorskip("cleanlab.filter")
    random = np.random.default_rng(seed)
    truth = random.integers(0, 4, 400)
    scores = random.normal(0, 1, (400, 4)) + 3 * np.eye(4)[truth]
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    labels = np.where(random.random(400) < 0.15, random.integers(0, 4, 400), truth)
    theirs = filters.find_label_issues(labels, probabilities, return_indices_ranked_by="self_confidence", n_jobs=1)
    assert confident_learning(probabilities, labels).tolist() == theirs.tolist()


def test_many_disagreements_are_called_weak_features(tmp_path: Path, command, monkeypatch) -> None:
    """Labels that no feature explains: half of them look wrong, and nobody should apply that unread."""
    random = np.random.default_rng(0)
    np.savez(tmp_path / "noise.npz", x=random.integers(0, 256, (60, 8, 8, 3), dtype=np.uint8), y=np.arange(60) % 2)
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("data", "clean", "noise.npz")
    assert code == 1
    assert "more likely the features are too weak" in out
    assert "vitkit index DATA --model CHECKPOINT" in out
    assert "Next: delete the rows of cleaned/issues.csv that you disagree with" in " ".join(out.split())
    assert "too weak" in (tmp_path / "cleaned" / "report.html").read_text(encoding="utf-8")


def test_labels_of_one_class_are_not_checked(tmp_path: Path, planted: Path) -> None:
    found = build_index(planted / "train" / "a", out=tmp_path / "i")
    with pytest.raises(DataError, match="need one class per image"):
        found.label_errors()


def test_nearest_is_brute_force() -> None:
    random = np.random.default_rng(0)
    base, queries = (random.normal(size=(n, 12)).astype(np.float32) for n in (70_000, 300))
    rows, scores = nearest(base, queries, 7, "exact")
    every = queries @ base.T
    np.testing.assert_array_equal(rows, np.argsort(-every, axis=1, kind="stable")[:, :7])
    np.testing.assert_allclose(scores, np.take_along_axis(every, rows, axis=1), rtol=1e-5)
    assert nearest(base[:3], queries, 7)[0].shape == (300, 3)
    with pytest.raises(ConfigError, match="must be one of auto, exact, faiss"):
        nearest(base, queries, 7, "quick")


def test_faiss_finds_the_same() -> None:
    pytest.importorskip("faiss")
    random = np.random.default_rng(0)
    base, queries = (random.normal(size=(n, 12)).astype(np.float32) for n in (5000, 50))
    exact, quick = (nearest(base, queries, 10, engine)[0] for engine in ("exact", "faiss"))
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact, quick, strict=True)]) >= 0.99


def test_search_finds_an_image_and_its_part(planted: Path, tmp_path: Path, command) -> None:
    found = build_index(planted, out=tmp_path / "i")
    image = next(planted.rglob("coffee.jpg"))
    hits = found.search(image, top=2)
    assert hits[0].path == str(image)
    assert hits[0].score == pytest.approx(1, abs=1e-3)
    assert found.search(image, 1, box=(20, 20, 560, 380))[0].path.split("/")[-1].startswith("coffee")
    code, _, err = command("search", tmp_path / "i", image, "--box", "0,0,9999,10")
    assert code == 2
    assert "must be LEFT,TOP,RIGHT,BOTTOM within the image of 600x400" in err
    for suffix in ("png", "json", "csv"):
        assert command("search", tmp_path / "i", image, "--out", tmp_path / f"s.{suffix}")[0] == 0
    assert Image.open(tmp_path / "s.png").width > 800
    code, _, err = command("search", tmp_path / "i", image, "--out", tmp_path / "s.txt")
    assert code == 2
    assert "must end with .png, .json, .csv" in err


def test_suggested_images_are_one_of_each_cluster() -> None:
    """Five clusters in space, five images wanted: one of each, the largest cluster first."""
    random = np.random.default_rng(0)
    sizes = (40, 30, 20, 10, 8)
    points = np.concatenate([random.normal(0, 0.1, (n, 16)) + 3 * np.eye(16)[c] for c, n in enumerate(sizes)])
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    cluster = np.repeat(np.arange(5), sizes)
    assert cluster[suggest(points, 5)].tolist() == [0, 1, 2, 3, 4]
    assert len(set(suggest(points, 50).tolist())) == 50
    with pytest.raises(ConfigError, match="must be from 1 to the 108 images"):
        suggest(points, 200)


def test_training_warns_of_leaks_that_the_index_knows(planted: Path, tmp_path: Path, command, monkeypatch) -> None:
    from vitkit.curation.leaks import leak_warning

    monkeypatch.chdir(tmp_path)
    assert leak_warning(str(planted)) == ""
    command("data", "clean", planted, "--out", "report")
    assert "images that are evaluated show what train shows" in leak_warning(str(planted))


def test_a_leak_stays_in_one_split_only(planted: Path, tmp_path: Path) -> None:
    """In val and test it is to leave val; in all three, train and val."""
    rows = [f"{path},a,{split}" for path in planted.rglob("moon.jpg") for split in ("train", "val", "test")]
    rows += [f"{path},b,{split}" for path in planted.rglob("coins.jpg") for split in ("val", "test")]
    rows += [f"{path},{'ab'[n]},train" for n in (0, 1) for path in sorted(planted.rglob(f"{NAMES[n]}.jpg"))]
    (tmp_path / "set.csv").write_text("path,label,split\n" + "\n".join(rows) + "\n")
    found = build_index(tmp_path / "set.csv", out=tmp_path / "i")
    leaks = [issue for issue in clean(found, found.looks()).issues if issue.issue == "leak"]
    kept = sorted((Path(issue.path).stem, issue.split) for issue in leaks if not issue.suggestion)
    assert (len(leaks), kept) == (5, [("coins", "test"), ("moon", "test")])


@pytest.mark.parametrize("separator", [";", "\t", ","])
def test_a_list_that_a_spreadsheet_saved_is_read(separator: str, planted: Path, tmp_path: Path) -> None:
    path = next(planted.rglob("moon.jpg"))
    lines = [
        [*COLUMNS, "action"],
        [str(path), "outlier", "train", "a", " drop", "0,5" * (separator != ","), "", "Accept "],
    ]
    text = "\r\n".join(separator.join(cells) for cells in lines) + "\r\n"
    (tmp_path / "issues.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert apply(tmp_path / "issues.csv", tmp_path / "new.csv", str(planted)).dropped == 1
    assert read_issues(tmp_path / "issues.csv")[0]["path"] == str(path)  # for the page


def test_a_row_of_a_wrong_label_may_leave_its_image_out(planted: Path, tmp_path: Path) -> None:
    text = f"path,issue,suggestion\n{next(planted.rglob('moon.jpg'))},label,drop\n"
    (tmp_path / "issues.csv").write_text(text)
    assert apply(tmp_path / "issues.csv", tmp_path / "new.csv", str(planted)) == Applied(13, 1, 0)


def test_a_set_is_the_same_from_every_folder(planted: Path, tmp_path: Path, command, monkeypatch) -> None:
    """However its path is written, for cleaning, searching, applying and evaluating."""
    (tmp_path / "my set").symlink_to(planted)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command("index", "my set", "--out", "my index")[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, err = command("data", "clean", "../my set", "--index", "../my index", "--out", "my report")
    assert (code, err) == (1, "")
    assert "vitkit data apply 'my report/issues.csv' --to new.csv" in out
    assert command("search", "../my index", next(planted.rglob("moon.jpg")), "--out", "sheet.png")[0] == 0
    monkeypatch.chdir(tmp_path)
    assert command("data", "apply", "elsewhere/my report/issues.csv", "--to", "new.csv")[0] == 0
    code, _, err = command("data", "clean", tmp_path / "elsewhere", "--index", "my index")
    assert code == 2


def test_what_was_seen_of_images_stays_while_the_set_does(planted: Path, tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command("data", "clean", planted)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "photos.index").rglob("*.*")}
    assert any("looks" in path.parts for path in before)
    assert command("index", planted)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "photos.index").rglob("*.*")} == before


def test_one_odd_image_of_a_small_set_is_junk(planted: Path, tmp_path: Path) -> None:
    """A share of 7% is one image: no nature of the set."""
    shutil.copytree(planted, tmp_path / "set")
    Image.new("RGB", (900, 30)).save(tmp_path / "set" / "train" / "a" / "wide.png")
    found = build_index(tmp_path / "set", out=tmp_path / "i")
    junk = [issue for issue in clean(found, found.looks()).issues if issue.group == "extreme shape"]
    assert [Path(issue.path).name for issue in junk] == ["wide.png"]
