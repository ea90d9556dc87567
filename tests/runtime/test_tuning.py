"""`vitkit tune` as a long job: equal threads, an estimate, a budget, what a kill leaves behind, and its figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit.figures.tuning import Candidate, draw_tuning
from vitkit.progress import Progress
from vitkit.runtime.base import Choice, build, made_up
from vitkit.runtime.tune import images_needed, tune
from vitkit.runtime.verify import Images
from vitkit.tasks.paired import kept_on

FEW = 0.05  # a drop that two dozen images can show
SMALL = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "heads": 2, "mlp_width": 128}


def small() -> Any:
    torch.manual_seed(0)
    return vitkit.create("vit-ti/16", classes=10, **SMALL).eval()


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


COUNT = """
import os, sys, torch
torch.set_num_threads(1)
import vitkit
from vitkit.runtime.base import Choice, build
def ticks():
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            fields = open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        found[task] = int(fields[11]) + int(fields[12])
    return found
model, images = vitkit.create("vit-ti/16", classes=10, depth=4).eval(), torch.randn(4, 3, 224, 224)
for threads in (None, 1, 2):
    runtime = build(model, Choice(sys.argv[1], threads=threads))
    runtime.run(images)
    before, spent = ticks(), [0]
    while sum(spent) < 60:  # hundredths of a second of CPU
        runtime.run(images)
        spent = [n - before.get(task, 0) for task, n in ticks().items()]
    print(sum(n > 0.15 * sum(spent) for n in spent))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: nobody could use two")
@pytest.mark.parametrize("kind", ["eager", "onnx", "openvino"])
def test_as_many_threads_compute_as_were_asked_for(kind: str) -> None:
    """Counted by the system: which threads of the process have spent CPU time while the model ran."""
    if kind != "eager":
        pytest.importorskip({"onnx": "onnxruntime"}.get(kind, kind))
    done = subprocess.run([sys.executable, "-c", COUNT, kind], capture_output=True, text=True, check=True)
    own, one, two = map(int, done.stdout.split())  # own: as many as PyTorch, which was told to take one
    assert (own, one) == (1, 1)
    assert two <= 2


@pytest.mark.slow
def test_openvino_is_given_the_threads_of_pytorch() -> None:
    pytest.importorskip("openvino")
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runtime: Any = build(small(), Choice("openvino"))
            assert runtime.compiled.get_property("INFERENCE_NUM_THREADS") == count
        runtime = build(small(), Choice("openvino", threads=1))
        assert runtime.compiled.get_property("INFERENCE_NUM_THREADS") == 1
        assert runtime.compiled.get_property("NUM_STREAMS") == 1
    finally:
        torch.set_num_threads(before)


def merging_is_faster(runtimes: Any, batches: Any, seconds: float) -> dict[str, float]:
    """In place of a clock, which a busy machine disturbs."""
    return {name: 0.02 if "merge" in one.name else 0.01 for name, one in runtimes.items()}


class Killed(BaseException):
    """As a signal would end the process."""


def test_what_was_measured_before_a_kill_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.runtime import tune as module

    model, images, kept = small(), Images(made_up(small().config, 40)), tmp_path / "measured.json"
    real, calls = module.images_per_second, list[str]()

    def counted(runtimes: Any, batch: Any, seconds: float) -> Any:
        if len(calls) == 2 and "eager" in runtimes:
            raise Killed
        calls.append("x")
        return real(runtimes, batch, seconds)

    monkeypatch.setattr(module, "images_per_second", counted)
    with pytest.raises(Killed):
        tune(model, images, max_drop=FEW, kinds=["eager"], seconds=0.0, kept=kept)
    before = json.loads(kept.read_text())["rows"]
    assert len(before) == 2
    monkeypatch.setattr(module, "images_per_second", real)
    notes = Notes()
    found = tune(model, images, max_drop=FEW, kinds=["eager"], seconds=0.0, kept=kept, progress=notes)
    assert sum(", kept]" in line for line in notes.lines) == 2
    assert "measured before" in notes.lines[0]
    assert [row.speed for row in found.rows[:2]] == [row["speed"] for row in before], "measured again"
    assert all(row.speed for row in found.rows)
    # other weights, other images: nothing of it counts
    with torch.no_grad():
        next(model.parameters()).add_(1)
    again = Notes()
    tune(model, images, max_drop=FEW, kinds=["eager"], seconds=0.0, kept=kept, progress=again)
    assert "measured before" not in again.lines[0]
    kept.write_text('{"digest": 3')
    assert tune(model, images, max_drop=FEW, kinds=["eager"], seconds=0.0, kept=kept).winner.speed


def test_the_estimate_comes_first_and_every_configuration_says_how_far_it_is() -> None:
    notes = Notes()
    found = tune(small(), Images(made_up(small().config, 24)), FEW, kinds=["eager"], seconds=0.0, progress=notes)
    measured = [row for row in found.rows if row.ratio is not None and not row.choice.sure]
    for stage in (True, False):  # whole images first, then what computes less
        count = sum(row.choice.reduced != stage for row in measured)
        start = next(i for i, line in enumerate(notes.lines) if line.startswith(f"{count} configurations"))
        assert ", then about " in notes.lines[start] or not stage
        assert ": about " in notes.lines[start]
        lines = notes.lines[start + 1 : start + count + 1]
        assert lines[-1].startswith(f"[{count}/{count}]")
        assert all(line.startswith(f"[{i}/{count}") for i, line in enumerate(lines, start=1))
        assert all(" img/s, " in line and "batch 8: " in line for line in lines), "numbers have units"


def test_a_call_counts_as_the_fastest_once_another_was_nearly_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a busy machine disturbs: nine calls of ten are far slower than the runtime is."""
    from vitkit.runtime import tune as module

    now, calls = [0.0], [0]

    class Busy:
        def run(self, images: torch.Tensor) -> None:
            calls[0] += 1
            now[0] += 0.1 if calls[0] % 10 == 0 else 0.1 + 0.3 * (calls[0] % 10)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    found = module.images_per_second({"it": Busy()}, [torch.zeros(8, 1)], seconds=3.0)  # type: ignore[dict-item]
    assert found["it"] == pytest.approx(80)
    assert now[0] < 5 * 3.0 + 5


def test_a_budget_leaves_out_what_does_not_fit() -> None:
    found = tune(small(), Images(made_up(small().config, 24)), FEW, kinds=["eager"], seconds=0.0, budget=1e-9)
    assert found.winner.choice == Choice(batch_size=8), "the first is always measured, and exact"
    assert [row.problem for row in found.rows[1:]] == ["left out: --budget"] * (len(found.rows) - 1)


def test_a_budget_leaves_out_what_would_end_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.runtime import tune as module

    monkeypatch.setattr(module._Search, "expected_seconds", lambda self, choice: 0.0 if choice.exact else 500.0)
    notes = Notes()
    images = Images(made_up(small().config, 24))
    found = tune(small(), images, FEW, kinds=["eager"], seconds=0.0, budget=600, progress=notes)
    assert {row.choice.exact: row.problem for row in found.rows} == {True: None, False: "left out: --budget"}
    assert any(line.endswith("about 10 min") for line in notes.lines), "no more than the budget"
    assert [line for line in notes.lines if "left out" in line and line[0].isdigit()], "how many, in one line"
    assert len([line for line in notes.lines if "left out" in line]) < 4


def test_accuracy_that_would_take_longer_than_the_budget_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging looks fastest, but 24 images at a hundredth of an image a second do not fit."""
    from vitkit.runtime import tune as module

    asked: list[Choice] = []
    real = module._Search.checked
    monkeypatch.setattr(module, "images_per_second", merging_is_faster)
    monkeypatch.setattr(module._Search, "expected_seconds", lambda self, choice: 0.0)
    monkeypatch.setattr(
        module._Search, "checked", lambda self, place: asked.append(self.rows[place].choice) or real(self, place)
    )
    found = tune(small(), Images(made_up(small().config, 24)), FEW, kinds=["eager"], seconds=0.0, budget=600)
    assert any(row.choice.reduced for row in found.rows)
    assert found.winner.choice.exact
    assert all(choice.exact for choice in asked)


def test_methods_are_compared_in_a_part_of_a_budget_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a comparison would take, smaller images and merging are measured all the same."""
    from vitkit.runtime import tune as module

    def never(*_: object) -> None:
        raise AssertionError("compared, though that takes longer than the budget")

    monkeypatch.setattr("vitkit.runtime.reductions.harms", never)
    monkeypatch.setattr("vitkit.runtime.reductions.halved", never)
    monkeypatch.setattr(module._Search, "batch_seconds", 200.0)
    monkeypatch.setattr(module._Search, "expected_seconds", lambda self, choice: 1.0)
    found = tune(small(), Images(made_up(small().config, 24)), FEW, kinds=["eager"], seconds=0.0, budget=600)
    measured = [row.choice for row in found.rows if row.ratio]
    assert any(choice.merge for choice in measured)
    assert any(choice.scale < 1 for choice in measured)


def test_what_a_quarter_of_the_images_rules_out_is_not_asked_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.runtime import tune as module

    asked: dict[Choice, int] = {}
    outputs_of, make = module.outputs_of, module.build

    def built(model: Any, choice: Choice, *rest: Any) -> Any:
        runtime: Any = make(model, choice, *rest)
        runtime.choice = choice
        return runtime

    def counted(runtime: Any, images: Images, *rest: Any) -> torch.Tensor:
        asked[runtime.choice] = asked.get(runtime.choice, 0) + len(images)
        outputs = outputs_of(runtime, images, *rest)
        return outputs + torch.eye(10)[3] if runtime.choice.merge else outputs  # fresh weights say 0 for every class

    monkeypatch.setattr(module, "build", built)
    monkeypatch.setattr(module, "outputs_of", counted)
    monkeypatch.setattr(module, "images_per_second", merging_is_faster)
    images, notes = Images(made_up(small().config, 160)), Notes()
    found = tune(small(), images, kinds=["eager"], seconds=0.0, max_drop=0.01, progress=notes)
    assert not found.winner.choice.merge
    assert any("merge" in line and "loses too much on a quarter" in line for line in notes.lines), (
        "why it is not chosen"
    )
    assert {count for choice, count in asked.items() if choice.merge} == {40}


def test_images_that_cannot_show_a_promise_are_not_asked() -> None:
    """Of so many images none is lost, and the promise is just kept; of one less it cannot be, whatever they show."""
    max_drop, notes = 0.01, Notes()
    needed = images_needed(max_drop)
    assert kept_on(0, 0, needed - 1, max_drop) < 0.9 <= kept_on(0, 0, needed, max_drop)
    few, enough = (Images(made_up(small().config, count)) for count in (needed - 1, needed))
    found = tune(small(), few, max_drop, kinds=["eager"], seconds=0.0, progress=notes)
    assert all(row.choice.exact for row in found.rows)
    assert [line for line in notes.lines if f"{needed - 1} images cannot show" in line and f"give {needed} " in line]
    assert not [line for line in notes.lines if "with a probability" in line]
    found = tune(small(), enough, max_drop, kinds=["eager"], seconds=0.0)
    assert any(row.choice.reduced for row in found.rows)


def test_tune_draws_all_it_measured(command: Any, tmp_path: Path) -> None:
    path, loose, out = tmp_path / "m.safetensors", tmp_path / "loose", tmp_path / "tuned.svg"
    vitkit.save(small(), path, class_names=[f"class {i}" for i in range(10)])
    loose.mkdir()
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(loose / f"{i}.png")
    code, text, err = command("tune", path, loose, "--runtimes", "eager", "--seconds", 0, "--out", out)
    assert code == 0, err
    drawn = out.read_text()
    for words in ("chosen: eager", "PyTorch as it is", "agreement with the model, %", "m.safetensors: eager"):
        assert words in drawn
    rows = [line for line in text.splitlines() if line.startswith("eager") and "x" in line]
    assert all("%" in row for row in rows), "the accuracy of each is measured for the figure"
    assert not (tmp_path / "m.safetensors.tuned.measured.json").exists(), "finished: nothing to continue"
    code, text, err = command("predict", path, loose / "0.png")
    assert "runtime: eager" in err
    assert "chosen by `vitkit tune`" in err
    code, text, err = command("predict", path, loose / "0.png", "--runtime", "eager", "--json")
    assert json.loads(text)["runtime"] == "eager"


def test_the_figure_has_a_dot_for_every_candidate() -> None:
    found = [
        Candidate("eager", "eager", 1.0, 0.91),
        Candidate("onnx", "onnx", 1.7, 0.91, chosen=True),
        Candidate("onnx int8", "onnx", 2.4, 0.74, precision="int8"),
        Candidate("openvino merge 8", "openvino", 2.2, None, reduced=True),
    ]
    (axes,) = draw_tuning(found, "accuracy", 0.91, 0.005).axes
    places = [tuple(map(float, dots.get_offsets()[0])) for dots in axes.collections if len(dots.get_offsets())]
    assert {(1.0, 91.0), (1.7, 91.0), (2.4, 74.0)} <= {(x, round(y, 6)) for x, y in places}
    assert 2.2 in [x for x, _ in places]
    assert "speed" in axes.get_xlabel()
    assert axes.get_ylabel() == "accuracy, %"
