"""Try every runtime that is here, in every precision, with more and less merging; keep the fastest that is accurate.

First the speed of every configuration at one batch size. Then, from the fastest to the slowest, its accuracy; the
first that loses little enough is the winner: nothing slower can beat it. At last its batch sizes and threads.

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
from functools import reduce
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, VitkitError
from vitkit.io import cache_folder, canonical, dumps, parse_json, replacing_folder, sha256
from vitkit.model.base import VisionModel
from vitkit.model.config import ViTConfig
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import Calibration, Choice, Runtime, build, config_of
from vitkit.runtime.export import written
from vitkit.runtime.table import FORMATS, RUNTIMES
from vitkit.runtime.verify import Check, Images, compare_outputs, outputs_of
from vitkit.world import accelerators

FEWEST = 20  # images; fewer say nothing about int8 and merging, which are then not chosen
_BATCH = 8  # for throughput, while configurations are compared
_SIZES = (1, 4, 8, 16, 32)
_FILE = "tuned.json"


@dataclass(frozen=True)
class Row:
    """One configuration. Empty fields were not needed, or `problem` says why they are empty."""

    choice: Choice
    speed: float | None = None  # img/s
    ratio: float | None = None  # to PyTorch as it is, at the same batch size
    check: Check | None = None
    problem: str | None = None

    def cells(self) -> dict[str, str]:
        """What people read, with the keys of version 0.1."""
        speed = (self.problem or "") if self.speed is None else f"{self.speed:.1f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        right = "" if self.check is None else self.check.text(self.check.score)
        batch, threads = str(self.choice.batch_size), str(self.choice.threads or "all")
        how = {"way": self.choice.name, "batch": batch, "threads": threads}
        return {**how, "images_per_second": speed, "ratio": ratio, "right": right}


@dataclass(frozen=True)
class Tuned:
    rows: list[Row]
    winner: Row
    images: str
    labelled: bool
    device: str

    @property
    def score_words(self) -> str:
        metric = None if self.winner.check is None else self.winner.check.metric
        return metric.words if self.labelled and metric is not None else "agreement with the model"

    def report(self) -> dict[str, object]:
        rows = [{**asdict(row), "check": row.check and row.check.to_dict()} for row in self.rows]
        return {"pictures": self.images, "labelled": self.labelled, "device": self.device, "rows": rows}


def configurations(model: VisionModel, kinds: list[str], batch_size: int, calibrated: bool) -> Iterator[Choice]:
    """Every runtime x precision x merging that makes sense for this model."""
    for merge, kind in product((0, *merges(model)), kinds):
        plain = Choice(kind, merge=merge, batch_size=batch_size)
        yield plain
        if RUNTIMES[kind].usable(int8=True):
            yield replace(plain, int8=True)
            if calibrated and not merge:
                yield replace(plain, int8=True, calibrated=True)


def merges(model: VisionModel) -> list[int]:
    """Patches per block that leave a third of them or more at the end, for models that can merge."""
    config = model.config
    if not model.mergeable or not isinstance(config, ViTConfig):
        return []
    shares = (config.grid[0] * config.grid[1] * part / config.depth for part in (0.25, 0.5, 0.8))
    return sorted({round(share) for share in shares if round(share) >= 1})


def tune(
    model: VisionModel,
    images: Images,
    max_drop: float = 0.005,
    latency: bool = False,
    kinds: list[str] | None = None,
    calibration: Calibration | None = None,
    seconds: float = 1.0,
    progress: Progress = SILENT,
) -> Tuned:
    """`max_drop` is of the accuracy (R2, for values), or of the agreement where there are no labels."""
    if not model.config.classes:
        raise ConfigError("the model has no classifier (classes=0), so no configuration has an accuracy")
    search = _Search(model, images, calibration, seconds, progress)
    size = 1 if latency else min(_BATCH, len(images))
    kinds = kinds or [name for name, row in RUNTIMES.items() if row.usable()]
    choices = list(configurations(model, kinds, size, calibration is not None))
    for choice in progress.track(choices, "measuring"):
        search.measure(choice)
    winner = search.refined(search.first_accurate(max_drop), latency)
    return Tuned(search.rows, winner, images.name, images.labels is not None, next(model.parameters()).device.type)


@dataclass
class _Search:
    """What `tune` has measured so far."""

    model: VisionModel
    images: Images
    calibration: Calibration | None
    seconds: float
    progress: Progress
    rows: list[Row] = field(default_factory=list)
    opened: tuple[Choice, Runtime] | None = None  # one at a time: each holds all weights

    def open(self, choice: Choice) -> Runtime:
        if self.opened is None or self.opened[0] != choice:
            self.opened = None  # before another takes its memory
            self.opened = (choice, build(self.model, choice, self.calibration))
        return self.opened[1]

    def outputs(self, choice: Choice) -> Tensor:
        return outputs_of(self.open(choice), self.images, self.model.config, choice.batch_size)

    def speeds(self, runtimes: dict[str, Runtime], size: int) -> dict[str, float]:
        return images_per_second(runtimes, next(self.images.batches(self.model.config, size)), self.seconds)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        self.progress.note("  ".join(row.cells().values()))
        return row

    def measure(self, choice: Choice) -> None:
        """Beside PyTorch as it is, in turns: the ratio holds also when the machine is busy."""
        try:
            speeds = self.speeds({"it": self.open(choice), "eager": build(self.model, Choice())}, choice.batch_size)
            self.add(Row(choice, speeds["it"], speeds["it"] / speeds["eager"]))
        except (VitkitError, RuntimeError) as e:
            self.add(Row(choice, problem=str(e).splitlines()[0][:100]))

    def first_accurate(self, max_drop: float) -> Row:
        enough = len(self.images) >= FEWEST
        usable = [i for i, row in enumerate(self.rows) if row.ratio is not None and (enough or row.choice.exact)]
        expected = self.outputs(Choice(batch_size=_BATCH))
        for i in sorted(usable, key=lambda i: -(self.rows[i].ratio or 0)):
            outputs = self.outputs(self.rows[i].choice)
            check = compare_outputs(self.model, expected, outputs, self.images, exact=False)
            self.rows[i] = replace(self.rows[i], check=check)
            if check.drop <= max_drop + 1e-9:
                return self.rows[i]
        raise ConfigError("no runtime could run the model; `vitkit predict --runtime eager` says why")

    def refined(self, winner: Row, latency: bool) -> Row:
        """Other batch sizes (for throughput) and numbers of threads; neither changes an answer."""
        cores = os.cpu_count() or 1
        sizes = [winner.choice.batch_size] if latency else [s for s in _SIZES if s <= len(self.images)]
        best = winner
        for threads in (None, *([cores // 2] if cores > 2 else [])):
            runtime = self.open(replace(winner.choice, threads=threads))
            choices = (replace(winner.choice, batch_size=size, threads=threads) for size in sizes)
            for choice in (c for c in choices if c != winner.choice):
                speed = self.speeds({"it": runtime}, choice.batch_size)["it"]
                row = self.add(Row(choice, speed, check=winner.check))
                if speed > (best.speed or 0) * 1.03:  # less is noise
                    best = row
        return best


def images_per_second(runtimes: dict[str, Runtime], images: Tensor, seconds: float) -> dict[str, float]:
    """Interleaved, so that a disturbance meets all alike; the fastest call of each, the least disturbed, counts."""
    best = dict.fromkeys(runtimes, float("inf"))
    for runtime in runtimes.values():
        runtime.run(images)  # the first call allocates, and may compile
    start, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds * len(runtimes):
        for name, runtime in runtimes.items():
            before = time.perf_counter()
            runtime.run(images)
            best[name] = min(best[name], time.perf_counter() - before)
        rounds += 1
    return {name: len(images) / t for name, t in best.items()}


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
    numbers = (choice.merge, choice.batch_size, 1 if choice.threads is None else choice.threads)
    if not all(type(n) is int and 0 <= n < 1 << 20 for n in numbers) or not choice.batch_size:
        raise ValueError("numbers out of range")


def _choice(model: nn.Module, folder: Path) -> Choice | str:
    """What is stored, or why it cannot be used."""
    try:
        about = parse_json((folder / _FILE).read_text(encoding="utf-8"))
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
