"""Images per second of a forward pass: vitkit, timm, Hugging Face, torchvision and vit-pytorch side by side.

Every system has the same shape, its own default settings, eval() and inference_mode, and the same threads.

    python benchmarks/forward.py            # all cases, about five minutes
    python benchmarks/forward.py --quick    # a smoke run of a minute
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import arguments, compare, machine, megabytes_in_use, memory_of, peak_megabytes_of, save, table
from systems import SYSTEMS, shape
from vitkit.model.summary import summarize

MODELS = ("vit-32px/4", "vit-ti/16", "vit-b/16")
BATCHES = (1, 8)


def forward_call(system: str, model: str, batch: int) -> Callable[[], Any]:
    config = shape(model)
    logits_of, module = SYSTEMS[system](config)
    module.eval()
    images = torch.randn(batch, config.channels, *config.image_size)

    def call() -> None:
        with torch.inference_mode():
            logits_of(images)

    return call


def report_memory(system: str, model: str, batch: int) -> None:
    forward_call(system, "mu", 1)()  # imports
    before = megabytes_in_use()
    call = forward_call(system, model, batch)
    print(f"{peak_megabytes_of(call) - before:.1f}")


def main() -> None:
    assert __doc__
    args = arguments(__doc__, MODELS, list(SYSTEMS)).parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    models = args.only or (MODELS[:2] if args.quick else MODELS)
    batches = args.batch or (BATCHES[:1] if args.quick else BATCHES)
    if args.memory_of:
        return report_memory(args.memory_of, models[0], batches[0])
    about, rows = machine(), []
    for model in models:
        macs = summarize(shape(model))["gmacs"] * 1e9
        for batch in batches:
            calls = {system: forward_call(system, model, batch) for system in args.systems}
            seconds, least = (2.0, 2) if args.quick else (args.seconds, 5)
            found = compare(calls, batch, batch * macs, seconds, least)
            del calls
            for row in found:
                wanted = args.memory or not args.quick
                row["peak_mb"] = memory_of(__file__, row["system"], model, batch) if wanted else None
                rows.append({"model": model, "batch": batch} | row)
            print(table(rows[-len(found) :]), flush=True)
    save("forward", args.save, about, rows, args.quick)
    return None


if __name__ == "__main__":
    main()
