"""A small search: one run for each combination of settings, each in a folder of its own, the best named at the end.

    OUT/sweep.json   what is searched
    OUT/001 ...      the runs; a finished one is never run again, a stopped one is resumed

A run that does worse than half of the finished ones did at the same share of their length is stopped early (the median
rule); its folder says so in stopped.json.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from vitkit.errors import ConfigError, TrainError
from vitkit.io import parse_json, read_json, write_json
from vitkit.locks import only_one
from vitkit.training.config import TrainConfig, assign
from vitkit.training.log import read
from vitkit.training.result import Watcher
from vitkit.training.run import train
from vitkit.training.runs import Run, read_run
from vitkit.training.stopping import Stopped

FILE, STOPPED = "sweep.json", "stopped.json"
ENOUGH = 3  # finished runs before any is stopped early
GRACE = 0.25  # share of a run in which it is left alone


@dataclass(frozen=True)
class Trial:
    folder: Path
    settings: tuple[str, ...]  # KEY=VALUE
    run: Run | None = field(default=None)  # None: not begun

    @property
    def state(self) -> str:
        if (self.folder / STOPPED).is_file():
            return "stopped early"
        return "not begun" if self.run is None else self.run.state

    @property
    def done(self) -> bool:
        return self.state in ("finished", "stopped early")


def combinations(searched: Sequence[str], draws: int = 0, seed: int = 0) -> list[tuple[str, ...]]:
    """ "lr=1e-3,3e-3" and "batch_size=32,64" -> four combinations, or `draws` of them, drawn without repetition."""
    axes = []
    for one in searched:
        key, given, values = one.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not given or not listed:
            raise ConfigError(f"--set {one!r} wants KEY=VALUE,VALUE,... such as --set lr=1e-3,3e-3")
        axes.append([f"{key.strip()}={value}" for value in dict.fromkeys(listed)])
    every = list(product(*axes))
    if len(every) < 2:
        raise ConfigError("a sweep needs something to compare; give several values: --set lr=1e-3,3e-3")
    return random.Random(seed).sample(every, min(draws, len(every))) if draws else every


def sweep(
    config: TrainConfig,
    searched: Sequence[str],
    out: Path,
    draws: int = 0,
    resume: bool = False,
    early: bool = True,
    watcher: Callable[[], Watcher] = Watcher,
) -> list[Trial]:
    """Run every combination; the trials with the best first. `resume` continues the sweep in the folder `out`."""
    chosen = combinations(searched, draws, config.seed)
    configs = [assign(config, list(one)) for one in chosen]  # a wrong name is an error before anything is run
    about = {"searched": list(searched), "draws": draws, "base": {**config.to_dict(), "out": ""}}
    with only_one(out / ".lock", f"the sweep in {out}", "choose another folder with --out"):
        claim(out, parse_json(_text(about)), resume)
        trials = [trial_of(out, number, one) for number, one in enumerate(chosen, start=1)]
        for number, one in enumerate(configs):
            if not trials[number].done:
                view = watcher()
                view.note(f"run {number + 1} of {len(configs)}: {' '.join(chosen[number])}")
                run_trial(one.replace(out=str(trials[number].folder)), trials, view, early)
                trials[number] = trial_of(out, number + 1, chosen[number])
    return ranked(trials)


def _text(about: object) -> str:
    import json

    return json.dumps(about)


def claim(out: Path, about: Mapping[str, object], resume: bool) -> None:
    path = out / FILE
    if not path.is_file():
        if out.is_dir() and any(not p.name.startswith(".") for p in out.iterdir()):
            raise TrainError(f"{out} holds other things and no sweep; choose another folder with --out")
        return write_json(path, about)
    if not resume:
        raise TrainError(f"{out} already holds a sweep; continue it with --resume, or choose another folder")
    try:
        before = read_json(path)
    except (OSError, ValueError) as e:
        raise TrainError(f"{path} cannot be read ({e}); choose another folder with --out") from e
    if before != about:
        differs = [k for k in about if not isinstance(before, dict) or before.get(k) != about[k]]
        raise TrainError(f"the sweep in {out} is another one ({', '.join(differs)}); repeat its options")
    return None


def trial_of(out: Path, number: int, settings: tuple[str, ...]) -> Trial:
    folder = out / f"{number:03d}"
    return Trial(folder, settings, read_run(folder) if (folder / "config.json").is_file() else None)


def run_trial(config: TrainConfig, trials: Sequence[Trial], view: Watcher, early: bool) -> None:
    """Run or resume one; a run that diverged is part of the search, not the end of it."""
    folder = Path(config.out)
    rule = Median(view, _curves(trials)) if early else None
    begun = (folder / "config.json").is_file()
    try:
        with view.shown:
            train(config.replace(baseline="no"), resume=begun, watcher=rule or view)  # the same for all of them
    except Stopped:
        if rule is None or not rule.wants_stop:  # by Ctrl-C or SIGTERM
            raise
        write_json(folder / STOPPED, {"reason": rule.reason, "score": rule.best})
    except TrainError as e:
        if "diverged" not in str(e) and "in a row" not in str(e):
            raise
        write_json(folder / STOPPED, {"reason": str(e), "score": None})


Curve = list[tuple[float, float]]  # (progress, best score so far), lower is worse


def _curves(trials: Iterable[Trial]) -> list[Curve]:
    """Of the finished runs."""
    found = []
    for trial in trials:
        if trial.run is not None and trial.run.state == "finished" and (key := f"val_{trial.run.metric}"):
            lines = [line for line in read(trial.folder / "log.jsonl") if key in line]
            last, sign = max((line["step"] for line in lines), default=1), -1.0 if trial.run.lower_is_better else 1.0
            found.append([(line["step"] / last, sign * line[key]) for line in lines])
    return found


class Median(Watcher):
    """Hands everything on, and wants a run stopped that is worse than the median of the others where it is."""

    def __init__(self, inner: Watcher, curves: Sequence[Curve]) -> None:
        self.inner, self.curves, self.best, self.reason = inner, curves, None, ""
        self.note, self.update, self.step = inner.note, inner.update, inner.step  # type: ignore[method-assign]
        self.evaluated = inner.evaluated  # type: ignore[method-assign]

    best: float | None

    def scored(self, progress: float, score: float, higher: bool) -> None:
        value = score if higher else -score
        self.best = value if self.best is None else max(self.best, value)
        others = [max((v for p, v in curve if p <= progress + 1e-9), default=None) for curve in self.curves]
        there = [v for v in others if v is not None]
        if progress >= GRACE and progress < 1 and len(there) >= ENOUGH and self.best < median(there):
            self.wants_stop = True
            self.reason = f"at {progress:.0%} of its length it was below the median of {len(there)} finished runs"
            self.inner.note(f"stopped early: {self.reason}")


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Finished ones from the best to the worst, then the others."""
    finished = [t for t in trials if t.run is not None and t.run.state == "finished" and t.run.best is not None]
    lower = any(t.run is not None and t.run.lower_is_better for t in finished)
    finished.sort(key=lambda t: t.run.best if t.run and t.run.best is not None else 0.0, reverse=not lower)
    return [*finished, *(t for t in trials if t not in finished)]
