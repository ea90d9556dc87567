"""The whole report: files, the page, and what happens with bad input."""

import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vitkit.explanation
from peers import randomize
from vitkit.api import explain
from vitkit.cli.main import app
from vitkit.errors import CheckpointError, InputError, MissingPackage
from vitkit.explanation.build import build_report, make, make_subject
from vitkit.explanation.subject import LeftOut, Subject, load_images
from vitkit.explanation.table import FIGURES, Row, choose

pytest.importorskip("matplotlib")
LABELLED = {"confusion", "calibration", "worst"}


class Page(HTMLParser):
    """Collects ids, what is fetched, and images that say what they show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.labels: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        if "id" in values:
            self.ids.append(values["id"])
        for name in ("src", "href", "xlink:href"):
            if name in values and not values[name].startswith(("#", "data:")):
                self.fetched.append(values[name])
        if tag == "svg":
            self.labels.append(values.get("aria-label", ""))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name in ("one", "two"):
        pixels = np.random.default_rng(len(name)).integers(0, 255, (40, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    model = randomize(vitkit.create("mu", image_size=(24, 32), registers=1), scale=0.2)
    images = load_images([photos / "one.png", photos / "two.png", photos / "absent.png"], model.config)
    run = tmp_path_factory.mktemp("run")
    (run / "log.jsonl").write_text("\n".join(json.dumps({"step": i, "loss": 1 / (i + 1), "lr": 0.1}) for i in range(9)))
    names = ["a<b>&c", *(f"n{i}" for i in range(9))]
    subject = Subject("a <model> & its name", model, images, images, names, [0, 3], (1, 2), run, ["a < warning"])
    out = tmp_path_factory.mktemp("out")
    made = build_report(subject, out)
    assert {name for name, _ in made.left_out} == LABELLED
    assert made.page == out / "report.html"
    return out


def test_every_section_has_figure_and_arrays(report: Path) -> None:
    names = {row.name for row in FIGURES} - LABELLED
    assert {p.stem for p in (report / "figures").glob("*.png")} == names
    assert {p.stem for p in (report / "figures").glob("*.svg")} == names
    assert {p.stem for p in (report / "arrays").glob("*.npz")} == names
    for path in (report / "arrays").glob("*.npz"):
        for array in np.load(path).values():
            assert array.size
            assert array.dtype != object
    with Image.open(report / "figures" / "distance.png") as image:
        assert image.text["Description"].startswith("Two charts")  # type: ignore[attr-defined]


def test_the_page_is_one_file_that_fetches_nothing(report: Path) -> None:
    text = (report / "report.html").read_text()
    page = Page(text)
    assert page.fetched == []
    assert "<script" not in text
    assert not re.search(r"url\((?!#)|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    repeated = [name for name, count in Counter(page.ids).items() if count > 1]
    assert repeated == []
    assert len(page.labels) == 12
    assert all(len(label) > 30 for label in page.labels)


def test_names_are_escaped_and_skipped_images_listed(report: Path) -> None:
    text = (report / "report.html").read_text()
    assert "a &lt;model&gt; &amp; its name" in text
    assert "a &lt; warning." in text
    assert "<b>" not in text
    assert "absent.png: there is no such file" in text


def test_colours_of_the_page_reach_the_figures(report: Path) -> None:
    text = (report / "report.html").read_text()
    assert "var(--ink)" in text.split("</style>")[1]
    assert "#1b1f27" not in text.split("</style>")[1]
    assert "#1b1f27" in (report / "figures" / "distance.svg").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "relative", "pooling": "mean", "class_token": False},
        {"positions": "rope-2d", "pooling": "map"},
        {"positions": "none", "distillation_token": True, "classes": 0},
        {"channels": 1, "heads": 1, "depth": 1, "patch_size": 32, "positions": "sincos-2d"},
        {"stem": vitkit.StemConfig((1,), 8, "imagenet")},
    ],
    ids=lambda c: str(next(iter(c.values()))).split("(")[0],
)
def test_odd_models_give_what_can_be_made(changes: dict, photos: Path) -> None:
    model = randomize(vitkit.create("mu", **changes), scale=0.2)
    images = load_images([photos], model.config)
    subject = Subject("odd", model, images, load_images([], model.config))
    left = set()
    for row in FIGURES:
        try:
            section = make(row, subject)
            section.draw()
            assert all(np.asarray(a).size for a in section.arrays.values())
        except LeftOut:
            left.add(row.name)
    expected = {"training"} | LABELLED
    if changes.get("positions") == "none":
        expected |= {"positions", "relevance", "occlusion", "faithfulness"}
    assert left == expected


def test_fresh_weights_are_said_and_what_can_be_made_is_made(tmp_path: Path, photos: Path) -> None:
    made = explain("mu", photos / "one.png", out=tmp_path, only=["filters", "relevance"])
    assert [s.name for s in made.sections] == ["filters"]
    assert made.left_out[0][0] == "relevance"
    assert "all zeros" in made.left_out[0][1]
    assert "fresh and random" in (tmp_path / "report.html").read_text()
    assert set(made.as_json()) == {"report", "warnings", "figures", "left_out"}


def test_without_images_the_weights_are_shown(tmp_path: Path) -> None:
    made = explain("mu", out=tmp_path)
    assert [s.name for s in made.sections] == ["positions", "filters"]
    assert {name for name, _ in made.left_out} == {row.name for row in FIGURES} - {"positions", "filters"}


def test_a_cnn_gets_what_it_has(tmp_path: Path) -> None:
    """Its receptive field and its mistakes; figures of attention are left out, with the reason."""
    model = randomize(vitkit.create("resnet-8px"), scale=0.3)
    report = explain(model, out=tmp_path / "report", data="digits", samples=40)
    made = {section.name for section in report.sections}
    assert made == {"distance", *LABELLED}
    assert all("ResNet has none" in reason for name, reason in report.left_out if name != "training")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "a ResNet with stages of" in page
    assert "Receptive field" in page
    distance = np.load(tmp_path / "report" / "arrays" / "distance.npz")["distance"]
    assert len(distance) == len(model.stem.stages)
    with pytest.raises(InputError, match="ResNet has none"):
        make_subject(model, data="digits", query="0,0")


def test_bad_words_get_a_hint() -> None:
    with pytest.raises(InputError, match="Did you mean relevance"):
        choose(["relevence"])
    with pytest.raises(InputError, match="ROW,COLUMN"):
        make_subject("mu", query="a")
    with pytest.raises(CheckpointError, match="mu"):
        make_subject("muu")


def test_a_class_is_a_name_if_there_is_such_a_name(tmp_path: Path, photos: Path) -> None:
    model = randomize(vitkit.create("mu"), scale=0.2)
    model.class_names = [str(i) for i in range(9, -1, -1)]
    vitkit.save(model, tmp_path / "turned.safetensors")
    source, images = str(tmp_path / "turned.safetensors"), [str(photos / "one.png")]
    assert make_subject(source, images=images, classes=["3", "#3"]).classes == [6, 3]


def test_a_query_outside_the_grid_is_an_error_before_anything_is_drawn(tmp_path: Path, photos: Path) -> None:
    with pytest.raises(InputError, match="rows are 0 to 3"):
        explain("mu", [photos], out=tmp_path, query="9,9", only=["query"])
    assert not list(tmp_path.iterdir())


def test_many_images_are_shown_in_part_and_counted_in_full(photos: Path) -> None:
    subject = make_subject("mu", images=[str(photos)], most=1)
    assert len(subject.images) == 1
    assert len(subject.sample) == 2
    assert any("first 1" in warning for warning in subject.warnings)


def test_matplotlib_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"pip install 'vitkit\[explain\]'"):
        explain("mu", out=tmp_path)


def test_importing_does_not_import_matplotlib() -> None:
    code = "import sys, vitkit.explanation, vitkit.explanation.build; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_figure_is_one_file_and_one_row(tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brightness.py").write_text(
        "import numpy as np\n"
        "from vitkit.explanation.subject import Section\n"
        "from vitkit.figures.style import new_figure\n"
        "def make(subject):\n"
        "    subject.need_images()\n"
        "    mean = subject.images.images.mean(dim=(1, 2, 3)).numpy()\n"
        "    def draw():\n"
        "        figure = new_figure(2.0)\n"
        "        figure.subplots().bar(range(len(mean)), mean)\n"
        "        return figure\n"
        "    finding = f'The mean brightness is {mean.mean():.2f}'\n"
        "    return Section('Brightness', finding, 'Bars.', 'A toy.', {'mean': mean}, draw)\n"
    )
    monkeypatch.setattr("vitkit.explanation.__path__", [*vitkit.explanation.__path__, str(tmp_path)])
    row = Row("brightness", "how bright are the images", "images")
    monkeypatch.setattr("vitkit.explanation.table.FIGURES", (*FIGURES, row))
    made = explain("mu", photos, out=tmp_path / "out", only=["brightness"])
    assert [s.name for s in made.sections] == ["brightness"]
    assert np.load(tmp_path / "out" / "arrays" / "brightness.npz")["mean"].shape == (2,)
    assert "The mean brightness is" in (tmp_path / "out" / "report.html").read_text()
    assert explain("mu", out=tmp_path / "none", only=["brightness"]).left_out[0][0] == "brightness"


def test_every_row_has_its_file_and_every_page_its_row() -> None:
    for row in FIGURES:
        function = f"{row.module}:make_{row.name}" if row.module else f"{row.name}:make"
        assert callable(resolve_name(f"vitkit.explanation.{function}"))
        assert row.part_of in {"", *(other.name for other in FIGURES)}
    docs = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    for row in FIGURES:
        assert f"| `{row.name}` | {row.question} | {row.needs} |".replace("|  |", "| |") in docs


def test_only_a_figure_brings_what_is_part_of_it() -> None:
    assert [row.name for row in choose(["attention"])] == ["attention", "heads"]
    assert [row.name for row in choose(["confusion"])] == ["confusion"]
    assert len(choose(None)) == len(FIGURES)


def test_the_command(tmp_path: Path, photos: Path) -> None:
    arguments = ["explain", "mu", str(photos), "--only", "filters", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "Patch-embedding filters: " in done.output
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert '"name": "filters"' in done.output


def test_a_labelled_set_gives_confusion_and_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    subject = make_subject("vit-8px/2", data="digits", samples=30, classes=["7"])
    assert subject.class_names is not None
    with torch.no_grad():
        subject.model.head.classifier.weight.normal_(std=0.5)  # type: ignore[union-attr]
    made = build_report(subject, tmp_path, only=["training"])
    assert {s.name for s in made.sections} == LABELLED
    assert np.load(tmp_path / "arrays" / "confusion.npz")["confusion"].sum() == 30
