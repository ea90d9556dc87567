"""Where the time of a model goes on this machine: by layer, by kind of work, and beside what the machine could do.

PyTorch's profiler gives every operation with the time that is its own; each module of the model marks its calls. So
every moment of a pass belongs to one place and one kind, and the shares add up to 1. Marks and profiler cost time too,
all of it between operations: that time is scaled so that the whole is the time of the model without them.

The roofline: an operation needs at least flops / (the fastest matrix product of this machine), and at least
bytes / (its memory bandwidth), both measured here. What it took beyond that is what a better kernel could win.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.profiler_util import FunctionEvent

from vitkit.data import normalise
from vitkit.display import Grid, Part, Shown
from vitkit.errors import ConfigError
from vitkit.figures.profile import Slice, save_icicle
from vitkit.progress import SILENT, Progress
from vitkit.runtime.base import config_of, made_up
from vitkit.runtime.limits import Limits, machine_limits

MARK = "vitkit: "  # before the path of a module
PYTHON = "Python and dispatch"
COLUMNS = ("kind of work", "ms", "share", "GFLOP", "of the limit")
KINDS: dict[str, tuple[str, ...]] = {  # kind of work -> operations, without "aten::"
    "matrix products": ("addmm", "mm", "bmm", "baddbmm", "_addmm_activation", "mkldnn_linear"),
    "attention": ("scaled_dot_product_attention", "softmax", "_softmax"),
    "convolutions": ("convolution", "conv2d", "_convolution", "mkldnn_convolution"),
    "norms": ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "batch_norm"),
    "activations": ("gelu", "relu", "silu", "sigmoid", "tanh", "clamp_min"),
    "additions": ("add", "add_", "mul", "mul_", "addcmul", "sub", "div", "sum", "mean"),
    "copies": ("copy_", "clone", "contiguous", "cat", "stack", "index", "gather", "scatter", "pad", "to", "_to_copy"),
}
_KIND_OF = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
OTHER = "other operations"
_VIEWS = "view reshape transpose t permute as_strided slice select expand unbind narrow squeeze unsqueeze flatten "
_VIEWS += "unflatten empty empty_like empty_strided resize_ linear resolve_conj resolve_neg detach alias chunk split"
_DISPATCH = {f"aten::{name}" for name in _VIEWS.split()}  # they move no numbers: what they take is dispatch


@dataclass(frozen=True)
class Cell:
    """What one kind of work took in one module, per batch."""

    path: tuple[str, ...]  # of the module: ("block 3", "mlp", "up"); () for the model itself
    kind: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Line:
    """A row of a table: a kind or a layer."""

    name: str
    seconds: float
    share: float
    flops: float
    limit: float  # the least seconds that the machine allows

    @property
    def reached(self) -> float | None:
        """Of the limit; None where nothing is computed."""
        return self.limit / self.seconds if self.seconds and self.limit else None

    def cells(self) -> tuple[str, ...]:
        flops = f"{self.flops / 1e9:.2f}" if self.flops else ""
        reached = "" if self.reached is None else f"{min(1.0, self.reached):.0%}"
        return self.name, f"{1e3 * self.seconds:.2f}", f"{self.share:.1%}", flops, reached


@dataclass(frozen=True)
class Profile(Shown):
    """The time of one batch, in cells that add up to it."""

    name: str
    batch: int
    size: tuple[int, int]
    threads: int
    cells: tuple[Cell, ...]
    limits: Limits

    @property
    def seconds(self) -> float:
        return math.fsum(cell.seconds for cell in self.cells)

    @property
    def by_kind(self) -> list[Line]:
        return sorted(self._lines(lambda cell: cell.kind), key=lambda line: -line.seconds)

    @property
    def by_layer(self) -> list[Line]:
        """In the order in which they ran."""
        return self._lines(lambda cell: cell.path[0] if cell.path else self.name)

    def _lines(self, key: Callable[[Cell], str]) -> list[Line]:
        groups: dict[str, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            groups[key(cell)].append(cell)
        return [self._line(name, cells) for name, cells in groups.items()]

    def _line(self, name: str, cells: list[Cell]) -> Line:
        taken = math.fsum(cell.seconds for cell in cells)
        least = math.fsum(self.limits.seconds(cell.flops, cell.bytes) for cell in cells)
        return Line(name, taken, taken / self.seconds, math.fsum(cell.flops for cell in cells), least)

    def line(self, kind: str) -> Line | None:
        return next((line for line in self.by_kind if line.name == kind), None)

    def share(self, *kinds: str) -> float:
        return math.fsum(line.share for line in self.by_kind if line.name in kinds)

    def advice(self) -> list[str]:
        return [words for rule in ADVICE if (words := rule(self))]

    def draw(self, out: Path) -> None:
        save_icicle([Slice(cell.path, cell.kind, cell.seconds) for cell in self.cells], out, self.name, self.batch)

    def parts(self) -> Iterable[Part]:
        yield f"{self.name}, batch {self.batch}: {1e3 * self.seconds:.1f} ms, {self.batch / self.seconds:.1f} img/s"
        yield Grid([COLUMNS, *(line.cells() for line in self.by_kind)])
        yield "\n".join(self.advice())

    def to_dict(self) -> dict[str, object]:
        about = {"model": self.name, "batch": self.batch, "image_size": list(self.size), "threads": self.threads}
        limits = {"gflops": self.limits.flops / 1e9, "gigabytes_per_second": self.limits.bandwidth / 1e9}
        tables = {"kinds": self.by_kind, "layers": self.by_layer}
        rows = {name: [vars(line) | {"reached": line.reached} for line in table] for name, table in tables.items()}
        return about | {"seconds": self.seconds, "limits": limits, **rows, "advice": self.advice()}


# --- what would help: each rule says it in words, with the command to type, or is silent ------------------------


def _busy(found: Profile) -> str:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= _cores() + 1:
        return ""
    return f"the machine is busy (load {load:.1f}, {_cores()} cores): measure again when it is idle"


def _small_batch(found: Profile) -> str:
    if (share := found.share(PYTHON)) < 0.15:
        return ""
    more, tune = f"take more images at once (--batch {4 * found.batch})", f"vitkit tune {found.name} --latency"
    return f"{share:.0%} is Python between operations: {more}, or a runtime without Python: {tune}"


def _at_limit(found: Profile) -> str:
    line = found.line("matrix products")
    if line is None or line.share < 0.6 or (line.reached or 0.0) <= _NEAR:
        return ""
    what = f"{line.share:.0%} are matrix products at {line.reached:.0%} of the limit of this machine"
    tune = f"vitkit tune {found.name} DATA --max-drop 0.5%"
    return f"{what}: only fewer or smaller ones are faster. int8 and token merging, and the accuracy they cost: {tune}"


def _far_from_limit(found: Profile) -> str:
    line = found.line("matrix products")
    if line is None or line.share < 0.3 or (line.reached or 1.0) > _NEAR:
        return ""
    what = f"matrix products reach {line.reached:.0%} of what this machine can do"
    return f"{what}: they are small here; try --batch {4 * found.batch}, or fewer threads: OMP_NUM_THREADS=1"


def _many_tokens(found: Profile) -> str:
    if (share := found.share("attention")) < 0.25:
        return ""
    smaller, tune = "x".join(str(side // 2) for side in found.size), f"vitkit tune {found.name} DATA"
    what = f"{share:.0%} is attention, which grows with the square of the tokens"
    return f"{what}: smaller images (--image-size {smaller}), or merged tokens: {tune}"


def _between_products(found: Profile) -> str:
    if (share := found.share("norms", "activations", "additions", "copies")) < 0.25:
        return ""
    what = f"{share:.0%} are norms, activations, additions and copies, which wait for memory"
    return f"{what}: runtimes that fuse them are faster: vitkit tune {found.name} --runtimes onnx,openvino,compiled"


def _idle_cores(found: Profile) -> str:
    if found.threads >= _cores():
        return ""
    return f"{found.threads} of {_cores()} cores were used: set OMP_NUM_THREADS={_cores()}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_NEAR = 0.6  # of the limit
ADVICE = (_busy, _small_batch, _at_limit, _far_from_limit, _many_tokens, _between_products, _idle_cores)


def name_of(model: object) -> str:
    """What a model is called: the name of its file, or how it was asked for."""
    if not isinstance(model, str | Path):
        return "model"
    return Path(model).name if Path(model).exists() else str(model)


# --- measuring ----------------------------------------------------------------------------------------------


def profile(
    model: nn.Module,
    batch: int = 8,
    name: str = "model",
    seconds: float = 2.0,
    images: Tensor | None = None,
    progress: Progress = SILENT,
) -> Profile:
    """Run a model, as PyTorch does by itself, for about so many seconds without and again with the profiler.

    images  the batch to run; None: made-up ones, `batch` of them at the model's size
    """
    if batch < 1:
        raise ConfigError(f"--batch {batch} must be at least 1")
    if images is None:
        config = config_of(model)
        images = normalise(made_up(config, batch), config.preprocessing)
    first = next(model.parameters(), torch.empty(0))
    images, model = images.to(first.device, first.dtype), model.eval()
    progress.note("measuring the machine ...")
    limits = machine_limits(first.dtype, first.device)
    progress.note("measuring the model ...")
    whole = partial(_run, model, images)
    clean, rounds = _median(whole, seconds)
    events = _events(model, whole, max(2, min(rounds, 20)))
    size = (images.shape[-2], images.shape[-1])
    cells = tuple(_cells(events, clean, first.element_size()))
    return Profile(name, len(images), size, torch.get_num_threads(), cells, limits)


@torch.inference_mode()
def _run(model: nn.Module, images: Tensor) -> None:
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()


def _median(run: Callable[[], None], seconds: float) -> tuple[float, int]:
    """The median time of a call, and how many were made."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 200):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), len(taken)


@contextmanager
def _marked(model: nn.Module) -> Iterator[None]:
    """While it lasts, every module says when it begins and ends."""
    open_marks: list[torch.profiler.record_function] = []
    hooks = []

    def begin(path: str, *_: object) -> None:
        mark = torch.profiler.record_function(f"{MARK}{path}")
        mark.__enter__()
        open_marks.append(mark)

    def end(*_: object) -> None:
        open_marks.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(begin, path)))
        hooks.append(module.register_forward_hook(end))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _events(model: nn.Module, run: Callable[[], None], rounds: int) -> list[list[FunctionEvent]]:
    """The operations of each round."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes to the error stream when it starts
    kinds = [torch.profiler.ProfilerActivity.CPU]
    found = []
    with _marked(model):
        run()
        for _ in range(rounds):
            with torch.profiler.profile(activities=kinds, record_shapes=True, with_flops=True) as profiler:
                run()
            found.append(list(profiler.events() or ()))
    return found


def _cells(rounds: list[list[FunctionEvent]], clean: float, width: int) -> Iterator[Cell]:
    """Each the median of the rounds, with the time between operations scaled so that the whole is `clean` seconds."""
    found = [_added_up(events, width) for events in rounds]
    median = {key: statistics.median(one[key][0] if key in one else 0.0 for one in found) for key in found[0]}
    computed = math.fsum(taken for (_, kind), taken in median.items() if kind != PYTHON)
    between = math.fsum(taken for (_, kind), taken in median.items() if kind == PYTHON)
    scale = max(0.0, clean - computed) / between if between else 1.0
    for (path, kind), (_, flops, moved) in found[0].items():
        taken = median[path, kind]
        if taken or flops:
            yield Cell(path, kind, taken * (scale if kind == PYTHON else 1.0), flops, moved)


def _added_up(events: list[FunctionEvent], width: int) -> dict[tuple[tuple[str, ...], str], list[float]]:
    """Seconds, flops and bytes by module and kind, in the order in which they come first."""
    found: dict[tuple[tuple[str, ...], str], list[float]] = {}
    for event in sorted(events, key=lambda e: e.time_range.start):
        path, kind, top = _place(event)
        if path is None:
            continue  # outside of the model: the profiler itself
        cell = found.setdefault((path, kind), [0.0, 0.0, 0.0])
        cell[0] += event.self_cpu_time_total / 1e6
        if event is top:  # once for an operation, not again for those it consists of
            cell[1] += _flops(event)
            cell[2] += _bytes(event, width)
    return found


def _place(event: FunctionEvent) -> tuple[tuple[str, ...] | None, str, FunctionEvent | None]:
    """Module, kind, and the outermost operation that has this kind: what an operation calls is part of it."""
    kind, top = PYTHON, None
    at: FunctionEvent | None = event
    while at is not None and not at.name.startswith(MARK):
        if at.name in _KIND_OF:
            kind, top = _KIND_OF[at.name], at
        elif at.name not in _DISPATCH and at.name.startswith("aten::") and top is None:
            kind, top = OTHER, at
        at = at.cpu_parent
    return (None if at is None else _words(at.name.removeprefix(MARK))), kind, top


def _words(path: str) -> tuple[str, ...]:
    """encoder.blocks.3.mlp.up -> block 3, mlp, up; stem.blocks.0.convs.1 -> stem block 0, convs, 1"""
    names = [name for name in path.split(".") if name]
    for i, name in enumerate(names[:-1]):
        if name in ("blocks", "stages") and names[i + 1].isdecimal():
            where = "stem " if names[:i] == ["stem"] and name == "blocks" else ""
            return (f"{where}{name[:-1]} {names[i + 1]}", *names[i + 2 :])
    return tuple(names)


def _flops(event: FunctionEvent) -> float:
    """Multiplications and additions; those of an operation that others do are found in them."""
    if event.name == "aten::scaled_dot_product_attention":
        (*batch, n, width), (*_, m, _) = _shapes(event)[:2]
        return 4.0 * math.prod(batch) * n * m * width
    counted = event.flops or 0
    return float(counted or math.fsum(_flops(child) for child in event.cpu_children))


def _shapes(event: FunctionEvent) -> list[list[int]]:
    """Of the inputs that are tensors; lists of tensors are left out."""
    given: list[list[int]] = list(event.input_shapes or ())  # type: ignore[arg-type]
    return [shape for shape in given if shape and all(isinstance(n, int) for n in shape)]


def _bytes(event: FunctionEvent, width: int) -> float:
    """At least: every input read, and as much as the largest written; of a product, its result."""
    shapes = _shapes(event)
    sizes = [math.prod(shape) for shape in shapes]
    if not sizes:
        return 0.0
    matrices = [shape for shape in shapes if len(shape) == 2]
    product = _KIND_OF.get(event.name) == "matrix products" and len(matrices) >= 2
    written = matrices[-2][0] * matrices[-1][1] if product else max(sizes)
    return float(width * (sum(sizes) + written))
