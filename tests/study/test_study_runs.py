"""Trainings are remembered one by one; a killed study resumes to the same result; budgets become steps."""

import dataclasses
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

from vitkit.errors import ConfigError
from vitkit.progress import Progress
from vitkit.study import run as planning
from vitkit.study import runs
from vitkit.study.run import named, run
from vitkit.study.runs import Run, finish, recall, start
from vitkit.study.sets import open_sets
from vitkit.study.studies import STUDIES
from vitkit.study.table import Setting

S = Setting(8, 1, 4)


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.updates: list[tuple[str, float, float | None]] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def update(self, what: str, done: float, total: float | None = None) -> None:
        self.updates.append((what, done, total))


def contents(folder: Path) -> dict[str, bytes]:
    """The files of trainings without the times they took."""
    found = {}
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        for key in ("seconds", "cpu_seconds"):
            content["result"].pop(key)
        found[path.name] = json.dumps(content).encode()
    return found


def test_killed_and_continued(tiny: str, tmp_path: Path) -> None:
    """SIGKILL in the middle: what was finished stays untouched, the rest follows, the result is the same."""
    command = [sys.executable, "-m", "vitkit", "study", "pooling", "--data", tiny, "--steps", "9", "--seeds", "1"]
    cut = tmp_path / "cut"
    with subprocess.Popen([*command, "--out", str(cut)], stderr=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while len(list((cut / "runs").glob("*.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    kept = {p.name: p.stat().st_mtime_ns for p in (cut / "runs").glob("*.json")}
    assert 3 <= len(kept) < 12
    assert not (cut / "pooling").exists()
    notes = Notes()
    run("pooling", tiny, cut, steps=9, seeds=1, progress=notes)
    assert len([line for line in notes.lines if "(remembered)" in line]) == len(kept)
    assert notes.updates == [("pooling", i, 12) for i in range(1, 13)]
    after = {p.name: p.stat().st_mtime_ns for p in (cut / "runs").glob("*.json")}
    assert kept.items() <= after.items()
    run("pooling", tiny, tmp_path / "whole", steps=9, seeds=1)
    whole, pieces = contents(tmp_path / "whole" / "runs"), contents(cut / "runs")
    assert whole.keys() == pieces.keys()
    made_here = [name for name in whole if name not in kept]  # the same process, so the same number of threads
    assert made_here
    assert all(whole[name] == pieces[name] for name in made_here)


def test_a_training_repeats_to_the_last_bit(tiny: str, tmp_path: Path) -> None:
    sets = open_sets(tiny)
    one = Run(S.vit(dropout=0.1), 6, 1e-3, 3, share=0.5)
    first, again = (finish(one, sets, tmp_path / name) for name in "ab")
    assert first.losses == again.losses
    assert first.accuracy == again.accuracy
    other = finish(dataclasses.replace(one, seed=4), sets, tmp_path / "a")
    assert other.losses != first.losses


def test_two_arms_of_one_seed_see_the_same_images(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitkit.data.samples import Samples

    seen: list[list[int]] = []
    load = Samples.load

    def spy(self: Samples, epoch: int, order: object) -> object:
        seen[-1].extend(order.indices.tolist())  # type: ignore[attr-defined]
        return load(self, epoch, order)  # type: ignore[arg-type]

    monkeypatch.setattr(Samples, "load", spy)
    sets = open_sets(tiny)
    for config, seed in ((S.vit(), 0), (S.resnet(), 0), (S.vit(), 1)):
        seen.append([])
        runs._trained(Run(config, 4, 1e-3, seed, share=0.5), sets)
    assert seen[0] == seen[1] != seen[2]


def test_a_damaged_file_is_made_again(tiny: str, tmp_path: Path) -> None:
    sets, one = open_sets(tiny), Run(S.vit(), 1, 1e-3, 0)
    found = finish(one, sets, tmp_path)
    path = tmp_path / f"{one.key(sets)}.json"
    path.write_text(path.read_text()[:40])
    assert recall(one, sets, tmp_path) is None
    assert finish(one, sets, tmp_path).losses == found.losses


def test_another_description_is_another_run(tiny: str) -> None:
    sets, one = open_sets(tiny), Run(S.vit(), 5, 1e-3, 0)
    others = [dataclasses.replace(one, **c) for c in ({"steps": 6}, {"lr": 2e-3}, {"seed": 1}, {"share": 0.5})]
    others += [dataclasses.replace(one, config=S.vit(depth=2)), dataclasses.replace(one, before=one)]
    assert len({r.key(sets) for r in (one, *others)}) == 1 + len(others)


def test_shares_are_nested(tiny: str) -> None:
    sets = open_sets(tiny)
    small, large = (sets.part(share, 0).pixels.flatten(1).numpy() for share in (0.25, 0.5))
    assert len(small) == 24
    rows = {row.tobytes() for row in large}
    assert all(row.tobytes() in rows for row in small)
    other = sets.part(0.25, 1).pixels.flatten(1).numpy()
    assert not np.array_equal(small, other)


def test_weights_are_taken_over_with_their_positions(tiny: str) -> None:
    sets = open_sets(tiny)
    before = Run(S.vit(image_size=4, patch_size=2), 2, 1e-3, 0)
    after = Run(S.vit(image_size=8, patch_size=2), 0, 0.0, 0, before=before)
    model, old = start(after, sets), runs._trained(before, sets)[0]
    assert torch.equal(model.head.classifier.weight, old.head.classifier.weight)
    table, given = model.positions.learned[1:].unflatten(0, (4, 4)), old.positions.learned[1:].unflatten(0, (2, 2))
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):  # the official way keeps corners
        assert torch.allclose(table[corner], given[corner], atol=1e-6)
    fresh = start(dataclasses.replace(after, fresh_positions=True), sets)
    assert torch.equal(fresh.head.classifier.weight, old.head.classifier.weight)
    assert not torch.allclose(fresh.positions.learned[1], table[0, 0], atol=1e-3)


def test_a_budget_becomes_steps_and_is_kept(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([0.01] * 3 + [9.9] * 3)  # seconds a step of the three arms; nobody may ask a second time
    monkeypatch.setattr(planning, "seconds_per_step", lambda arm: next(speeds))
    steps = [run("pooling", tiny, tmp_path, budget=2.0, seeds=1).context.steps for _ in range(2)]
    assert steps[0] == steps[1]  # the second time it was read, not measured
    sets = open_sets(tiny)
    evaluated = 3 * (32 + 3 * 24) * 0.01 / 64 / 3  # 32 test images once, 24 for each of three rates
    assert steps[0] == int((2.0 - evaluated) / (3 * 2 * 0.01))
    with pytest.raises(ConfigError, match="needs a budget of at least"):
        planning.for_budget(STUDIES["pooling"], sets, 3, 0.01)


def test_cost_counts_every_training() -> None:
    arms = STUDIES["positions"].arms(S)
    seconds = {arm.name: 1.0 for arm in arms}
    per_step, fixed = planning.cost(arms, 3, seconds, {"test": 64, "val": 64})
    assert per_step == pytest.approx(6 * (3 + 3 * planning.SEARCH))
    assert fixed == pytest.approx(6 * (3 + 3) / 3)
    assert planning.count_trainings(arms, 3) == 36


def test_keys_are_those_of_earlier_versions(tiny: str) -> None:
    """A folder of trainings that an earlier version left is still of use."""
    sets = dataclasses.replace(open_sets(tiny), name="tiny")
    assert Run(S.vit(), 5, 1e-3, 0).key(sets) == "249a006c7eb10aea"
    before = Run(S.vit(image_size=4, patch_size=2), 5, 1e-3, 0)
    assert Run(S.vit(patch_size=2), 5, 1e-3, 1000, split="val", before=before).key(sets) == "4e4f72ac9a53857e"


def test_unknown_names_are_answered() -> None:
    with pytest.raises(ConfigError, match="Did you mean positions"):
        named("position")
    with pytest.raises(ConfigError, match="at least 1"):
        run("positions", seeds=0)
