"""One image in every form that Python has gives one answer; what is no image is refused with the reason."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import vitkit
from peers import randomize
from vitkit.storage import remote


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(1)
    for i in range(3):  # PNG keeps every bit, so that a file and its pixels are the same image
        Image.fromarray(random.integers(0, 255, (50, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def model() -> vitkit.VisionModel:
    torch.manual_seed(0)
    model = randomize(vitkit.create("mu", classes=3))
    model.class_names = ("cat", "dog", "<b>owl</b>")
    return model.eval()


@pytest.fixture
def url(photos: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(photos))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_form_of_an_image_gives_the_same_answer(model: vitkit.VisionModel, photos: Path, url: str) -> None:
    path = photos / "0.png"
    image = Image.open(path)
    array = np.array(image)
    forms = [
        str(path),
        f"{url}/0.png",
        path.read_bytes(),
        image,
        array,
        array / 255.0,
        array.astype(np.uint16) * 257,
        torch.from_numpy(array).permute(2, 0, 1),
        (torch.from_numpy(array).permute(2, 0, 1) / 255).float(),
    ]
    expected = model.predict(path)
    assert isinstance(expected, vitkit.Prediction)
    for form in forms:
        found = model.predict(form)
        assert isinstance(found, vitkit.Prediction), type(form)
        assert np.array_equal(found.probabilities, expected.probabilities), type(form)
        assert np.array_equal(model.embed(form), model.embed(path)), type(form)


class Stumbling(http.server.SimpleHTTPRequestHandler):
    """Fails as a script says, then serves the file: a status, or "short" for half of the body."""

    script: list[int | str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        fault = self.script.pop(0) if self.script else None
        if isinstance(fault, int):
            self.send_error(fault)
        elif fault == "short":
            content = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        else:
            super().do_GET()

    def log_message(self, *words: object) -> None:
        pass


def test_an_image_behind_a_url_is_asked_for_again(
    model: vitkit.VisionModel, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.001)
    handler = functools.partial(Stumbling, directory=str(photos))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/0.png"
        monkeypatch.setattr(Stumbling, "script", [500, "short", 503, 429, "short"])
        assert model.predict(url).label == model.predict(photos / "0.png").label
        assert not Stumbling.script
        monkeypatch.setattr(Stumbling, "script", [404, 500])
        assert "404" in str(model.predict([url])[0].error)
        assert Stumbling.script == [500], "what is not there is not asked for again"
        monkeypatch.setattr(Stumbling, "script", ["short"] * 8)
        assert "bytes arrived" in str(model.predict([url])[0].error)
        assert not Stumbling.script
        monkeypatch.setattr(Stumbling, "script", [])
        odd = f"http://127.0.0.1:{server.server_port}/a b\nHost: x.png"  # quoted: it asks for one file, and no more
        assert "404" in str(model.predict([odd])[0].error)
        server.shutdown()


def test_a_turned_pillow_image_is_read_upright(model: vitkit.VisionModel, photos: Path, tmp_path: Path) -> None:
    turned, exif = Image.open(photos / "0.png").transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # lies on its left side: turn it clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    expected = model.predict(photos / "0.png").probabilities
    for form in (tmp_path / "turned.png", Image.open(tmp_path / "turned.png")):
        assert np.array_equal(model.predict(form).probabilities, expected)


def test_several_give_a_list_in_their_order(model: vitkit.VisionModel, photos: Path) -> None:
    paths = [photos / f"{i}.png" for i in range(3)]
    arrays = [np.array(Image.open(path)) for path in paths]
    batch = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
    by_folder = model.predict(photos)
    assert isinstance(by_folder, vitkit.Predictions)
    mixed = [arrays[0], paths[1], Image.open(paths[2])]
    for form in ([str(p) for p in paths], mixed, np.stack(arrays), batch):
        found = model.predict(form)
        # sums of a batch may be taken in another order
        np.testing.assert_allclose([p.probability for p in found], [p.probability for p in by_folder], atol=1e-6)
        assert [p.label for p in found] == [p.label for p in by_folder]
    assert isinstance(model.predict([paths[0]]), vitkit.Predictions)  # a list stays a list
    assert vitkit.predict(model, paths[0])[0].label == by_folder[0].label


def test_a_prediction_in_words_and_as_a_row(model: vitkit.VisionModel, photos: Path) -> None:
    found = model.predict(photos / "0.png", top=2)
    assert found.top(3)[0] == (found.label, found.probability)
    shares = [share for _, share in found.top(3)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert found["class"] == found.label
    assert dict(found)["probability"] == pytest.approx(found.probability, abs=1e-6)
    assert set(found) == {"path", "class", "probability", "class_2", "probability_2", "error"}
    assert found.image.size == (40, 50)
    with pytest.raises(vitkit.VitkitError, match="predicts classes"):
        found.value  # noqa: B018


def test_values_have_names_and_units(photos: Path) -> None:
    model = randomize(vitkit.create("mu", classes=1))
    model.outputs = vitkit.Outputs("values", ("age",), (40.0,), (10.0,))
    found = model.predict(photos / "0.png")
    assert found.value == found.values_by_name["age"] == pytest.approx(found["age"], rel=1e-4)
    with pytest.raises(vitkit.VitkitError, match="predicts values"):
        found.label  # noqa: B018


def test_what_cannot_be_read_says_why(model: vitkit.VisionModel, photos: Path, url: str) -> None:
    found = model.predict([photos / "0.png", b"no image", f"{url}/absent.png"])
    assert [p.error is None for p in found] == [True, False, False]
    assert "known format" in str(found[1].error)
    assert "404" in str(found[2].error)
    with pytest.raises(vitkit.VitkitError, match="cannot be read"):
        found[1].label  # noqa: B018
    assert "unreadable" in repr(found[1])
    for wrong, words in (
        (torch.randn(3, 8, 8), "normalised already"),
        (np.zeros((2, 2, 2, 2, 2)), "is no image"),
        (np.full((4, 4), np.nan), "no pixels"),
        (3.5, "is no image"),
        ([], "no images were named"),
    ):
        with pytest.raises(vitkit.VitkitError, match=words):
            model.predict(wrong)


def test_results_show_themselves_and_names_are_not_obeyed(model: vitkit.VisionModel, photos: Path) -> None:
    found = model.predict(photos / "0.png")
    page = found._repr_html_()
    assert "data:image/png;base64," in page
    assert "<b>owl</b>" not in page
    assert "&lt;b&gt;owl" in page
    both = model.predict(photos)
    assert both._repr_html_().count("<tr>") == 4
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(both)
    assert found.label in console.export_text()
    broken = model.predict([b"no image"])[0]
    assert "unreadable" in broken._repr_html_()


def test_explain_takes_what_predict_takes(model: vitkit.VisionModel, photos: Path, tmp_path: Path) -> None:
    image = Image.open(photos / "0.png")
    reports = [
        vitkit.explain(model, form, only=["attention"], out=tmp_path / str(i))
        for i, form in enumerate((photos / "0.png", image, [np.array(image)]))
    ]
    arrays = [np.load(r.out / "arrays" / "attention.npz") for r in reports]
    for name in arrays[0].files:
        if arrays[0][name].dtype.kind == "f":
            assert np.array_equal(arrays[0][name], arrays[1][name])
            assert np.array_equal(arrays[0][name], arrays[2][name])
    assert "iframe" in reports[1]._repr_html_()
