"""Try every runtime that is here, in every precision, with more and less merging; keep the fastest that is accurate.

First the speed of every configuration at one batch size. Then, from the fastest to the slowest, its accuracy; the
first that loses little enough is the winner: nothing slower can beat it. At last its batch sizes and threads. What is
measured is kept at once (`kept.py`), so that a search which is killed continues where it was.

What was found is kept beside the model: `model.safetensors.tuned/` or `run-folder/tuned/`. It counts only for the same
weights on the same kind of machine; otherwise PyTorch runs the model, and a note says why.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, VitkitError
from vitkit.io import cache_folder, canonical, dumps, read_json, replacing_folder, sha256
from vitkit.model.base import VisionModel
from vitkit.model.merge_plan import MergePlan
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Calibration, Choice, Runtime, build, config_of, thread_count
from vitkit.runtime.confirm import Confirmed, confirm
from vitkit.runtime.export import written
from vitkit.runtime.kept import Kept, Row, digest_of_images, versions
from vitkit.runtime.reductions import SCALES, Reduction, plain_reductions, reductions
from vitkit.runtime.reductions import merges as merges
from vitkit.runtime.speed import images_per_second, in_words
from vitkit.runtime.table import FORMATS, RUNTIMES
from vitkit.runtime.verify import Check, Images, compare_outputs, outputs_of
from vitkit.world import accelerators

FEWEST = 20  # images; fewer say nothing about int8 and merging, which are then not chosen
_BATCH = 8  # for throughput, while configurations are compared
_SIZES = (1, 4, 8, 16, 32)
_MAKING = {"eager": 0.1, "compiled": 45.0, "onnx": 4.0, "openvino": 5.0}  # seconds, roughly, until the first is known
_MEASURING = 0.7  # the share of a budget for speeds; the rest is for accuracy and batch sizes
_OUT_OF_TIME = "left out: --budget"
_FILE = "tuned.json"


@dataclass(frozen=True)
class Tuned:
    rows: list[Row]
    winner: Row
    images: str
    labelled: bool
    device: str
    count: int = 0  # of the images
    max_drop: float = 0.0
    confirmed: Confirmed | None = None  # on images that took no part in the choice

    @property
    def score_words(self) -> str:
        metric = None if self.winner.check is None else self.winner.check.metric
        return metric.words if self.labelled and metric is not None else "agreement with the model"

    def report(self) -> dict[str, object]:
        rows = [{**asdict(row), "check": row.check and row.check.to_dict()} for row in self.rows]
        about = {"pictures": self.images, "labelled": self.labelled, "device": self.device, "rows": rows}
        return about | ({} if self.confirmed is None else {"confirmed": self.confirmed.to_dict()})


def configurations(
    reductions: list[Reduction], kinds: list[str], batch_size: int, calibrated: bool
) -> Iterator[Choice]:
    """Every runtime x precision x reduction."""
    for reduction, kind in product(reductions, kinds):
        plain = Choice(kind, merge=reduction.merge, scale=reduction.scale, batch_size=batch_size)
        yield plain
        if RUNTIMES[kind].usable(int8=True):
            yield replace(plain, int8=True)
            if calibrated and reduction == Reduction():
                yield replace(plain, int8=True, calibrated=True)


def tune(
    model: VisionModel,
    images: Images,
    max_drop: float = 0.005,
    latency: bool = False,
    kinds: list[str] | None = None,
    calibration: Calibration | None = None,
    seconds: float = 1.0,
    progress: Progress = SILENT,
    budget: float | None = None,
    kept: Path | None = None,
    check_all: bool = False,
    held: Images | None = None,
) -> Tuned:
    """`max_drop` is of the accuracy (R2, for values), or of the agreement where there are no labels.

    budget     seconds for all of it: what does not fit is left out, the likeliest winners come first
    kept       a file for what was measured, from which a search that was killed continues
    check_all  also the accuracy of what is slower than the winner, for a figure
    held       images that take no part in the choice: the winner must keep its promise on them too
    """
    if not model.config.classes:
        raise ConfigError("the model has no classifier (classes=0), so no configuration has an accuracy")
    about: dict[str, object] = {"model": digest_of(model)}
    about |= {"images": digest_of_images(images), "machine": machine(), **versions()}
    about |= {"seconds": seconds, "threads": thread_count(None), "calibrated": calibration is not None}
    about |= {"device": next(model.parameters()).device.type}
    search = _Search(model, images, calibration, seconds, progress, Kept(kept, about, model), budget, check_all, held)
    size = 1 if latency else min(_BATCH, len(images))
    kinds = kinds or [name for name, row in RUNTIMES.items() if row.usable()]
    tried = (
        reductions(model, images, search.expected, search.late) if len(images) >= FEWEST else plain_reductions(model)
    )
    search.measure_all(list(configurations(tried, kinds, size, calibration is not None)))
    winner = search.refined(search.first_accurate(max_drop), latency)
    device = next(model.parameters()).device.type
    labelled = images.labels is not None
    return Tuned(search.rows, winner, images.name, labelled, device, len(images), max_drop, search.confirmed)


@dataclass
class _Search:
    """What `tune` has measured so far."""

    model: VisionModel
    images: Images
    calibration: Calibration | None
    seconds: float
    progress: Progress
    kept: Kept
    budget: float | None = None
    check_all: bool = False
    held: Images | None = None
    confirmed: Confirmed | None = None
    rows: list[Row] = field(default_factory=list)
    opened: tuple[Choice, Runtime] | None = None  # one at a time: each holds all weights
    started: float = field(default_factory=time.perf_counter)

    def open(self, choice: Choice) -> Runtime:
        if self.opened is None or self.opened[0] != choice:
            self.opened = None  # before another takes its memory
            self.opened = (choice, build(self.model, choice, self.calibration))
        return self.opened[1]

    def outputs(self, choice: Choice) -> Tensor:
        return outputs_of(self.open(choice), self.images, self.model.config, choice.batch_size)

    @cached_property
    def expected(self) -> Tensor:
        """Outputs of the model itself."""
        return outputs_of(build(self.model, Choice()), self.images, self.model.config, _BATCH)

    def speeds(self, runtimes: dict[str, Runtime], size: int) -> dict[str, float]:
        return images_per_second(runtimes, next(self.images.batches(self.model.config, size)), self.seconds)

    def late(self, share: float = 1.0, more: float = 0.0) -> bool:
        """Whether `more` seconds do not fit into this share of the budget."""
        return self.budget is not None and time.perf_counter() - self.started + more > share * self.budget

    def add(self, row: Row, place: str = "") -> Row:
        self.rows.append(row)
        self.progress.note(f"{place}  {row.words}".lstrip())
        return row

    # --- speed ---------------------------------------------------------------------------------------

    def measure_all(self, choices: list[Choice]) -> None:
        known = [choice for choice in choices if choice in self.kept.rows]
        again = f", {len(known)} of them measured before" if known else ""
        self.progress.note(f"{len(choices)} configurations{again}: about {in_words(self.remaining(choices))}")
        for number, choice in enumerate(choices, start=1):
            if choice in self.kept.rows:
                self.add(self.kept.rows[choice], f"[{number}/{len(choices)}, kept]")
            elif self.late(_MEASURING, self.expected_seconds(choice)) and any(row.ratio for row in self.rows):
                self.add(Row(choice, problem=_OUT_OF_TIME))
            else:
                self.kept.add(self.measure(choice))
                left = in_words(self.remaining(choices[number:]))
                last = number == len(choices)
                self.add(self.kept.rows[choice], f"[{number}/{len(choices)}{'' if last else f', about {left} left'}]")
            self.progress.update("measuring", number, len(choices))

    def remaining(self, choices: list[Choice]) -> float:
        """Seconds, and no more than the budget has left."""
        todo = [choice for choice in choices if choice not in self.kept.rows]
        total = sum(map(self.expected_seconds, todo))
        passes = (len(todo) if self.check_all and not self.kept.rows else 0) + 3  # over the images, for accuracy
        total += passes * self.batch_seconds * len(self.images) / _BATCH
        over = float("inf") if self.budget is None else self.budget - (time.perf_counter() - self.started)
        return max(0.0, min(total, over))

    def expected_seconds(self, choice: Choice) -> float:
        """What configurations of the same runtime took, or a rough guess where there was none yet."""
        took = [row.seconds for row in self.kept.rows.values() if row.choice.runtime == choice.runtime]
        rough = 2 * self.seconds + 8 * self.batch_seconds + _MAKING.get(choice.runtime, 5.0)
        return sum(took) / len(took) if took else rough

    @cached_property
    def batch_seconds(self) -> float:
        """Of PyTorch as it is, for a batch: the second one, for the first allocates."""
        eager, batch = build(self.model, Choice()), next(self.images.batches(self.model.config, _BATCH))
        eager.run(batch)
        before = time.perf_counter()
        eager.run(batch)
        return time.perf_counter() - before

    def measure(self, choice: Choice) -> Row:
        """Beside PyTorch as it is, in turns: the ratio holds also when the machine is busy."""
        before = time.perf_counter()
        try:
            speeds = self.speeds({"it": self.open(choice), "eager": build(self.model, Choice())}, choice.batch_size)
            check = self.check(choice) if self.check_all else None
            took = time.perf_counter() - before
            return Row(choice, speeds["it"], speeds["it"] / speeds["eager"], check, seconds=took)
        except (VitkitError, RuntimeError) as e:
            return Row(choice, problem=str(e).splitlines()[0][:100], seconds=time.perf_counter() - before)

    # --- accuracy ------------------------------------------------------------------------------------

    def check(self, choice: Choice) -> Check:
        return compare_outputs(self.model, self.expected, self.outputs(choice), self.images, exact=False)

    def checked(self, place: int) -> Check:
        row = self.rows[place]
        if row.check is None:
            row = self.rows[place] = replace(row, check=self.check(row.choice))
            self.kept.add(row)
        assert row.check is not None
        return row.check

    def first_accurate(self, max_drop: float) -> Row:
        enough = len(self.images) >= FEWEST
        usable = [i for i, row in enumerate(self.rows) if row.ratio is not None and (enough or row.choice.exact)]
        for i in sorted(usable, key=lambda i: -(self.rows[i].ratio or 0)):
            row = self.rows[i]
            if self.late() and row.check is None and not row.choice.exact:
                continue  # what computes the same needs no proof that it is accurate enough
            self.progress.note(f"accuracy of {row.choice.name} ...")
            if self.checked(i).drop <= max_drop + 1e-9 and self.keeps_promise(row.choice, max_drop):
                return self.rows[i]
        raise ConfigError("no runtime could run the model; `vitkit predict --runtime eager` says why")

    def keeps_promise(self, choice: Choice, max_drop: float) -> bool:
        """Also on the held-out images; what computes the same needs none."""
        self.confirmed = None
        if self.held is None or choice.exact:
            return True
        before = outputs_of(build(self.model, Choice()), self.held, self.model.config, _BATCH)
        after = outputs_of(self.open(choice), self.held, self.model.config, choice.batch_size)
        self.confirmed = confirm(self.model, before, after, self.held)
        if self.confirmed is None:
            return True
        self.progress.note(f"{choice.name}: {self.confirmed.words()}")
        return self.confirmed.drop <= max_drop + 1e-9

    def refined(self, winner: Row, latency: bool) -> Row:
        """Other batch sizes (for throughput) and numbers of threads; neither changes an answer."""
        cores = thread_count(None)
        sizes = [winner.choice.batch_size] if latency else [s for s in _SIZES if s <= len(self.images)]
        best = winner
        for threads in (None, *([cores // 2] if cores > 2 else [])):
            choices = (replace(winner.choice, batch_size=size, threads=threads) for size in sizes)
            for choice in (c for c in choices if c != winner.choice and not self.late()):
                runtime = self.open(replace(winner.choice, threads=threads))
                speed = self.speeds({"it": runtime}, choice.batch_size)["it"]
                row = self.add(Row(choice, speed, check=winner.check))
                if speed > (best.speed or 0) * 1.03:  # less is noise
                    best = row
        return best


# --- what was found, kept beside the model --------------------------------------------------------------


def machine() -> dict[str, str | int | None]:
    """The kind of machine that a measurement holds for."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    cpu = names[0] if names else platform.processor() or platform.machine()
    gpu = next((torch.cuda.get_device_name(d) for d in accelerators() if d.type == "cuda"), None)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu": cpu, "cores": os.cpu_count(), "capability": capability, "system": platform.system(), "gpu": gpu}


def fingerprint(model: nn.Module) -> str:
    """The same for the same configuration and weights."""
    return f"{reduce(lambda total, part: zlib.crc32(part, total), _bytes_of(model), 0):08x}"


def digest_of(model: VisionModel) -> str:
    """As `fingerprint`, but for all that an answer depends on, and not the same for others by chance."""
    found = hashlib.sha256(canonical(model.outputs.to_dict()).encode())
    for part in _bytes_of(model):
        found.update(part)
    return found.hexdigest()


def _bytes_of(model: nn.Module) -> Iterator[bytes | memoryview]:
    yield config_of(model).to_json().encode()
    for name, tensor in sorted(model.state_dict().items()):
        yield name.encode()
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            yield memoryview(flat.view(torch.uint8).numpy())


def tuned_folder(source: str | Path) -> Path | None:
    """Where it is kept; None for a name of the zoo, whose weights are new every time."""
    text = str(source)
    if text.startswith(("hf:", "timm:")):
        return cache_folder() / "tuned" / text.replace(":", "-").replace("/", "-")
    path = Path(text).expanduser()
    if path.is_dir():
        return path / "tuned"
    return path.with_name(f"{path.name}.tuned") if path.is_file() else None


def kept_file(source: str | Path) -> Path | None:
    """Where a search keeps what it has measured, until it is finished."""
    folder = tuned_folder(source)
    return None if folder is None else folder.with_name(f"{folder.name}.measured.json")


def store(source: str | Path, model: VisionModel, found: Tuned, calibration: Calibration | None) -> Path | None:
    """Keep a choice, and the model exported for it, so that it is not made again at every start; all or nothing."""
    folder = tuned_folder(source)
    if folder is None:
        return None
    choice, report = found.winner.choice, found.report()
    about = {"choice": asdict(choice), "machine": machine(), "model": fingerprint(model), "report": report}
    with replacing_folder(folder) as new:
        if choice.runtime in FORMATS:
            path = new / f"model{FORMATS[choice.runtime].suffix}"
            written(model, choice.runtime, path, choice.spec(calibration))
        files = {path.name: sha256(path) for path in sorted(new.iterdir())}
        (new / _FILE).write_text(dumps({**about, "files": files}, indent=1), encoding="utf-8")
    if (measured := kept_file(source)) is not None:
        measured.unlink(missing_ok=True)
    return folder


def stored(model: nn.Module, source: str | Path, progress: Progress = SILENT) -> Runtime | None:
    """The runtime that was chosen, ready to run; None, and a note, when it is not for this model on this machine."""
    folder = tuned_folder(source)
    if folder is None or not (folder / _FILE).is_file():
        return None
    choice = _choice(model, folder)
    if isinstance(choice, str):
        progress.note(f"note: {folder} {choice}")
        return None
    if choice.runtime in FORMATS:
        row = FORMATS[choice.runtime]
        module = row.load(f"running {folder}", making=False)
        runtime: Runtime = module.open_file(folder / f"model{row.suffix}", choice.name, choice.threads)
    else:
        runtime = build(model, choice)
    runtime.batch_size = choice.batch_size
    return runtime


def check_choice(choice: Choice) -> None:
    """ValueError for what no tuning writes."""
    merge = MergePlan.of(choice.merge).per_block  # or an error, which is a ValueError
    if choice.scale not in SCALES:
        raise ValueError("no such scale")
    numbers = (merge, choice.batch_size, 1 if choice.threads is None else choice.threads)
    if not all(type(n) is int and 0 <= n < 1 << 20 for n in numbers) or not choice.batch_size:
        raise ValueError("numbers out of range")


def _choice(model: nn.Module, folder: Path) -> Choice | str:
    """What is stored, or why it cannot be used."""
    try:
        about = read_json(folder / _FILE)
        choice, where, what = Choice(**about["choice"]), about["machine"], about["model"]
        device = about["report"].get("device")  # files of version 0.1 do not say
        other = [name for name, digest in about.get("files", {}).items() if sha256(folder / name) != digest]
        known = choice.runtime in RUNTIMES
        check_choice(choice)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "is damaged; run `vitkit tune` again"
    if other:
        return f"is damaged ({other[0]} is not what `vitkit tune` wrote); run it again"
    if where != machine():
        return "was measured on another machine; run `vitkit tune` here"
    if not known:
        return f"is for the runtime {choice.runtime}, which is not here; run `vitkit tune` again"
    if device not in (None, next(model.parameters()).device.type):
        return f"was measured with --device {device}; give that option, or run `vitkit tune` again"
    if what != fingerprint(model):
        return "is about other weights or another image size; run `vitkit tune` again"
    return choice
