"""In a real kernel: results show themselves, and long jobs show how far they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.display import in_notebook

CELLS = [
    "import vitkit",
    "run = vitkit.train('photos', model='mu', steps=3, image_size=32, evaluations=1, log_every=1)\nrun",
    "run.model.predict('photos/a/0.png')",
    "vitkit.evaluate(run.model, 'photos', split='all')",
    "vitkit.explain(run.model, 'photos/a/0.png', only=['filters'], out='explained')",
]


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


@pytest.mark.slow
def test_a_notebook_shows_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    random = np.random.default_rng(0)
    for i in range(16):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i // 2}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[o["data"].get("text/html", "") for o in cell.outputs if "data" in o] for cell in book.cells]
    printed = [o for cell in book.cells for o in cell.outputs if o.output_type == "stream"]
    assert not printed, "progress goes into the cell, not into its log"
    progress, run = shown[1]
    assert "data: " in progress, "what was chosen"
    assert "step" in progress
    assert "time" in run
    assert "base64" in run, "the curves"
    assert "probability" in shown[2][-1]
    assert "base64" in shown[2][-1], "the image"
    assert "top-1" in shown[3][-1]
    assert "iframe" in shown[4][-1]
