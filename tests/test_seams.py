"""What varies is a row in a table: CONTRIBUTING says how to add one of each kind, and a test adds a toy one.

The tests stand beside the code they belong to; this is their list. A kind is complete when its section has at most
five lines and names its table, the table is there, and its test is there and runs.
"""

import ast
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import vitkit
from vitkit.data import Dataset
from vitkit.data.dataset import Options
from vitkit.data.sources import SOURCES
from vitkit.data.sources.arrays import from_arrays
from vitkit.progress import Progress

ROOT = Path(__file__).parents[1]


class Seam(NamedTuple):
    table: str  # module:NAME
    test: str  # file::function, which registers a toy in at most two places


SEAMS = {
    "A position encoding": Seam(
        "vitkit.model.positions:POSITIONS", "model/test_tables.py::test_a_new_position_encoding_is_a_class_and_two_rows"
    ),
    "A checkpoint family": Seam(
        "vitkit.checkpoints.families:FAMILIES", "checkpoints/test_family_table.py::test_a_family_is_added_by_one_row"
    ),
    "A data source": Seam("vitkit.data.sources:SOURCES", "test_seams.py::test_a_data_source_is_a_module_and_a_row"),
    "An optimiser": Seam("vitkit.training.optim:OPTIMIZERS", "tasks/test_add_one.py::test_an_optimiser"),
    "A task": Seam("vitkit.tasks.table:TASKS", "tasks/test_add_one.py::test_a_task"),
    "A runtime": Seam(
        "vitkit.runtime.table:RUNTIMES",
        "runtime/test_runtime_tables.py::test_a_toy_runtime_states_its_device_and_gets_its_images_there",
    ),
    "An export format": Seam(
        "vitkit.runtime.table:FORMATS",
        "runtime/test_runtime_tables.py::test_a_toy_format_is_written_compared_and_predicted_with",
    ),
    "A figure of `explain`": Seam(
        "vitkit.explanation.table:FIGURES", "explanation/test_report.py::test_a_figure_is_one_file_and_one_row"
    ),
    "A study": Seam(
        "vitkit.study.studies:STUDIES", "study/test_study_miniature.py::test_a_study_is_one_class_and_one_row"
    ),
    "An API route": Seam("vitkit.web.api:ROUTES", "web/test_http_api.py::test_a_route_is_one_function_and_one_row"),
}


def sections() -> dict[str, str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^### (.*?)\n\n(.*?)(?=\n#)", text, re.M | re.S))


def test_every_kind_has_a_section() -> None:
    assert sections().keys() == SEAMS.keys()


@pytest.mark.parametrize("kind", SEAMS)
def test_a_section_has_five_lines_and_names_the_table(kind: str) -> None:
    module, _, name = SEAMS[kind].table.partition(":")
    text = sections()[kind].strip()
    assert len(text.splitlines()) <= 5
    assert f"`{name}`" in text
    assert len(getattr(importlib.import_module(module), name)) > 1
    for path in re.findall(r"`([a-z_/]+\.py)`", text):
        assert (ROOT / "src" / "vitkit" / path).is_file(), f"{path} is not there"


@pytest.mark.parametrize("kind", SEAMS)
def test_a_test_adds_a_toy(kind: str) -> None:
    file, _, name = SEAMS[kind].test.partition("::")
    functions = {
        n.name: n for n in ast.parse((ROOT / "tests" / file).read_text()).body if isinstance(n, ast.FunctionDef)
    }
    marks = [ast.unparse(mark) for mark in functions[name].decorator_list]
    assert not any("skip" in mark or "xfail" in mark for mark in marks)


class Noise:
    """A toy source: "noise:40" is so many images of two classes, one darker than the other."""

    def matches(self, data: str) -> bool:
        return data.startswith("noise:")

    def open(self, data: str, options: Options, progress: Progress) -> Dataset:
        options.allow(data)
        labels = np.arange(int(data.partition(":")[2])) % 2
        pixels = np.random.default_rng(0).integers(0, 128, (len(labels), 1, 8, 8)) + 127 * labels[:, None, None, None]
        return from_arrays(data, {"all": (pixels.astype(np.uint8), labels)}, classes=("dark", "bright"))


def test_a_data_source_is_a_module_and_a_row(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file or folder 'noise:60'" in command("data", "check", "noise:60")[2]
    monkeypatch.setitem(SOURCES, "noise", Noise())
    data = vitkit.open_data("noise:60")
    assert data.classes == ("dark", "bright")
    assert set(data.splits) == {"train", "val", "test"}
    assert "bright" in command("data", "check", "noise:60")[1]
    run = vitkit.train("noise:60", steps=2, model="mu", out=tmp_path / "run", evaluations=1)
    assert vitkit.evaluate(run.out, data).samples == data.splits["test"]
