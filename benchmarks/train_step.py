"""Images per second of a training step: forward, cross-entropy, backward, AdamW step, in five systems.

Every system has the same shape, its own default settings, train() mode and the same optimiser.

    python benchmarks/train_step.py            # all cases, about five minutes
    python benchmarks/train_step.py --quick    # a smoke run of a minute
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from harness import arguments, compare, machine, megabytes_in_use, memory_of, peak_megabytes_of, save, table
from systems import SYSTEMS, shape
from vitkit.model.summary import summarize

CASES: tuple[tuple[str, int], ...] = (("vit-32px/4", 8), ("vit-32px/4", 64), ("vit-ti/16", 8), ("vit-b/16", 8))


def step_call(system: str, model: str, batch: int) -> Callable[[], Any]:
    config = shape(model)
    logits_of, module = SYSTEMS[system](config)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    images = torch.randn(batch, config.channels, *config.image_size)
    labels = torch.randint(config.classes, (batch,))

    def call() -> None:
        optimizer.zero_grad()
        F.cross_entropy(logits_of(images), labels).backward()
        optimizer.step()

    return call


def report_memory(system: str, model: str, batch: int) -> None:
    step_call(system, "mu", 1)()  # imports
    before = megabytes_in_use()
    call = step_call(system, model, batch)
    call()  # the optimiser makes its state in the first step
    print(f"{peak_megabytes_of(call) - before:.1f}")


def main() -> None:
    assert __doc__
    args = arguments(__doc__, list(dict(CASES)), list(SYSTEMS)).parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    cases = CASES[:1] if args.quick else CASES
    if args.only:
        known = {m: [b for n, b in CASES if n == m] or [8] for m in args.only}
        cases = tuple((model, batch) for model in args.only for batch in args.batch or known[model])
    if args.memory_of:
        return report_memory(args.memory_of, *cases[0])
    about, rows = machine(), []
    for model, batch in cases:
        macs = 3 * summarize(shape(model))["gmacs"] * 1e9  # the backward pass multiplies twice as much as the forward
        calls = {system: step_call(system, model, batch) for system in args.systems}
        seconds, least = (2.0, 2) if args.quick else (args.seconds, 5)
        found = compare(calls, batch, batch * macs, seconds, least)
        del calls
        for row in found:
            wanted = args.memory or not args.quick
            row["peak_mb"] = memory_of(__file__, row["system"], model, batch) if wanted else None
            rows.append({"model": model, "batch": batch} | row)
        print(table(rows[-len(found) :]), flush=True)
    save("train_step", args.save, about, rows, args.quick)
    return None


if __name__ == "__main__":
    main()
