"""Throughput (img/s) of a ViT in fp32 in every runtime: peers, their exports, and vitkit's runtimes.

All systems have the same shape and run interleaved on the same threads. "timm onnx" and "timm openvino" are timm's
model exported by the usual tools, so that a runtime is not mistaken for a merit of ours. Weights are fresh, which does
not change the time; `difference` is that of the logits, relative to their spread. What changes answers (int8, bf16,
merging ...) is in curves.py, where every speed has its accuracy.

    python -m benchmarks.inference --rounds 20    # all cases, about fifteen minutes on two cores
    python -m benchmarks.inference --quick        # a smoke run
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor, nn

import harness
import systems
from vitkit.data import normalise
from vitkit.model.vit import ViT
from vitkit.runtime import open_runtime
from vitkit.runtime.base import made_up

CASES = tuple((model, batch) for model in ("vit-ti/16", "vit-s/16", "vit-b/16") for batch in (1, 8))
PEERS = ("timm", "huggingface", "torchvision", "vit-pytorch")
OURS = ("eager", "onnx", "openvino")
Call = Callable[[Tensor], Tensor]


def peer_calls(name: str) -> dict[str, Call]:
    """Every peer as it is, and timm's model in the two other runtimes."""
    config, calls = systems.shape(name), {}
    for peer in PEERS:
        logits_of_, module = systems.SYSTEMS[peer](config)
        module.eval()
        calls[peer] = logits_of_
        if peer == "timm":
            calls |= {f"timm {kind}": call for kind, call in exported(module, config.image_size).items()}
    return calls


def exported(module: nn.Module, size: tuple[int, int]) -> dict[str, Call]:
    import openvino

    from vitkit.runtime.onnx import Onnx
    from vitkit.runtime.openvino import OpenVino

    example = torch.randn(2, 3, *size)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        path = str(Path(folder, "timm.onnx"))
        torch.onnx.export(
            module,
            (example,),
            path,
            dynamo=False,
            input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
            opset_version=20,
        )
        converted = openvino.convert_model(module, example_input=example, input=[openvino.PartialShape([-1, 3, *size])])
        return {"onnx": Onnx(Path(path).read_bytes()).run, "openvino": OpenVino(converted).run}


def our_model(name: str) -> ViT:
    torch.manual_seed(0)
    model = ViT(systems.shape(name)).eval()
    assert model.head.classifier is not None
    nn.init.normal_(model.head.classifier.weight, std=0.02)  # fresh ones are zero: no class would be the first
    return model


def our_calls(model: ViT, compiled: bool) -> dict[str, Call]:
    kinds = [*OURS, "compiled"] if compiled else OURS
    return {f"vitkit {kind}": open_runtime(model, kind).run for kind in kinds}


def measure(name: str, batches: list[int], seconds: float, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    model = our_model(name)
    calls = {**peer_calls(name), **our_calls(model, compiled)}
    compared = normalise(made_up(model.config, 16, seed=3), model.config.preprocessing)
    with torch.inference_mode():
        expected = model(compared)
        answers = {n: calls[n](compared) for n in calls if n.startswith("vitkit")}
    rows = []
    for batch in batches:
        images = normalise(made_up(model.config, batch, seed=1), model.config.preprocessing)

        def bound(call: Call, images: Tensor = images) -> Callable[[], Any]:
            def run() -> None:
                with torch.inference_mode():
                    call(images)

            return run

        times = harness.interleaved({n: bound(c) for n, c in calls.items()}, seconds, rounds)
        median = {n: statistics.median(t) for n, t in times.items()}
        peer = min((n for n in times if not n.startswith("vitkit")), key=lambda n: median[n])
        ours = min((n for n in times if n.startswith("vitkit")), key=lambda n: median[n])
        for system, t in times.items():
            row = {"model": name, "batch": batch, "system": system, **harness.speed(t, batch)}
            against = harness.ratios(times["timm"], t)
            row["ratio_to_timm"] = round(statistics.median(against), 3)
            row["ratio_quartiles"] = harness.quartiles(against, 3)
            row["ratio_to_best_peer"] = round(statistics.median(harness.ratios(times[peer], t)), 3)
            if system == ours:
                row["quartiles_to_best_peer"] = harness.quartiles(harness.ratios(times[peer], t), 3)
            if system in answers:
                off = (answers[system] - expected).square().mean().sqrt() / expected.std(dim=-1).mean()
                row["difference"] = float(f"{off:.2g}")
            rows.append({**row, "rounds": len(t)})
        shown = [{"quartiles_to_best_peer": None, "difference": None, **row} for row in rows[-len(calls) :]]
        print(harness.table(shown), flush=True)
    return rows


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(dict(CASES)), ["all"])
    parser.add_argument("--compiled", action="store_true", help="torch.compile too: a minute more for each case")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    about, rows = harness.machine(), []
    models = args.only or (["mu"] if args.quick else list(dict(CASES)))
    for model in models:
        batches = args.batch or ([1] if args.quick else [b for m, b in CASES if m == model])
        rows += measure(model, batches, 1.0 if args.quick else args.seconds, args.rounds, args.compiled)
    harness.save("inference", args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
