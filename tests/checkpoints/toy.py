"""A family of checkpoints for a test: the weights of "mu" under names turned round."""

from __future__ import annotations

from torch import Tensor

import vitkit
from vitkit.checkpoints.family import Checkpoint, Opened, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import Tensors


def turned(tensors: Tensors) -> dict[str, Tensor]:
    return {name[::-1]: tensor for name, tensor in tensors.items()}


def matches(opened: Opened) -> bool:
    return "thgiew.mron" in opened.tensors


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    return Checkpoint(vitkit.create("mu").config, turned(opened.tensors))


def write(checkpoint: Checkpoint) -> Written:
    return Written(turned(checkpoint.tensors), ["nothing else is kept"])
