"""Processes that join and leave: nothing waits forever."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from vitkit import world as worlds
from vitkit.errors import VitkitError

pytestmark = pytest.mark.slow
ROUNDS = 60  # without the kept group about one round in forty never ended


def _rounds(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for number in range(ROUNDS):
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{number}"), 2), rank=rank, world_size=2)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        assert worlds.gather(torch.full((1000,), rank), 2)[1][0] == 1
        worlds.leave()  # and at once the model goes, the last that uses the group
        del model


def test_leaving_while_a_model_still_holds_the_group_does_not_hang(tmp_path: Path) -> None:
    context = mp.spawn(_rounds, (tmp_path,), nprocs=2, join=False)
    deadline = time.monotonic() + 240  # seen: 15 seconds
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("a process that left its group never ended")


def test_the_end_of_another_process_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(VitkitError, match="process 1 ends because another one"), worlds.ends_with_others():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:23433")
    with pytest.raises(RuntimeError, match="shapes"), worlds.ends_with_others():
        raise RuntimeError("shapes do not fit")
