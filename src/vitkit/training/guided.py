"""A search that learns from its runs, by Optuna's TPE: OUT/trials.json holds what was tried, in order.

What is tried next follows from the seed, the number of the trial and the results before it alone, so a search that was
killed continues as if it had not been. Bad runs are stopped early by the same rule as in a grid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitkit.errors import ConfigError, MissingPackage, TrainError
from vitkit.io import parse_json, write_json
from vitkit.locks import only_one
from vitkit.training.config import TrainConfig, assign
from vitkit.training.result import Watcher
from vitkit.training.sweep import STOPPED, Trial, claim, ranked, run_trial, trial_of

if TYPE_CHECKING:
    import optuna

FILE = "trials.json"
_RANGE = re.compile(r"([-+\d.eE]+)\.\.([-+\d.eE]+)")
_WIDE = 10.0  # a range of at least such a ratio is searched by orders of magnitude


def search(
    config: TrainConfig,
    searched: Sequence[str],
    out: Path,
    count: int,
    resume: bool = False,
    early: bool = True,
    watcher: Callable[[], Watcher] = Watcher,
) -> list[Trial]:
    """`count` runs, each chosen by what the others reached; the best first."""
    try:
        import optuna
    except ImportError as e:
        raise MissingPackage("optuna", "--search optuna", "optuna") from e
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: distribution(words) for key, words in map(_parts, searched)}
    assign(config, [f"{key}={_first(one)}" for key, one in space.items()])  # a wrong name is an error at once
    about = {"search": "optuna", "searched": list(searched), "base": {**config.to_dict(), "out": ""}}
    with only_one(out / ".lock", f"the sweep in {out}", "choose another folder with --out"):
        claim(out, parse_json(json.dumps(about)), resume)
        tried = _read(out / FILE)
        for number in range(1, count + 1):
            trials = [trial_of(out, n, settings) for n, settings in enumerate(tried, start=1)]
            if number > len(tried):
                tried.append(_ask(space, trials, config.seed + number))
                write_json(out / FILE, tried)
                trials.append(trial_of(out, number, tried[-1]))
            if not trials[number - 1].done:
                view = watcher()
                view.note(f"run {number} of {count}: {' '.join(tried[number - 1])}")
                made = assign(config, list(tried[number - 1])).replace(out=str(trials[number - 1].folder))
                run_trial(made, trials, view, early)
        return ranked([trial_of(out, n, settings) for n, settings in enumerate(tried[:count], start=1)])


def distribution(words: str) -> optuna.distributions.BaseDistribution:
    """ "1e-4..1e-2": a range, of whole numbers where both ends are; "a,b,c": one of these."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not (found := _RANGE.fullmatch(words.strip())):
        listed = list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
        if not listed:
            raise ConfigError(f"--set ...={words!r} wants values a,b,c or a range such as 1e-4..1e-2")
        return CategoricalDistribution(listed)
    try:
        low, high = float(found[1]), float(found[2])
    except ValueError:
        raise ConfigError(f"{words!r} is no range; write it as 1e-4..1e-2") from None
    if not low < high:
        raise ConfigError(f"{words!r} is no range; its first number must be the lower one")
    wide = low > 0 and high / low >= _WIDE
    if all(re.fullmatch(r"[-+]?\d+", end) for end in found.groups()):
        return IntDistribution(int(low), int(high), log=wide)
    return FloatDistribution(low, high, log=wide)


def _parts(one: str) -> tuple[str, str]:
    key, given, words = one.partition("=")
    if not given or not key.strip():
        raise ConfigError(f"--set {one!r} wants KEY=VALUE,VALUE,... or KEY=LOW..HIGH")
    return key.strip(), words


def _first(one: optuna.distributions.BaseDistribution) -> object:
    return (getattr(one, "choices", None) and one.choices[0]) or getattr(one, "low", "")


def _ask(
    space: dict[str, optuna.distributions.BaseDistribution], trials: Sequence[Trial], seed: int
) -> tuple[str, ...]:
    """The next settings, by what the runs before reached."""
    import optuna

    lower = any(t.run is not None and t.run.lower_is_better for t in trials)
    study = optuna.create_study(
        direction="minimize" if lower else "maximize", sampler=optuna.samplers.TPESampler(seed=seed)
    )
    for trial in trials:
        if (value := _value(trial)) is not None:
            params = {k: _typed(space[k], v) for k, _, v in (s.partition("=") for s in trial.settings)}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
    asked = study.ask(space)
    return tuple(f"{key}={asked.params[key]}" for key in space)


def _typed(one: optuna.distributions.BaseDistribution, text: str) -> object:
    kind = type(one).__name__
    return int(text) if kind == "IntDistribution" else float(text) if kind == "FloatDistribution" else text


def _value(trial: Trial) -> float | None:
    """What a run reached; of one that was stopped early, what it had then."""
    if trial.state == "finished" and trial.run is not None:
        return trial.run.best
    try:
        score = parse_json((trial.folder / STOPPED).read_text(encoding="utf-8"))["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(score) if isinstance(score, int | float) else None


def _read(path: Path) -> list[tuple[str, ...]]:
    if not path.is_file():
        return []
    try:
        return [tuple(str(word) for word in one) for one in parse_json(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as e:
        raise TrainError(f"{path} cannot be read ({e}); choose another folder with --out") from e
