"""What opens each case, in a child process with limits: it succeeds, or raises a VitkitError, or is a finding."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from generators import Case

import vitkit
from vitkit.checkpoints.options import ModelOptions
from vitkit.data import open_data
from vitkit.data.check import check
from vitkit.errors import VitkitError
from vitkit.explanation.training import curves_of, read_log
from vitkit.model.base import VisionModel
from vitkit.runtime.export import open_exported
from vitkit.runtime.tune import stored
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


def open_run(case: Case) -> None:
    """What `load`, `explain` and `train --resume` read of a run."""
    refusals = [refusal(lambda: use(vitkit.load("run"))), refusal(lambda: curves_of(read_log(Path("run"))))]
    refusals.append(refusal(lambda: _claim(TrainConfig(data="", out="run"), resume=True)))
    refusals.append(refusal(lambda: Keeper(Path("run/checkpoints")).newest()))
    if found := [e for e in refusals if e is not None]:
        raise found[0]


def refusal(call: Callable[[], object]) -> VitkitError | None:
    try:
        call()
    except VitkitError as e:
        return e
    return None


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
        query = [(k, v.encode(errors="replace").decode()) for k, v in about["query"]]
        found = await client.request(
            about["method"], about["path"], params=query, content=case["body"], headers=headers
        )
        assert found.status_code < 500, f"{found.status_code}: {found.text[:300]}"

    with_client(create_app([small_model()], ServeSettings()), visit)


TARGETS: dict[str, Callable[[Case], None]] = {
    "checkpoint": open_checkpoint,
    "data": open_set,
    "run": open_run,
    "tuned": open_tuned,
    "exported": open_file,
    "http": answer,
}
