"""Tables with images in, tables with predictions out: every way a cell may hold an image, and Spark's generator."""

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vitkit
from peers import randomize
from vitkit.errors import ConfigError, DataError, MissingPackage
from vitkit.model.config import ViTConfig
from vitkit.prediction import open_inputs, open_model, run_job
from vitkit.prediction.columns import ColumnPredictor

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=3)
NAMES = ("ant", "bee `b`", "cow")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.5), folder / "model.safetensors", class_names=NAMES)
    random = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for i in range(30):
        Image.fromarray(random.integers(0, 256, (20, 22, 3), dtype=np.uint8)).save(folder / "photos" / f"{i:02d}.png")
    (folder / "photos" / "30.png").write_bytes(b"no image")
    return folder


def plain(stage: Path, **how: object) -> list[dict]:
    """What the plain job says, by the name of the file."""
    opened = open_model(str(stage / "model.safetensors"), **how)  # type: ignore[arg-type]
    out = stage / f"plain-{len(how)}.jsonl"
    run_job(opened, open_inputs(str(stage / "photos")), out.with_suffix(".parquet"), 64, force=True)
    return pq.read_table(out.with_suffix(".parquet")).to_pylist()


def test_every_kind_of_cell_says_the_same(stage: Path) -> None:
    expected = plain(stage)
    paths = [row["path"] for row in expected]
    contents = [Path(p).read_bytes() for p in paths]
    pixels = [np.array(Image.open(p)) for p in paths[:30]]
    cells: dict[str, dict[str, list]] = {
        "paths": {"path": paths},
        "uris": {"path": [f"file://{p}" for p in paths]},
        "bytes": {"bytes": contents, "path": paths},
        "as Spark reads files": {"content": contents, "path": paths, "length": [1] * 31},
        "structs": {"image": [{"bytes": c, "path": None} for c in contents], "path": paths},
        "pixels": {"image": pixels, "path": paths[:30]},
        "lists": {"image": [p.tolist() for p in pixels[:3]], "path": paths[:3]},
    }
    predictor = ColumnPredictor(str(stage / "model.safetensors"), batch_size=64)
    for name, columns in cells.items():
        rows = predictor.table(columns).to_pylist()
        assert len(rows) == len(next(iter(columns.values())))
        for row, wanted in zip(rows, expected, strict=False):
            assert (row["path"], row["class"]) == (wanted["path"], wanted["class"]), name
            assert row["probability"] == pytest.approx(wanted["probability"], abs=2e-6), name  # other batches
            assert (row["error"] is None) == (wanted["error"] is None)


def test_cells_that_hold_nothing_have_a_reason(stage: Path) -> None:
    predictor = ColumnPredictor(str(stage / "model.safetensors"), keep=["id"])
    cells = [None, float("nan"), b"", np.full((4, 4, 3), -1.0), str(stage / "nowhere.png")]
    rows = predictor.table({"image": cells, "id": list(range(5))}).to_pylist()
    assert [row["id"] for row in rows] == list(range(5))
    assert list(rows[0])[:2] == ["id", "path"]
    assert all(row["error"] and row["class"] is None for row in rows)
    assert "holds no image" in rows[0]["error"]
    assert predictor.table({"image": [], "id": []}).num_rows == 0


def test_what_does_not_fit_is_said(stage: Path) -> None:
    model = str(stage / "model.safetensors")
    with pytest.raises(ConfigError, match="no column image, bytes, content, path"):
        ColumnPredictor(model).table({"picture": [b""]})
    with pytest.raises(ConfigError, match="rename yours"):
        ColumnPredictor(model, keep=["class"])
    with pytest.raises(ConfigError, match="no column 'id' to keep"):
        ColumnPredictor(model, keep=["id"]).table({"path": ["x.png"]})


@pytest.mark.parametrize("features", ["cls", "tokens"])
def test_features_are_those_of_embed(stage: Path, features: str) -> None:
    expected = plain(stage, features=features)
    found = ColumnPredictor(str(stage / "model.safetensors"), features=features, batch_size=64)
    rows = found.table({"path": [row["path"] for row in expected]}).to_pylist()
    for row, wanted in zip(rows, expected, strict=True):
        if wanted["error"] is None:
            np.testing.assert_allclose(row["features"], wanted["features"], atol=1e-5)


# --- Spark -------------------------------------------------------------------------------------------


def test_sparks_generator_over_frames(stage: Path) -> None:
    expected = plain(stage)
    frame = pd.DataFrame({"path": [row["path"] for row in expected], "id": range(31)})
    predict = vitkit.spark.predictor(str(stage / "model.safetensors"), keep={"id": "long"}, top=2)
    found = pd.concat(predict(iter([frame[:10], frame[10:10], frame[10:]])), ignore_index=True)
    assert found["id"].tolist() == list(range(31))
    assert found["class"][:30].tolist() == [row["class"] for row in expected[:30]]
    assert "not an image" in found["error"][30]
    words = vitkit.spark.schema(str(stage / "model.safetensors"), keep={"id": "long"}, top=2)
    assert words == (
        "`id` long, `path` string, `class` string, `probability` double, "
        "`class_2` string, `probability_2` double, `error` string"
    )
    assert [name.split()[0].strip("`") for name in words.split(", ")] == list(found.columns)
    tokens = vitkit.spark.schema(str(stage / "model.safetensors"), features="tokens")
    assert tokens == "`path` string, `features` array<array<float>>, `error` string"


@pytest.mark.slow
def test_with_a_real_spark(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = pytest.importorskip("pyspark.sql")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    expected = {Path(row["path"]).name: row for row in plain(stage)}
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = (
        builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
    )
    try:
        model = str(stage / "model.safetensors")
        files = spark.read.format("binaryFile").load(str(stage / "photos"))
        found = files.mapInPandas(vitkit.spark.predictor(model), schema=vitkit.spark.schema(model)).collect()
    finally:
        spark.stop()
    assert len(found) == 31
    for row in found:
        wanted = expected[Path(row["path"]).name]
        assert row["class"] == wanted["class"]
        assert (row["error"] is None) == (wanted["error"] is None)


# --- a folder of parts -------------------------------------------------------------------------------


def test_a_folder_of_parts_holds_the_rows_of_the_file(stage: Path, tmp_path: Path, monkeypatch) -> None:
    import json

    monkeypatch.setattr("vitkit.prediction.parts._ROWS", 12)
    source, out = open_inputs(str(stage / "photos")), tmp_path / "rows"
    for features in (None, "cls"):
        opened = open_model(str(stage / "model.safetensors"), features=features)
        run_job(opened, source, tmp_path / "whole.parquet", 2, force=True)
        run_job(opened, source, out, 2, force=True)
        assert pq.read_table(out).equals(pq.read_table(tmp_path / "whole.parquet"))
        manifest = json.loads((out / "_manifest.json").read_text())
        assert [part["rows"] for part in manifest["parts"]] == [8, 8, 8, 7]  # whole pieces of 8 rows
        assert sorted(p.name for p in out.glob("part*")) == [part["name"] for part in manifest["parts"]]
    opened = open_model(str(stage / "model.safetensors"), features="cls")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    run_job(opened, source, out, 2, force=True)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before, "the same job, the same files"
    assert run_job(opened, source, out, 2, resume=True).images == 0
    (out / "_manifest.json").write_text("{}")
    with pytest.raises(DataError, match="was changed after it was written"):
        run_job(opened, source, out, 2, resume=True)


def test_a_folder_of_somebody_is_never_replaced(command, stage: Path) -> None:
    code, _, err = command(
        "predict", stage / "model.safetensors", stage / "photos", "--out", stage / "photos", "--force"
    )
    assert (code, "is no folder of results" in err) == (2, True)
    assert len(list((stage / "photos").iterdir())) == 31


# --- engines, without one ----------------------------------------------------------------------------


def test_sources_and_models_travel(stage: Path, tmp_path: Path) -> None:
    """What goes to the workers of an engine: every kind of source, and how to open the model."""
    np.savez(tmp_path / "x.npz", images=np.zeros((4, 8, 8, 3), np.uint8), labels=np.arange(4) % 2)
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "png")
    for given in (str(stage / "photos"), str(tmp_path / "x.npz"), "digits", [content.getvalue()]):
        source = pickle.loads(pickle.dumps(open_inputs(given)))
        assert source.pixels_of(0, CONFIG.preprocessing, 3).shape == (3, 16, 16)


def test_options_of_engines_are_checked(command, stage: Path, tmp_path: Path) -> None:
    model, photos = stage / "model.safetensors", stage / "photos"
    for args, words in (
        (("predict", model, photos, "--engine", "ray"), "--engine needs --out"),
        (("predict", model, photos, "--out", tmp_path / "x.csv", "--engine", "rya"), "take ray"),
        (("embed", model, photos, "--out", tmp_path / "x.npz", "--processes", 2), "--processes needs --engine"),
        (("train", photos, "--out", tmp_path / "run", "--engine", "spark"), "there is no engine 'spark'"),
    ):
        code, _, err = command(*args)
        assert code == 2
        assert words in err


def test_without_ray_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "vitkit.ray" or name.startswith("vitkit.ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(vitkit), "ray", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'vitkit\[ray\]'"):
        vitkit.ray.Predictor  # noqa: B018
