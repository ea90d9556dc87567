"""Shared by all tests: quiet, deterministic, and one thread per worker when tests run side by side."""

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("vitkit", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("vitkit")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
