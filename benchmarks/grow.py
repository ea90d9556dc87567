"""A trained ViT of another size, for curves.py where no trained one of that size is at hand: fine-tune, widen, go on.

The small checkpoint is fine-tuned on DATA, widened (every feature, head and hidden unit so many times, and the weights
that read them divided among the copies, which computes the same: Chen et al., Net2Net), and fine-tuned again. The
weights are divided unevenly, at random, so that copies have gradients of their own and grow apart. What comes out is a
real model: of the larger one's shape and cost, with an accuracy that can be measured.

    python benchmarks/grow.py CHECKPOINT cifar10 OUT    # from a ViT-Ti/16 a ViT-B/16; twenty minutes on two cores
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vitkit

RATE = 5e-5  # of the wide model, which is trained already: at that of a new task, 3.5e-4, it lost 4 points in 58 steps
UNEVEN = 0.5  # how far the parts of a weight are apart: 0 would make all copies the same
READERS = ("qkv.weight", "out.weight", "up.weight", "down.weight", "classifier.weight")


def divided(weight: Tensor, times: int, random: torch.Generator) -> Tensor:
    """Columns for `times` copies of what a matrix reads: parts of each weight that add up to it."""
    noise = torch.rand(times, *weight.shape, generator=random) * 2 - 1
    parts = (1 + UNEVEN * (noise - noise.mean(0))) / times
    return torch.cat(list(parts * weight), dim=1)


def repeated(name: str, tensor: Tensor, times: int) -> Tensor:
    """`times` copies of the features that a tensor makes."""
    if name.startswith(("class_token", "positions")):
        return tensor.repeat(1, times)
    if ".qkv." in name:  # query, key and value: each has its own copies
        return torch.cat([part.repeat(times, *[1] * (tensor.dim() - 1)) for part in tensor.chunk(3)])
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))


def widened(model: Any, times: int, seed: int = 0) -> Any:
    """A model `times` as wide that computes the same. For the ViT of the paper: LayerNorm, a class token, no stem."""
    config, random = model.config, torch.Generator().manual_seed(seed)
    sizes = {name: getattr(config, name) * times for name in ("width", "heads", "mlp_width")}
    wide: nn.Module = vitkit.ViT(config.replace(**sizes))
    state = {}
    for name, tensor in model.state_dict().items():
        grown = divided(tensor, times, random) if name.endswith(READERS) else tensor
        state[name] = grown if name.startswith("head.") else repeated(name, grown, times)
    wide.load_state_dict(state)
    return wide.eval()


def trained(data: str, init: str, out: Path, budget: str, lr: float = 0.0) -> Any:
    how = {"image_size": (224, 224), "seed": 0, "resume": out.exists()}
    return vitkit.train(data, init=init, out=str(out), budget=budget, lr=lr, **how).model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("data")
    parser.add_argument("out", type=Path, help="a folder; what was done there is not repeated")
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--budgets", nargs=2, default=["10m", "10m"], help="of the small model and of the wide one")
    args = parser.parse_args()
    start = args.out / "widened.safetensors"
    if not start.exists():
        small = trained(args.data, args.checkpoint, args.out / "small", args.budgets[0])
        vitkit.save(widened(small, args.times), start, small.outputs.names)
    trained(args.data, str(start), args.out / "wide", args.budgets[1], RATE)


if __name__ == "__main__":
    main()
