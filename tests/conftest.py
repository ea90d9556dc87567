"""Shared by all tests: quiet, deterministic, and one thread each: training measures how many only where none is set."""

import os
import sys

import hypothesis
import pytest

hypothesis.settings.register_profile("vitkit", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("vitkit")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs vitkit in this process, through the same entry point as the shell: (exit code, out, err)."""

    def call(*args: object) -> tuple[int, str, str]:
        from vitkit.cli.main import run

        monkeypatch.setattr(sys, "argv", ["vitkit", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            run()
        captured = capsys.readouterr()
        return int(done.value.code or 0), captured.out, captured.err

    return call
