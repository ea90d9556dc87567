"""The runs in a folder: what each was, how far it came, what it reached; and what differs between some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from vitkit.data.dataset import Dataset
from vitkit.data.identity import identity
from vitkit.errors import ConfigError, DataError, did_you_mean
from vitkit.io import read_json
from vitkit.tasks import TASKS, Metric
from vitkit.training.config import TrainConfig
from vitkit.training.log import read
from vitkit.training.parts import validation_split
from vitkit.training.result import DATA

COLUMNS = ("run", "state", "data", "model", "metric", "best", "test", "steps", "seconds", "started")
_UNSAID = ("out", "baseline", "advice")  # they always differ and say nothing, or are sentences


@dataclass(frozen=True)
class Run:
    """A run directory, read without loading its weights."""

    folder: Path
    config: dict[str, object]  # its settings, with nothing left open
    state: str  # finished; stopped at step N; or why it cannot be read
    result: dict[str, object]  # empty before it is finished
    started: str  # when, in UTC

    @property
    def metric(self) -> str:
        """The one that the best weights were chosen by; runs of version 0.1 do not say."""
        return str(self.result.get("metric", "top1" if "top1" in self._dict("best") else ""))

    def text(self, name: str, value: object) -> str:
        """A value of `row` or of `differences` for people: scores as their task writes them."""
        if not isinstance(value, float):
            return "" if value is None else str(value)
        if self.metric and name.rpartition(".")[2] in ("best", "test", "score", "top5", self.metric):
            known = (task.score for task in TASKS.values() if task.score.key == self.metric)
            return next(known, Metric(self.metric, self.metric)).text(value)
        return f"{value:.4g}"

    @property
    def best(self) -> float | None:
        score = self._dict("best").get("score")
        try:
            return float(score) if isinstance(score, int | float) else None
        except OverflowError:
            return None

    @property
    def lower_is_better(self) -> bool:
        return self.result.get("higher") is False

    def _dict(self, name: str) -> dict[str, object]:
        found = self.result.get(name)
        return found if isinstance(found, dict) else {}

    def row(self) -> dict[str, object]:
        test = self._dict("test").get(self.metric)
        model = self.config.get("model") or self.config.get("init") or ""
        numbers = {"metric": self.metric, "best": self.best, "test": test, "steps": self.result.get("steps")}
        numbers |= {"seconds": self.result.get("seconds"), "started": self.started}
        named = {"run": str(self.folder), "state": self.state, "data": self.config.get("data", ""), "model": model}
        return {**named, **numbers}


def find_runs(folders: Iterable[str | Path]) -> list[Run]:
    """The runs that are named, and all below the other folders, in the order of their names."""
    found = []
    for given in map(Path, folders):
        if not given.is_dir():
            raise DataError(f"there is no folder {given}; give a run, or a folder of runs")
        paths = [given / "config.json"] if (given / "config.json").is_file() else sorted(given.rglob("config.json"))
        found += [run for path in paths if (run := read_run(path.parent)) is not None]
    return found


def read_run(folder: Path) -> Run | None:
    """None for a folder whose config.json is no run's, such as a Hugging Face model."""
    path = folder / "config.json"
    try:
        about = read_json(path)
        if not isinstance(about, dict) or not isinstance(about.get("train"), dict):
            return None
        started = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (OSError, ValueError) as e:
        return Run(folder, {}, f"config.json cannot be read ({e})", {}, "")
    try:
        result = read_json(folder / "result.json")
        state = "finished" if isinstance(result, dict) else "result.json is damaged"
    except FileNotFoundError:
        lines = read(folder / "log.jsonl")
        result, state = {}, f"stopped at step {lines[-1]['step'] if lines else 0}"
    except (OSError, ValueError):
        result, state = {}, "result.json is damaged"
    return Run(folder, about["train"], state, result if isinstance(result, dict) else {}, started)


def looks_at(model: str, data: Dataset, split: str) -> int:
    """How often the run of these weights was evaluated on this split, to keep the best; 0: it selected nothing."""
    given = Path(model)
    folder = given if given.is_dir() else given.parent
    kept = given.is_dir() or given.name == "best.safetensors"
    if not kept or read_run(folder) is None or split != validation_split(data.splits):
        return 0
    try:
        before = read_json(folder / DATA)
    except (OSError, ValueError):  # another folder, or a run of version 0.1, which did not keep what its data was
        return 0
    same = {k: v for k, v in identity(data).items() if k.startswith(f"{split}: ")}
    if not isinstance(before, dict) or any(before.get(name) != value for name, value in same.items()):
        return 0
    looks = sum(any(key.startswith("val_") for key in line) for line in read(folder / "log.jsonl"))
    return looks if looks > 1 else 0


def sort_runs(runs: Sequence[Run], key: str) -> list[Run]:
    """By a column, or by a setting such as lr; "-best" from the highest. Runs without a value come last."""
    name = key.removeprefix("-")
    known = [*COLUMNS, *TrainConfig.__dataclass_fields__]
    if name not in known:
        raise ConfigError(f"runs cannot be sorted by {name!r}.{did_you_mean(name, known)} Choose a column or a setting")
    values = [(run.row() | {k: v for k, v in run.config.items() if k not in COLUMNS}).get(name) for run in runs]
    there = [(value, run) for value, run in zip(values, runs, strict=True) if value is not None]
    numbers = all(isinstance(value, int | float) for value, _ in there)
    there.sort(key=lambda pair: pair[0] if numbers else str(pair[0]), reverse=key.startswith("-"))  # type: ignore
    return [run for _, run in there] + [run for value, run in zip(values, runs, strict=True) if value is None]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[object]]]:
    """(setting or result, its value in each run) where they differ; settings first."""
    if len(runs) < 2:
        raise ConfigError("comparing needs two runs; name them: vitkit runs runs/a runs/b --compare")
    settings = [_flat(run.config) for run in runs]
    results = [{"state": run.state, **_flat(run.result)} for run in runs]
    found = []
    for each in (settings, results):
        for name in dict.fromkeys(key for one in each for key in one):
            values = [one.get(name) for one in each]
            if name not in _UNSAID and any(value != values[0] for value in values):
                found.append((name, values))
    return found


def _flat(values: dict[str, object], before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found
