"""Long jobs: the same rows in every format, on any number of processes, after any kill, in constant memory."""

import csv
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
from peers import randomize
from vitkit.model.config import ViTConfig
from vitkit.prediction import Opened, open_inputs, stream
from vitkit.runtime import open_runtime

CONFIG = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_width=16, classes=3)
NAMES = ("ant, small", 'bee "b"', "cow")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and 41 images in nested folders, one of them broken, one with an awkward name."""
    folder = tmp_path_factory.mktemp("stage")
    torch.manual_seed(0)
    vitkit.save(randomize(vitkit.create(CONFIG), scale=0.5), folder / "model.safetensors", class_names=NAMES)
    random = np.random.default_rng(0)
    for i in range(40):
        path = folder / "photos" / f"{i % 3}" / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (20, 18 + i % 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path.with_name('a, "b".png') if i == 7 else path)
    (folder / "photos" / "2" / "broken.jpg").write_bytes(b"no image")
    return folder


def read_csv(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{k: v or None for k, v in row.items()} for row in csv.DictReader(file)]
    return [{k: float(v) if v and k.startswith("prob") else v for k, v in row.items()} for row in rows]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_format_holds_the_same(command, stage: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    outs = {s: tmp_path / f"out{s}" for s in (".csv", ".jsonl", ".parquet")}
    for out in outs.values():
        code, text, err = command(
            "predict", stage / "model.safetensors", stage / "photos", "--top", 2, "--out", out, "--batch-size", 3
        )
        assert (code, err) == (0, "")
        assert "41 images" in text
        assert "broken.jpg: not an image" in text
    rows = read_jsonl(outs[".jsonl"])
    assert read_csv(outs[".csv"]) == rows
    assert pq.read_table(outs[".parquet"]).to_pylist() == rows
    written = [name for out in outs.values() for name in (out.name, f"{out.name}.job.json")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(written)
    assert list(rows[0]) == ["path", "class", "probability", "class_2", "probability_2", "error"]
    assert [r["path"] for r in rows] == sorted(r["path"] for r in rows)
    (bad,) = [r for r in rows if r["error"]]
    assert (Path(bad["path"]).name, bad["class"], bad["probability"]) == ("broken.jpg", None, None)


def test_rows_are_what_the_model_says(stage: Path) -> None:
    from vitkit.data import normalise, prepare, to_tensor

    model = vitkit.load(stage / "model.safetensors")
    source = open_inputs([str(stage / "photos")])
    opened = Opened(model.config, model.outputs, open_runtime(model, "eager"), "", top=9)
    for row in stream(opened, source, batch_size=4):
        if row["error"] is None:
            image = to_tensor(prepare(Image.open(row["path"]), model.config.preprocessing))[None]
            p = model.eval()(normalise(image, model.config.preprocessing)).softmax(-1)[0].detach()
            order = p.argsort(descending=True).tolist()
            assert [row["class"], row["class_2"], row["class_3"]] == [NAMES[i] for i in order]
            assert row["probability"] == pytest.approx(float(p.max()), abs=2e-6)  # rounded to six digits


def test_printed_and_json(command, stage: Path) -> None:
    model, one = stage / "model.safetensors", stage / "photos" / "0" / "00.png"
    code, text, _ = command("predict", model, one, "--top", 1)
    assert code == 0
    assert text.startswith(f"{one}: ")
    assert text.rstrip().endswith("%")
    code, text, _ = command("predict", model, one, stage / "photos" / "2" / "broken.jpg", "--json")
    answer = json.loads(text)
    assert (code, len(answer["predictions"]), answer["runtime"]) == (0, 2, "eager")
    assert "not an image" in answer["predictions"][1]["error"]


def test_a_stopped_job_resumes_and_gives_the_same_file(command, stage: Path, tmp_path: Path, monkeypatch) -> None:
    args = ("predict", stage / "model.safetensors", stage / "photos", "--batch-size", 3)
    assert command(*args, "--out", tmp_path / "whole.csv")[0] == 0
    seen = []

    def stop(self: Opened, images: torch.Tensor) -> object:
        seen.append(len(images))
        if len(seen) == 7:
            raise KeyboardInterrupt
        return before(self, images)

    before = Opened.__call__
    out = tmp_path / "again.csv"
    with monkeypatch.context() as patched:
        patched.setattr(Opened, "__call__", stop)
        assert command(*args, "--out", out)[0] == 130
    assert not out.exists()
    assert len(list((tmp_path / "again.csv.parts").glob("*.jsonl"))) == 1  # four batches are one piece
    assert "--resume" in command(*args, "--out", out)[2]
    code, _, err = command(*args, "--out", out, "--resume", "--top", 1)
    assert (code, "top (5 before, 1 now)" in err) == (2, True)
    seen.clear()
    monkeypatch.setattr(Opened, "__call__", lambda self, images: seen.append(len(images)) or before(self, images))
    assert command(*args, "--out", out, "--resume")[0] == 0
    assert sum(seen) == 40 - 12
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not (tmp_path / "again.csv.parts").exists()
    assert "finished already" in command(*args, "--out", out, "--resume")[1]
    assert "exists already" in command(*args, "--out", out)[2]
    assert command(*args, "--out", out, "--force")[0] == 0


def small_images(path: Path, count: int) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(count) % 3)
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.mark.slow
def test_killed_for_real_and_resumed(stage: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of 10,000 small images, then --resume: the same bytes as without the kill."""
    data, out = small_images(tmp_path / "small.npz", 10_000), tmp_path / "preds.jsonl"
    args = [
        sys.executable,
        "-m",
        "vitkit",
        "predict",
        str(stage / "model.safetensors"),
        str(data),
        "--batch-size",
        "64",
    ]
    subprocess.run([*args, "--out", str(tmp_path / "whole.jsonl")], check=True, env=environment(), capture_output=True)
    process = subprocess.Popen([*args, "--out", str(out)], env=environment(), stdout=subprocess.DEVNULL)
    parts = tmp_path / "preds.jsonl.parts"
    while len(list(parts.glob("*.jsonl")) if parts.exists() else []) < 3 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was finished before it could be killed"
    assert not out.exists()
    subprocess.run([*args, "--out", str(out), "--resume"], check=True, env=environment(), capture_output=True)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(out.read_bytes().splitlines()) == 10_000


@pytest.mark.slow
def test_two_processes_share_a_job(stage: Path, tmp_path: Path) -> None:
    model, photos = str(stage / "model.safetensors"), str(stage / "photos")
    rest = ["predict", model, photos, "--batch-size", "2"]
    alone, shared = tmp_path / "alone.csv", tmp_path / "shared.csv"
    subprocess.run([sys.executable, "-m", "vitkit", *rest, "--out", str(alone)], check=True, env=environment())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "-m", "vitkit", *rest, "--out", str(shared)], check=True, env=environment(), capture_output=True
    )
    assert shared.read_bytes() == alone.read_bytes()


def test_memory_does_not_grow_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are never all in memory: 2,400 images more need hardly more. Measured by what Python allocates.

    One thread reads: Pillow asks for a megabyte for each file that is open, and chance would say how many are.
    """
    import tracemalloc

    from vitkit.data.source import Names, Source
    from vitkit.prediction import run_job

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    torch.manual_seed(0)
    model = randomize(vitkit.create(CONFIG), scale=0.5)
    image = tmp_path / "one.png"
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(image)
    peaks = []
    for count in (32, 800, 3200):  # the first one imports and caches
        names = Names([str(image)] * count)
        source = Source("many", "all", {"all": count}, ("",), np.zeros(count, dtype=np.int64), names)
        opened = Opened(model.config, model.outputs, open_runtime(model, "eager"), "", top=3)
        tracemalloc.start()
        run_job(opened, source, tmp_path / f"{count}.csv", batch_size=16)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + 600_000  # a row kept would take 300 bytes or more, 720,000 in all


@pytest.mark.parametrize("features", ["cls", "mean", "tokens"])
def test_features_are_those_of_the_model(command, stage: Path, tmp_path: Path, features: str) -> None:
    from vitkit.data import ImageBatches, normalise

    pq = pytest.importorskip("pyarrow.parquet")
    model, photos = vitkit.load(stage / "model.safetensors"), stage / "photos" / "1"
    args = ("embed", stage / "model.safetensors", photos, "--features", features, "--batch-size", 4)
    for suffix in ("npz", "parquet", "jsonl"):
        assert command(*args, "--out", tmp_path / f"f.{suffix}")[0] == 0
    (read,) = ImageBatches(open_inputs([str(photos)]), model.config).batches([range(13)])
    with torch.inference_mode():
        tokens = model.tokens(normalise(read.images, model.config.preprocessing))
    expected = {"cls": tokens[:, 0], "mean": tokens[:, 1:].mean(1), "tokens": tokens[:, 1:]}[features].numpy()
    found = np.load(tmp_path / "f.npz")
    np.testing.assert_allclose(found["features"], expected, atol=1e-5)  # other batches, other order of sums
    rows = pq.read_table(tmp_path / "f.parquet").to_pylist()
    np.testing.assert_array_equal(np.array([r["features"] for r in rows], dtype=np.float32), found["features"])
    assert [r["path"] for r in rows] == found["paths"].tolist()
    lines = read_jsonl(tmp_path / "f.jsonl")
    np.testing.assert_array_equal(np.array([r["features"] for r in lines], dtype=np.float32), found["features"])
    code, _, err = command(*args, "--out", tmp_path / "f.csv")
    assert code == (2 if features == "tokens" else 0), err
    assert not (tmp_path / "f.csv.parts").exists(), "refused before the work"


def test_what_is_said_when_something_does_not_fit(command, stage: Path, tmp_path: Path) -> None:
    model, photos = stage / "model.safetensors", stage / "photos"
    for args, words in (
        (("predict", model, "nowhere.jpg"), "no file or folder"),
        (("predict", model, photos, "--out", tmp_path / "p.txt"), "must end with .csv, .jsonl or .parquet"),
        (("predict", model, photos, "--out", tmp_path), "must end with"),
        (("predict", model, photos, "--resume"), "--resume needs --out"),
        (("predict", model, photos, "--runtime", "onxx"), "Did you mean onnx"),
        (("predict", "nothing.safetensors", photos), "neither an existing path nor a known model"),
        (("embed", model, photos, "--features", "clss", "--out", tmp_path / "f.npz"), "Did you mean cls"),
    ):
        code, _, err = command(*args)
        assert code == 2
        assert words in err
        assert "Traceback" not in err


def test_features_of_a_labelled_set_come_with_labels_and_splits(tmp_path: Path, command) -> None:
    import pyarrow.parquet as pq

    vitkit.save(vitkit.create("mu", classes=2, channels=1), tmp_path / "m.safetensors")
    code, _, err = command("embed", tmp_path / "m.safetensors", "digits", "--out", tmp_path / "f.parquet")
    assert code == 0, err
    table = pq.read_table(tmp_path / "f.parquet").to_pydict()
    data = vitkit.open_data("digits")
    whole = data.split("all")
    assert list(table)[:3] == ["path", "label", "split"]
    assert table["label"] == [whole.label_name(i) for i in range(len(whole))]
    assert table["split"] == [name for name, count in data.splits.items() for _ in range(count)]
    words = ("embed", tmp_path / "m.safetensors", "digits", "--split", "val", "--out", tmp_path / "f.npz")
    assert command(*words)[0] == 0
    arrays = np.load(tmp_path / "f.npz")
    assert set(arrays["splits"]) == {"val"}
    assert len(arrays["labels"]) == len(arrays["features"]) == data.splits["val"]
