"""What opens each case, in a child process with limits: it succeeds, or raises a VitkitError, or is a finding."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from generators import Case

import vitkit
from vitkit.checkpoints.options import ModelOptions
from vitkit.data import open_data
from vitkit.data.check import check
from vitkit.data.sources.shardindex import Stamp
from vitkit.errors import DataError, VitkitError
from vitkit.explanation.training import curves_of, read_log
from vitkit.model.base import VisionModel
from vitkit.runtime.export import open_exported
from vitkit.runtime.tuned import stored
from vitkit.training.checkpoint import Keeper
from vitkit.training.config import TrainConfig
from vitkit.training.run import _claim

MEMORY = 1 << 30  # of addresses, beyond what the process has
GROWTH = 300 << 20  # of memory in use: the files are small
SECONDS = 20.0  # of the processor; a case takes milliseconds


def attempt(name: str, case: Case) -> str:
    """Open a case as a user would; what came of it. Anything but success and a VitkitError is raised."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS) + 1))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="vitkit-fuzz-") as folder:
        os.chdir(folder)
        os.mkfifo("fifo.png")
        for path, content in case.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            TARGETS[name.split()[0]](case)
            outcome = "opened"
        except VitkitError as e:
            check_refusal(e)
            outcome = "refused"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown * 1024 < GROWTH, f"{grown} KiB of memory were used"
        return outcome


def check_refusal(error: VitkitError) -> None:
    assert str(error).strip(), "the error says nothing"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            raise cause
        cause = cause.__cause__ or cause.__context__


def open_checkpoint(case: Case) -> None:
    path = "x" if "x/config.json" in case else next(iter(case))
    native = b'"vitkit"' in case.get("x.safetensors", b"")  # says its heads; others are told
    options = ModelOptions() if native else ModelOptions(heads=2)
    use(vitkit.load(path, options=options))


def use(model: VisionModel) -> None:
    height, width = model.config.image_size
    if height * width <= 64 * 64:
        model(torch.zeros(1, model.config.channels, height, width))


def open_set(case: Case) -> None:
    """All that `vitkit data check` does: the scan, and every image."""
    check(open_data(next((n for n in case if n.startswith("x.")), "set")), workers=0)


def open_indexed(case: Case) -> None:
    """As `open_set`, with an index that is taken for fresh."""
    with mock.patch.object(Stamp, "of", return_value=Stamp(0, 0, 0)):
        open_set(case)


def open_run(case: Case) -> None:
    """What `load`, `explain` and `train --resume` read of a run."""
    in_turn(
        lambda: use(vitkit.load("run")),
        lambda: curves_of(read_log(Path("run"))),
        lambda: _claim(TrainConfig(data="", out="run"), resume=True),
        lambda: Keeper(Path("run/checkpoints")).newest(),
    )


def refusal(call: Callable[[], object]) -> VitkitError | None:
    try:
        call()
    except VitkitError as e:
        return e
    return None


def commanded(*words: str) -> None:
    """A command as a user types it, what it prints included; a VitkitError comes through."""
    from typer import Exit

    from vitkit.cli.main import app

    try:
        app(list(words), standalone_mode=False)
    except Exit:
        pass
    except OSError as e:  # the command says it in words, too
        raise DataError(str(e)) from e


def in_turn(*calls: Callable[[], object]) -> None:
    """All of them, whichever is refused; the first refusal is raised."""
    if found := [e for e in map(refusal, calls) if e is not None]:
        raise found[0]


def open_an_index(case: Case) -> None:
    from vitkit.curation import open_index
    from vitkit.curation.view import open_view

    in_turn(
        lambda: commanded("search", "i", "set/a/0.png", "--top", "3", "--json"),
        lambda: open_view(Path("i"))[0].points_file(),  # noqa: PLW0108 - opening it is what may fail
        lambda: open_index("i").looks().thumbnails(np.arange(2)),
        lambda: commanded("index", "set", "--out", "i"),
    )


def open_issues(case: Case) -> None:
    from vitkit.curation.view import read_issues

    in_turn(
        lambda: commanded("data", "apply", "cl/issues.csv", "--to", "list.csv"),
        lambda: read_issues(Path("cl/issues.csv")),
    )


def open_config(case: Case) -> None:
    commanded("config", "show", next(iter(case)))


def open_sweep(case: Case) -> None:
    from vitkit.training import sweep

    def resumed() -> None:
        with contextlib.suppress(VitkitError):
            sweep.claim(Path("sw"), {"searched": [], "draws": 0, "base": {}}, resume=True)
        trials = [sweep.trial_of(Path("sw"), number, ("lr=1",)) for number in (1, 2)]
        sweep._curves(sweep.ranked(trials))

    in_turn(
        resumed,
        lambda: commanded("runs", "sw"),
        lambda: commanded("runs", "sw", "--sort", "-best", "--json"),
        lambda: commanded("runs", "sw/001", "sw/002", "--compare"),
        lambda: commanded("config", "show", "sw/001"),
    )


def open_tuned(case: Case) -> None:
    model = vitkit.load("x.safetensors")
    runtime = stored(model, "x.safetensors")
    if runtime is not None:
        runtime.run(torch.zeros(2, 3, 8, 8))


def open_file(case: Case) -> None:
    runtime, about = open_exported("x.onnx")
    assert about.config.image_size
    runtime.run(torch.zeros(1, about.config.channels, *about.config.image_size))


def answer(case: Case) -> None:
    """No request may end in an answer of 500, nor without an answer."""
    import httpx
    from serving import small_model, with_client

    from vitkit.web.app import create_app
    from vitkit.web.settings import ServeSettings

    about = json.loads(case["request"])

    async def visit(client: httpx.AsyncClient) -> None:
        headers = {"content-type": about["type"].encode()} if about["type"] else {}
        headers |= {"inference-header-content-length": length.encode()} if (length := about.get("length")) else {}
        query = [(k, v.encode(errors="replace").decode()) for k, v in about["query"]]
        found = await client.request(
            about["method"], about["path"], params=query, content=case["body"], headers=headers
        )
        assert found.status_code < 500, f"{found.status_code}: {found.text[:300]}"

    with_client(create_app([small_model()], ServeSettings()), visit)


TARGETS: dict[str, Callable[[Case], None]] = {
    "checkpoint": open_checkpoint,
    "data": open_set,
    "shards": open_indexed,
    "run": open_run,
    "tuned": open_tuned,
    "exported": open_file,
    "index": open_an_index,
    "issues": open_issues,
    "config": open_config,
    "sweep": open_sweep,
    "http": answer,
}
