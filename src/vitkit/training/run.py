"""From a configuration to a finished run, `train(config)`; a step that went wrong, run again, `replay(folder)`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy
import PIL
import torch
from torch import Tensor, nn

from vitkit import __version__
from vitkit import world as worlds
from vitkit.checkpoints.family import Checkpoint
from vitkit.curation.leaks import leak_warning
from vitkit.data import Batch, Dataset, open_data
from vitkit.data.check import leakage
from vitkit.data.identity import difference, identity
from vitkit.errors import ConfigError, MissingPackage, TrainError
from vitkit.explanation.training import curves_of, read_log
from vitkit.figures.style import save_png, styled
from vitkit.io import read_json, write_json, write_text
from vitkit.locks import only_one
from vitkit.storage import Publisher, is_url, workplace
from vitkit.tasks import TASKS
from vitkit.training import attempts, budget, local, states, threads
from vitkit.training.advice import Curves, Seen, advise
from vitkit.training.baseline import Baseline, baselines
from vitkit.training.card import NAME as CARD
from vitkit.training.card import card_of
from vitkit.training.checkpoint import State, put_back
from vitkit.training.config import TrainConfig
from vitkit.training.costs import by_threads
from vitkit.training.drawn import NEAREST, RECONSTRUCTIONS, draw_pretraining
from vitkit.training.frozen import FOLDER, FrozenRun
from vitkit.training.log import EVENTS
from vitkit.training.loop import Loop
from vitkit.training.parts import Parts, assemble, open_init, task_for
from vitkit.training.recipe import complete, image_size
from vitkit.training.result import DATA, Result, Watcher
from vitkit.training.stopping import Stopped
from vitkit.training.track import MEMORY, Trackers
from vitkit.training.trackers.wandb import SENT
from vitkit.world import World

# What a run writes over or removes in its folder; everything else there is left alone.
OURS = ["config.json", "checkpoints", "log.jsonl", "best.safetensors", "model.safetensors", "result.json", "replay"]
OURS += ["curves.png", EVENTS, DATA, FOLDER, states.FOLDER, RECONSTRUCTIONS, NEAREST, MEMORY, SENT]
LET_GO = 60.0  # seconds that a restarted run waits for the processes before it to end


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    restart: bool = False,
    accept_changed_data: bool = False,
    watcher: Watcher | None = None,
    started: float | None = None,
    teacher: nn.Module | None = None,
    dataset: Dataset | None = None,
) -> Result:
    """Run a configuration to its end, or continue the run that its folder holds.

    resume   take the configuration from the folder `config.out` and continue where it was left
    restart  begin the run in the folder again at its first step; its checkpoints are kept aside
    accept_changed_data  resume although the data set is not what it was
    watcher  is called at every step and evaluation
    started  `time.monotonic()` when the clock of `budget` began
    teacher  a model to learn from, instead of the checkpoint `config.teacher`
    dataset  images in memory, instead of the set `config.data`; no curves are drawn
    """
    started = time.monotonic() if started is None else started
    out = workplace(config.out)
    processes = local.count(config, out, resume or restart)
    if processes > 1 and (teacher is not None or dataset is not None):
        raise ConfigError("several processes read data and teacher themselves: name them, or leave out processes")
    with ExitStack() as stack:
        same = {"resume": resume, "restart": restart, "accept_changed_data": accept_changed_data, "started": started}
        stack.enter_context(local.started(config, processes, **same))
        world = worlds.join(config.device)
        watcher = watcher if watcher is not None and world.first else Watcher()
        stack.callback(worlds.leave)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(worlds.ends_with_others())
        published = _published(config, world, watcher, stack)
        # After a lost process torchrun starts the same command again, which then means: resume.
        restarted = world.first and attempts.continues(out)
        if world.first:
            patience = max(LET_GO, config.hang_limit) if restarted else 0.0  # the one before may be about to end
            instead = "choose another folder with --out"
            stack.enter_context(only_one(out / ".lock", f"the run in {config.out}", instead, patience))
        claimed = (_claim(config, resume or restart or restarted), restarted) if world.first else None
        resumed, restarted = world.share(claimed) or (None, False)
        attempts.record(out, world)
        for line in ignored(config, resumed) if resumed is not None else ():
            watcher.note(line)
        feeding = Trackers(resumed or config, watcher.note) if world.first else None
        new = resumed is None
        parts = _prepare(resumed or config, new, world, watcher, teacher, accept_changed_data, dataset, started)
        if feeding is not None:
            stack.push(_ended(feeding))
        if parts.config.head == "converge":
            frozen = FrozenRun(parts, watcher, started, feeding)
            result, evaluation, curves = frozen.run(), None, frozen.seen
        else:
            loop = Loop(parts, watcher, started, feeding, published.push if published is not None else None)
            found = resumed is not None and loop.resume(restart and not restarted, accept_changed_data)
            if resumed is not None and not found:
                watcher.note("there is no checkpoint: the run starts with its first step")
            attempts.record(out, world, step=loop.step)
            if parts.config.states == "once" and loop.progress() < 1:
                states.keep(loop, watcher)
            result, evaluation, curves = loop.run(resumed=found), loop.evaluation, loop.seen
        parts.loader.close()
        if world.first:
            shutil.rmtree(out / states.FOLDER, ignore_errors=True)
            result = _advised(parts, result, curves)
            if dataset is None:
                _draw(parts, result, watcher)
                kept = read_json(result.out / "config.json")
                write_text(result.out / CARD, card_of(kept, result, evaluation, parts.task.outputs.kind))
            about = {**result.to_dict(), "metric": result.score.key, "higher": result.score.higher}
            # Last: whoever finds it takes the run for finished, and would miss what a kill left out.
            write_json(result.out / "result.json", {k: v for k, v in about.items() if k != "out"})
            if published is not None:
                published.push()
        if feeding is not None:
            feeding.close(result, "finished")
        return result


def _ended(feeding: Trackers) -> Callable[[type[BaseException] | None, BaseException | None, object], None]:
    """What the trackers hear of a run that does not come to its end."""

    def close(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            feeding.close(None, "stopped" if issubclass(kind, Stopped | KeyboardInterrupt) else "failed")

    return close


def _published(config: TrainConfig, world: World, watcher: Watcher, stack: ExitStack) -> Publisher | None:
    """What publishes the run of the first process where --out is a URL. Each machine gets the run as it is there."""
    if not is_url(config.out):
        return None
    if config.shard and int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) < world.size:
        raise ConfigError("--shard on several machines needs an --out that all of them share, not a URL")
    publisher = Publisher(config.out, watcher)
    if world.first:
        stack.enter_context(publisher.claimed())
    world.wait()
    if not world.first and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        publisher.pull()
    world.wait()
    return publisher if world.first else None


def _prepare(
    config: TrainConfig,
    new: bool,
    world: World,
    watcher: Watcher,
    teacher: nn.Module | None,
    accept: bool | None = None,  # changed data; None: whether it changed does not matter
    dataset: Dataset | None = None,
    started: float = 0.0,
) -> Parts:
    """The parts of a configuration; that of a new run is completed and written down first."""
    labelled = not config.task or TASKS[config.task].kind is not None
    how = {"target": config.target, "classes_from": config.classes_from, "labelled": labelled}
    data = dataset or open_data(config.data, watcher, **how)  # type: ignore[arg-type]
    if world.first and not new and accept is not None:
        _compare_data(workplace(config.out), data, watcher, accept)
    init = open_init(config)
    reasons: list[str] = []
    if new:
        asked = config
        config, reasons = complete(asked, data, world, init.config if init else None)
        took = {} if dataset is not None else _by_threads(asked, config, data, world, init, teacher)
        if world.device.type == "cpu" and (world.size == 1 or config.processes > 1) and not asked.threads:
            room = max(1, (os.cpu_count() or 1) // world.size)
            chosen = {"threads": threads.fastest(took) if took else min(torch.get_num_threads(), room)}
            asked, config = asked.replace(**chosen), config.replace(**chosen)
            threads.apply(config, world)  # a budget is for steps with as many
        if config.budget:
            config, reasons = budget.keep(asked, config, reasons, data, world, init, started, teacher)
        if took:
            config = config.replace(costs={**config.costs, "threads": {str(n): s for n, s in took.items()}})
            reasons.append(f"threads: {config.threads}, as measured: {threads.in_words(took)} (else: --set threads=N)")
        warnings = (leakage(data) or leak_warning(config.data),) if world.first else ()
        for line in (*reasons, *warnings):
            if line:
                watcher.note(line)
    threads.apply(config, world)
    parts = assemble(config, world, data, watcher, init, teacher)
    if new:
        reasons += (said := states.decide(parts))
        config = parts.config
        for line in said:
            watcher.note(line)
    if new and world.first:
        if init is not None:
            learning, every = (sum(p.numel() for p in some) for some in (parts.learning, parts.trainee.parameters()))
            reasons.append(f"parameters: {learning:,} of {every:,} learn")
            watcher.note(reasons[-1])
        compared = _compare(parts, watcher) if dataset is None and config.baseline == "yes" else []
        _write_config(config, parts, reasons, compared)  # from then on the folder is known as that of a run
        write_json(workplace(config.out) / DATA, identity(data))
    return parts


def _by_threads(
    asked: TrainConfig,
    config: TrainConfig,
    data: Dataset,
    world: World,
    init: Checkpoint | None,
    teacher: nn.Module | None,
) -> dict[int, float]:
    """Seconds by number of threads, where there is a choice; where a budget chooses the image size, at the smallest."""
    if world.device.type != "cpu" or world.size > 1 or config.shard or config.threads or len(threads.numbers()) == 1:
        return {}
    own = budget.open_size(asked, init, task_for(config, data.split("train")))
    sized = config if own is None else config.replace(image_size=budget.sizes_of(own)[-1])
    return by_threads(sized, data, world, init, teacher)


def _claim(config: TrainConfig, resume: bool) -> TrainConfig | None:
    """The configuration of the run in the folder when it is resumed; an error when a new one would overwrite it."""
    path = workplace(config.out) / "config.json"
    if not resume:
        taken = [name for name in OURS if (path.parent / name).exists()]
        if "config.json" in taken:
            hint = "continue it with --resume, or choose another folder with --out"
            raise TrainError(f"{config.out} already holds a run; {hint}")
        if taken:
            what = f"{config.out} holds {', '.join(taken)}, which a run would overwrite, and no run of vitkit"
            raise TrainError(f"{what}; choose another folder with --out")
        return None
    try:
        saved = TrainConfig.from_dict(read_json(path)["train"])
    except FileNotFoundError:
        hint = "give its folder with --out, or leave out --resume"
        raise TrainError(f"{config.out} holds no run to resume; {hint}") from None
    except (ValueError, KeyError, TypeError) as e:
        raise TrainError(f"{path} cannot be read ({e}); restore it, or start in another folder") from e
    if config.data and config.data != saved.data:
        raise ConfigError(f"the run in {config.out} was trained on {saved.data}, not on {config.data}")
    given = config.hang_limit != TrainConfig.hang_limit  # of the machines, not of the run: it may change
    return saved.replace(out=config.out, hang_limit=config.hang_limit if given else saved.hang_limit)


def _compare_data(out: Path, data: Dataset, watcher: Watcher, accept: bool) -> None:
    """An error when the data set is not what it was, unless that is accepted; then it counts from now on."""
    now, kept = identity(data), (out / DATA).exists()
    try:
        before = {str(k): str(v) for k, v in read_json(out / DATA).items()}
    except FileNotFoundError:  # a run of version 0.1, which kept less, or one that was killed in its first second
        before = _kept_by_0_1(out / "config.json")
        named = {"classes": now["classes"]} if "classes" in before else {}
        now = {**named, **{s: f"{n} images" for s, n in data.splits.items()}}
    except (OSError, ValueError, AttributeError) as e:
        before = {DATA: f"damaged ({e})"}
    if not (changes := difference(before, now)):
        if not kept:
            write_json(out / DATA, identity(data))
        return
    what = f"{data.name} is not what it was when the run in {out} was started: {changes}"
    if not accept:
        raise TrainError(f"{what}. Restore it, or continue all the same with --accept-changed-data")
    watcher.note(what)
    write_json(out / DATA, identity(data))


def _kept_by_0_1(path: Path) -> dict[str, str]:
    try:
        kept = read_json(path)
        named = {"classes": ", ".join(kept["classes"])} if kept["classes"] else {}  # pre-training does not keep them
        return {**named, **{s: f"{n} images" for s, n in kept["splits"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise TrainError(f"{path} cannot be read ({e}); restore it, or start in another folder") from e


def ignored(asked: TrainConfig, saved: TrainConfig) -> list[str]:
    """A line for each setting that was given and differs from the run's, which continues with its own."""
    plain = TrainConfig(data=asked.data, out=asked.out).to_dict()
    now, then = asked.to_dict(), saved.to_dict()
    now["changes"] = {**saved.changes, **asked.changes}  # the recipe may have added some
    given = [name for name, value in now.items() if value not in (plain[name], then[name])]
    if "epochs" in given and then["steps"]:
        given.remove("epochs")  # they became steps when the run was started
    return [f"{name}={now[name]} is not used: the run continues as it was, with {name}={then[name]}" for name in given]


def _compare(parts: Parts, watcher: Watcher) -> list[Baseline]:
    found, score = baselines(parts, budget.baseline_seconds(parts.config)), parts.task.score
    for one in found:
        reached = f"validation {score.words} {score.text(one.score)} by a linear model on {one.features}"
        watcher.note(f"baseline: {reached}, learned from {one.learned_from:,} images in {one.seconds:.1f} s")
    return found


def _advised(parts: Parts, result: Result, how: Curves) -> Result:
    """The result with what was found before the run, and what would help most after it."""
    compared = read_json(result.out / "config.json").get("baseline", [])
    result = replace(result, baseline=tuple(compared))
    if parts.task.pretrains or not result.validation:
        return result
    source, of_val = parts.loader.source, result.images.get("validation", (0, 0))[0]
    about = (result.score, parts.config.data, len(source), max(image_size(source)), parts.config.init is not None)
    found = how._replace(baselines=(*map(Baseline.of, compared), *how.baselines))
    return replace(result, advice=tuple(advise(Seen(*about, of_val, found))))


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m vitkit" if name == "__main__.py" else name


def _write_config(config: TrainConfig, parts: Parts, reasons: list[str], compared: list[Baseline]) -> None:
    versions = {"vitkit": __version__, "python": platform.python_version(), "torch": torch.__version__}
    about = {
        "train": config.to_dict(),
        "model": {"kind": type(parts.model).__name__, **parts.model.config.to_dict()},
        "classes": list(parts.task.outputs.names),
        "splits": parts.loader.source.splits,
        "chosen": reasons,
        "baseline": [one.to_dict() for one in compared],
        "command": " ".join([_program(), *sys.argv[1:]]),
        "versions": {**versions, "numpy": numpy.__version__, "pillow": PIL.__version__},
        "machine": {"cores": os.cpu_count(), "device": parts.world.device.type, "processes": parts.world.size},
    }
    write_json(workplace(config.out) / "config.json", about)


def _draw(parts: Parts, result: Result, watcher: Watcher) -> None:
    """`curves.png`, and what pre-training shows, where matplotlib is installed."""
    out, section = result.out, curves_of(read_log(result.out))
    try:
        with styled():
            save_png(section.draw(), out / "curves.png", result.verdict.split(";")[0] or section.finding, section.alt)
            if parts.task.pretrains:
                draw_pretraining(parts, out, result.verdict)
    except MissingPackage as e:
        watcher.note(f"no curves.png: {e}")


# --- replay ------------------------------------------------------------------------------------------


def replay(folder: Path) -> list[str]:
    """Run a step whose loss was not finite again, layer by layer, and say where the first number went wrong."""
    config, state, batch = _read_replay(folder)
    config = config.replace(compile="no", shard=False)
    loop = Loop(_prepare(config, False, worlds.join(config.device), Watcher(), None), Watcher(), 0.0)
    put_back(loop, state, accept_order=True)  # the batch is kept beside it
    if batch.images.is_floating_point():
        loop.parts.trainee.start = states.frozen_blocks(config)
    model, wrong = loop.parts.model, []

    def look(name: str, output: object) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and not tensor.isfinite().all():
            wrong.append(name)

    for name, module in list(model.named_modules())[1:]:  # all but the model itself
        module.register_forward_hook(lambda _, inputs, output, name=name: look(name, output))
    weights = [n for n, p in model.named_parameters() if not p.isfinite().all()]
    images, targets = loop.inputs(batch, loop.progress() if config.steps else 0.5)
    loss = loop.backward(images, targets).item()
    return [
        f"step {loop.step}: loss {loss}, {len(batch)} images, indices {batch.indices[:8].tolist()} ...",
        f"images: {images.min():.3g} to {images.max():.3g}, all finite: {bool(images.isfinite().all())}",
        f"weights that are not finite: {', '.join(weights[:5]) or 'none'}",
        f"first layer whose output is not finite: {wrong[0] if wrong else 'none'}",
    ]


def _read_replay(folder: Path) -> tuple[TrainConfig, State, Batch]:
    if (folder / "log.jsonl").exists():  # the folder of a run was given
        folder /= "replay"
        if not folder.is_dir():
            raise TrainError(f"no step of the run in {folder.parent} went wrong: there is nothing to replay")
    try:
        config = TrainConfig.from_dict(read_json(folder / "config.json"))
        kept = torch.load(folder / "step.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError) as e:
        reason = "one is made when a run stops because its loss is not finite"
        raise TrainError(f"{folder} holds no replay ({e}); {reason}") from e
    batch = kept["batch"] | {"keys": kept["batch"]["keys"].numpy().view("uint64")}
    return config, kept["state"], Batch(**batch)
