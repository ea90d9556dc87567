"""Trainings are remembered one by one; a killed study resumes to the same result; budgets become steps."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.progress import Progress
from vitkit.study import run as planning
from vitkit.study import runs
from vitkit.study.run import named, run
from vitkit.study.runs import Outcome, Run, Trainer, finish, recall, start
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


@pytest.mark.slow
def test_killed_and_continued(tiny: str, tmp_path: Path) -> None:
    """SIGKILL in the middle: what was finished stays untouched, the rest follows, the result is the same."""
    command = [sys.executable, "-m", "vitkit", "study", "pooling", "--data", tiny, "--steps", "9", "--seeds", "1"]
    command += ["--workers", "2"]
    cut = tmp_path / "cut"
    with subprocess.Popen([*command, "--out", str(cut)], stderr=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 120
        while len(list((cut / "runs").glob("*.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    kept = {p.name: p.stat().st_mtime_ns for p in (cut / "runs").glob("*.json")}
    assert len(kept) >= 3
    assert not (cut / "pooling" / "pooling.json").exists()
    notes = Notes()
    run("pooling", tiny, cut, steps=9, seeds=1, progress=notes)
    assert len([line for line in notes.lines if "(remembered)" in line]) == len(kept)
    after = {p.name: p.stat().st_mtime_ns for p in (cut / "runs").glob("*.json")}
    assert kept.items() <= after.items()
    run("pooling", tiny, tmp_path / "whole", steps=9, seeds=1)
    whole, pieces = contents(tmp_path / "whole" / "runs"), contents(cut / "runs")
    assert whole.keys() == pieces.keys()
    assert whole == pieces  # each training has one thread, wherever it ran


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


def ignores_ctrl_c(process: psutil.Process) -> bool:
    """As a worker does once it is ready; Python's tracker of resources does so too."""
    line = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigIgn" in line)
    return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)


FOREGROUND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
runpy.run_module("vitkit", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux says which signals a process ignores")
def test_ctrl_c_does_not_wait_for_trainings(tiny: str, tmp_path: Path) -> None:
    """A million steps are under way in two processes; they end with the command."""
    command = [sys.executable, "-c", FOREGROUND, "study", "pooling", "--data", tiny, "--steps", "3000000"]
    command += ["--seeds", "1", "--workers", "2", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        children = psutil.Process(process.pid).children
        assert wait_for(lambda: sum(map(ignores_ctrl_c, children())) >= 3)  # two, and Python's tracker
        os.killpg(process.pid, signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_several_processes_give_the_same(tiny: str, tmp_path: Path) -> None:
    sets, wanted = open_sets(tiny), [Run(S.vit(), 3, 1e-3, seed) for seed in (0, 1, 0)]
    with Trainer(sets, tmp_path / "two", 2) as two, Trainer(sets, tmp_path / "one", 1) as one:
        found = [{n: o.losses for n, o, _ in trainer(wanted)} for trainer in (two, one)]
    assert found[0] == found[1]
    assert found[0].keys() == {0, 1, 2}


@pytest.mark.slow
def test_a_budget_becomes_steps_and_is_kept(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([0.01] * 3 + [9.9] * 3)  # seconds a step of the three arms; nobody may ask a second time
    monkeypatch.setattr(planning, "seconds_per_step", lambda arm: next(speeds))
    notes = Notes(), Notes()
    steps = [run("pooling", tiny, tmp_path, budget=5.0, seeds=1, progress=one).context.steps for one in notes]
    assert steps[0] == steps[1]  # the second time it was read, not measured
    assert all("(remembered)" in line for line in notes[1].lines if "%" in line)
    with pytest.raises(ConfigError, match="give --budget 44m"):
        run("pooling", tiny, tmp_path / "other", budget=0.01)


class Asked(planning._Trainings):
    """A study whose trainings end as the test says."""

    def __init__(self, name: str, tiny: str, accuracy: Callable[[Run], float], cost: planning.Cost) -> None:
        super().__init__(STUDIES[name], open_sets(tiny), Trainer(open_sets(tiny), Path(), 1), Notes())
        self.accuracy, self.cost = accuracy, cost

    def _finish(self, runs: list[Run], words: list[str]) -> list[Outcome]:
        return [Outcome(self.accuracy(run), {}, [], 1.0, 1.0) for run in runs]


def test_trainings_grow_until_they_gain_nothing(tiny: str) -> None:
    """96 images are 1.5 steps an epoch, 100 epochs the most; the curve is flat from 40 steps on."""
    cheap = planning.Cost(1e-6, 1e-6, 1e-6)
    assert Asked("pooling", tiny, lambda run: min(run.steps, 40) / 100, cheap).length(100.0) == (40, True)
    peak = Asked("pooling", tiny, lambda run: 0.5 - abs(run.steps - 40) / 1000, cheap)
    assert peak.length(100.0) == (40, True)
    late = Asked("pooling", tiny, lambda run: min(run.steps, 80) / 100, cheap)
    assert late.length(100.0) == (150, False)  # 160, twice 80, are beyond the most: nobody has seen that they gain less
    rising = Asked("pooling", tiny, lambda run: run.steps / 1000, cheap)
    assert rising.length(100.0) == (150, False)  # a hundred epochs
    assert "before a plateau" in rising.progress.lines[-1]


@pytest.mark.parametrize(("noise", "seeds"), [(0.001, 3), (0.01, 10), (0.3, 20)])
def test_seeds_follow_from_the_spread(tiny: str, noise: float, seeds: int) -> None:
    """The pilot's differences are +noise, 0, -noise: their deviation is the noise. The effect is a point."""

    def accuracy(run: Run) -> float:
        return 0.5 + (run.config.pooling == "mean") * noise * (run.seed - 1)

    work = Asked("pooling", tiny, accuracy, planning.Cost(1e-6, 1e-6, 1e-6))
    work.search()
    assert work.enough_seeds(100.0) == seeds  # ten for an effect of one deviation: any table of the paired t test
    assert ("underpowered" in work.progress.lines[-1]) == (seeds == 20)
    poor = Asked("pooling", tiny, accuracy, planning.Cost(1.0, 1.0, 1.0))
    poor.steps = 1
    poor.search()
    assert poor.enough_seeds(4.0) == 3  # what the budget buys, but never fewer than three


def test_cost_counts_every_training() -> None:
    arms = STUDIES["depth-width"].arms(S)
    found = planning.cost([(arm, 1.0) for arm in arms], {"test": 96})
    assert (found.seed, found.search, found.evaluation) == pytest.approx((4, 16 / 3, 2))
    assert found.steps(1000, 3) == int((1000 - 3 * 2) / (3 * 4 + 16 / 3))
    assert found.seeds(1000, 10) == int((1000 - 160 / 3) / (40 + 2))


def test_pre_training_is_searched_by_its_own_loss_and_what_follows_it_for_longer() -> None:
    before = planning.Arm("before", S.vit(classes=0), task="masked-patch")
    after = planning.Arm("after", S.vit(), before=before)
    worse, better = (Outcome(a, {}, losses, 0, 0) for a, losses in ((0.5, [9, 9, 9, 4]), (0.1, [9, 9, 9, 3])))
    assert planning.merit(before, better) > planning.merit(before, worse)
    assert planning.merit(after, better) < planning.merit(after, worse)
    assert planning.merit(before, Outcome(0.9, {}, [1.0, float("nan")], 0, 0)) == -float("inf")
    assert planning.searched_share(after) > planning.searched_share(before)


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
        run("positions", seeds=-1)
