"""The map: as faithful as scikit-learn's t-SNE, the same again, made once, and every thumbnail in its place."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE, trustworthiness

from vitkit.curation import build_index, layout, search
from vitkit.curation.map import COLUMNS, OVERVIEW, SHEET, TILE, _slots, build_map
from vitkit.curation.view import View, open_view, read_issues, vote
from vitkit.errors import ConfigError, DataError, MissingPackage
from vitkit.progress import SILENT


def unit(features: np.ndarray) -> np.ndarray:
    return (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def test_nearest_is_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    features = unit(np.random.default_rng(0).normal(size=(90, 7)))
    monkeypatch.setattr(search, "_QUERIES", 20)  # several blocks
    alike = features @ features.T
    rows, values = search.nearest(features, features, 5)
    assert (rows == np.argsort(-alike, axis=1, kind="stable")[:, :5]).all()
    assert np.allclose(values, np.sort(alike, axis=1)[:, ::-1][:, :5], atol=1e-6)
    others, _ = search.nearest_others(features, 5)
    assert (others == np.argsort(-alike - 9.0 * -np.eye(90), axis=1, kind="stable")[:, :5]).all()
    every, _ = search.nearest(features[:3], features, 10)
    assert (np.sort(every, axis=1) == [0, 1, 2]).all()


def test_repulsion_on_the_mesh_is_that_of_all_pairs() -> None:
    """Within 15%: linear shares on cells of 0.35, where the kernel is 1 wide. Directions agree far better."""
    places = np.random.default_rng(0).normal(0, 8, (500, 2))
    away = places[:, None] - places[None]
    q = 1 / (1 + (away**2).sum(-1))
    exact = -(q[..., None] ** 2 * away).sum(1) / (q.sum() - len(q))
    assert np.allclose(layout._repulsion_of_pairs(places), exact, atol=1e-12)
    found = layout._repulsion(places)
    assert np.linalg.norm(found - exact) < 0.15 * np.linalg.norm(exact)
    assert (found * exact).sum() / np.linalg.norm(found) / np.linalg.norm(exact) > 0.99


@pytest.mark.slow
def test_as_faithful_as_scikit_learn_and_the_same_again() -> None:
    digits = load_digits()
    features = unit(digits.data[:500])
    near, _ = search.nearest_others(features, 15)
    ours = layout.layout(features, near, "tsne", seed=3)
    theirs = TSNE(init="pca", metric="cosine", random_state=0).fit_transform(features)
    kept = [trustworthiness(features, places, n_neighbors=10, metric="cosine") for places in (ours, theirs)]
    assert kept[0] > kept[1] - 0.01, kept  # both 0.98
    assert ours.shape == (500, 2)
    assert ours.dtype == np.float32
    assert (ours.min(), ours.max()) == pytest.approx((0, 1), abs=1e-6)
    assert (layout.layout(features, near, "tsne", seed=3) == ours).all()


def test_more_images_than_landmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are not laid out lie beside their like: of five far groups none is torn."""
    random = np.random.default_rng(0)
    group = random.integers(0, 5, 400)
    features = unit(np.eye(5)[group] + random.normal(0, 0.05, (400, 5)))
    monkeypatch.setattr(layout, "LANDMARKS", 150)
    near, _ = search.nearest_others(features, 15)
    places = layout.layout(features, near, "tsne")
    middles = np.stack([places[group == g].mean(axis=0) for g in range(5)])
    nearest = np.linalg.norm(places[:, None] - middles, axis=-1).argmin(axis=1)
    assert (nearest == group).mean() > 0.98


def test_methods_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    features = unit(np.eye(4))
    with pytest.raises(ConfigError, match="none of auto, umap, tsne"):
        layout.layout(features, np.zeros((4, 1), int), "magic")
    monkeypatch.setitem(__import__("sys").modules, "umap", None)
    with pytest.raises(MissingPackage, match=r"pip install 'vitkit\[map\]'"):
        layout.layout(features, np.zeros((4, 1), int), "umap")
    with pytest.raises(DataError, match="at least two images"):
        search.nearest_others(features[:1], 3)


def test_slots_are_a_permutation_that_begins_everywhere() -> None:
    places = np.random.default_rng(0).random((4000, 2)).astype(np.float32)
    order = _slots(places)
    assert sorted(order) == list(range(4000))
    for quarter in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inside = ((places[order[:OVERVIEW]] >= 0.5) == quarter).all(axis=1)
        assert abs(inside.mean() - 0.25) < 0.1
    spread = [places[order[start : start + SHEET]].std(axis=0).mean() for start in range(OVERVIEW, 4000, SHEET)]
    assert np.mean(spread) < 0.2, "neighbours share a sheet; all together they spread 0.29"


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """30 plain images; the red of number i is 8 i."""
    for i in range(30):
        path = tmp_path / "colours" / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + i, 50), (8 * i, 90, 30 if i % 2 else 200)).save(path)
    return tmp_path / "colours"


def test_a_map_is_made_once_and_thumbnails_are_in_their_slots(colours: Path, tmp_path: Path) -> None:
    index = build_index(colours, out=tmp_path / "i")
    source = index.catalogue().source
    made = build_map(index, source)
    sheet = np.asarray(Image.open(made.sheet(0)))
    for row, path in enumerate(index.paths):
        top, left = (int(n) * TILE for n in divmod(made.slots[row], COLUMNS))
        assert abs(int(sheet[top + 24, left + 24, 0]) - 8 * int(Path(path).stem)) <= 4
    files = {p.name: p.stat().st_mtime_ns for p in made.folder.iterdir()}
    again = build_map(index, source)
    assert {p.name: p.stat().st_mtime_ns for p in made.folder.iterdir()} == files, "nothing is made twice"
    assert (again.places == made.places).all()
    made.sheet(0).unlink()  # as after a kill
    (made.folder / "layout.npy").write_bytes(b"damaged")
    (made.folder / "neighbours.npy").write_bytes(b"")
    whole = build_map(index, source)
    assert (whole.places == made.places).all()
    assert (whole.neighbours == made.neighbours).all()
    assert whole.sheet(0).is_file()


def test_another_index_gets_another_map(colours: Path, tmp_path: Path) -> None:
    first, _ = open_view(build_index(colours, out=tmp_path / "i").path)
    Image.new("RGB", (30, 30), (1, 2, 250)).save(colours / "a" / "new.png")
    with pytest.raises(DataError, match="vitkit index"):
        open_view(tmp_path / "i")
    build_index(colours, out=tmp_path / "i")
    second, _ = open_view(tmp_path / "i")
    assert len(second.map.places) == len(first.map.places) + 1
    assert second.map.folder == first.map.folder


def test_what_neighbours_say() -> None:
    near = np.array([[1, 1, 0], [0, 1, 2], [-1, -1, -1]])
    prediction, loss = vote(near, np.array([0, 2, 1]), classes=3)
    assert prediction.tolist() == [1, 0, -1]
    assert loss[:2] == pytest.approx([-np.log((1 + 1 / 3) / 4)] * 2, rel=1e-6)


def test_columns_and_issues_of_a_view(colours: Path, tmp_path: Path) -> None:
    index = build_index(colours, out=tmp_path / "i")
    made = build_map(index, index.catalogue().source, SILENT)
    rows = [(index.paths[4], "label", "train", "a", "b", "0.9", ""), ("gone.png", "junk", "", "", "", "1", "")]
    view = View(index, made, "colours", tuple(rows))
    about = view.about()
    assert about["columns"] == ["x", "y", "slot", "label", "split", "prediction", "loss", "issue"]
    points = dict(zip(view.columns, view.points(), strict=True))
    assert points["label"].tolist() == index.labels.tolist()
    assert np.flatnonzero(points["issue"] == 0).tolist() == [4]
    assert [row[0] for row in view.issue_table()["rows"]] == [4, -1]  # type: ignore[index, union-attr]
    assert index.paths[0][: about["prefix"]].endswith("colours/")  # type: ignore[index]
    own = view.nearest_to(7, 5)
    alike = np.delete(index.features @ index.features[7], 7)  # some images are equally alike
    assert [found.similarity for found in own] == pytest.approx(np.sort(alike)[::-1][:5].tolist(), abs=1e-4)


def test_a_table_without_the_columns_is_told(tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text("path,kind\na,b\n")
    with pytest.raises(DataError, match="no column issue"):
        read_issues(tmp_path / "wrong.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_issues(tmp_path / "none.csv")
