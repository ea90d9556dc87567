"""Throughput (img/s) of a ViT in every runtime: peers, and vitkit's runtimes in fp32, int8 and with merged tokens.

All systems have the same shape and run interleaved on the same threads. "timm onnx" and "timm openvino" are timm's
model exported by the usual tools, so that a runtime is not mistaken for a merit of ours. Weights are fresh, which does
not change the time; `agreement` (the same first class as vitkit eager, on made-up images) and `difference` (of
logits, relative to their spread) are those of such weights. What int8 and merging cost a trained model is
measured at the end, on MNIST with a model of 49 patches that is trained for two minutes, or on --trained MODEL DATA.

    python -m benchmarks.inference            # all cases, about eight minutes on two cores
    python -m benchmarks.inference --quick    # a smoke run
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
from vitkit.data import normalise, open_data
from vitkit.model.vit import ViT
from vitkit.runtime import open_runtime
from vitkit.runtime.base import made_up
from vitkit.runtime.verify import images_of, outputs_of

CASES = tuple((model, batch) for model in ("vit-ti/16", "vit-b/16") for batch in (1, 8))
PEERS = ("timm", "huggingface", "torchvision", "vit-pytorch")
OURS: dict[str, dict[str, Any]] = {
    "vitkit eager": {"kind": "eager"},
    "vitkit onnx": {"kind": "onnx"},
    "vitkit openvino": {"kind": "openvino"},
    "vitkit eager merge 8": {"kind": "eager", "merge": 8},
    "vitkit onnx merge 8": {"kind": "onnx", "merge": 8},
    "vitkit onnx int8": {"kind": "onnx", "int8": True},
    "vitkit onnx int8 merge 8": {"kind": "onnx", "int8": True, "merge": 8},
    "vitkit onnx int8 merge 13": {"kind": "onnx", "int8": True, "merge": 13},
    "vitkit openvino int8": {"kind": "openvino", "int8": True},
}
FP32 = ("vitkit eager", "vitkit onnx", "vitkit openvino", "vitkit compiled")
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
    wanted = OURS | ({"vitkit compiled": {"kind": "compiled"}} if compiled else {})
    return {name: open_runtime(model, **how).run for name, how in wanted.items()}


def measure(name: str, batches: list[int], seconds: float, compiled: bool) -> list[dict[str, Any]]:
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

        times = harness.interleaved({n: bound(c) for n, c in calls.items()}, seconds, least_rounds=3)
        median = {n: statistics.median(t) for n, t in times.items()}
        peer = min((n for n in times if not n.startswith("vitkit")), key=lambda n: median[n])
        ours = min((n for n in FP32 if n in times), key=lambda n: median[n])
        for system, t in times.items():
            row = {"model": name, "batch": batch, "system": system, **harness.speed(t, batch)}
            against = harness.ratios(times["timm"], t)
            row["ratio_to_timm"] = round(statistics.median(against), 3)
            row["ratio_quartiles"] = harness.quartiles(against, 3)
            row["ratio_to_best_fp32_peer"] = round(statistics.median(harness.ratios(times[peer], t)), 3)
            row["best_fp32_of_vitkit"] = round(statistics.median(harness.ratios(times[peer], times[ours])), 3)
            if system in answers:
                same = answers[system].argmax(-1) == expected.argmax(-1)
                off = (answers[system] - expected).square().mean().sqrt() / expected.std(dim=-1).mean()
                row |= {"agreement": round(float(same.float().mean()), 4), "difference": float(f"{off:.2g}")}
            rows.append({**row, "rounds": len(t)})
        print(harness.table([{"agreement": None, "difference": None, **r} for r in rows[-len(calls) :]]), flush=True)
    return rows


def trained(given: list[str] | None, budget: str) -> list[dict[str, Any]]:
    """What int8 and merging cost a trained model, without training it again."""
    import vitkit
    from vitkit.training.config import TrainConfig, parse_duration
    from vitkit.training.run import train

    with tempfile.TemporaryDirectory() as folder:
        source, data = given or (folder, "mnist")
        if given is None:
            train(
                TrainConfig(data=data, model="vit-28px/4", out=str(Path(folder, "run")), budget=parse_duration(budget))
            )
            source = str(Path(folder, "run"))
        model: Any = vitkit.load(source)
    images = images_of(model, open_data(data).split("test"), 10_000)
    rows: list[dict[str, Any]] = []
    plain = outputs_of(open_runtime(model, "eager"), images, model.config, 200).argmax(-1)
    for int8 in (False, True):
        for merge in (0, 2, 4, 8, 13):
            runtime = open_runtime(model, "onnx" if int8 else "eager", int8=int8, merge=merge)
            answers = outputs_of(runtime, images, model.config, 200).argmax(-1)
            assert images.labels is not None
            right = float((answers == images.labels).float().mean())
            row = {"model": f"{data}, {model.config.grid[0] * model.config.grid[1]} patches", "system": runtime.name}
            row |= {"accuracy": round(right, 4), "agreement": round(float((answers == plain).float().mean()), 4)}
            rows.append(
                {**row, "drop_in_points": round(100 * (rows[0]["accuracy"] if rows else right) - 100 * right, 2)}
            )
    print(harness.table(rows), flush=True)
    return rows


def main() -> None:
    parser = harness.arguments(__doc__ or "", list(dict(CASES)), ["all"])
    parser.add_argument("--compiled", action="store_true", help="torch.compile too: a minute more for each case")
    parser.add_argument("--trained", nargs=2, metavar=("MODEL", "DATA"), help="evaluate int8 and merging on these")
    parser.add_argument("--budget", default="2m", help="for training the model that is evaluated (default: 2m)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    about, rows = harness.machine(), []
    models = args.only or (["mu"] if args.quick else list(dict(CASES)))
    for model in models:
        batches = args.batch or ([1] if args.quick else [b for m, b in CASES if m == model])
        rows += measure(model, batches, 1.0 if args.quick else args.seconds, args.compiled)
    if not args.quick or args.trained:
        rows += trained(args.trained, args.budget)
    harness.save("inference", args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
