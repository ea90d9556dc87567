"""Accuracy and speed together: a trained ViT in timm, and in everything that vitkit makes of the same weights.

A speed without its accuracy says nothing, so every row has both: img/s beside timm's eager forward in interleaved
rounds, and accuracy on real images with what was lost against timm (95% interval, McNemar's test) and the agreement.
The first images (of a shuffled set) are for choosing: the numbers of merging by block, the probability of early exit,
and the fastest row that keeps a drop of 0.1, 0.5 or 1 points by the rule of `vitkit tune`. Accuracies are of the images
after these, and in parts of 200 of them it is counted how often what was chosen keeps its promise. Rows that compute
the same as timm are asked 32 images to prove it, and share its answers.

With the code of ToMe on the path (github.com/facebookresearch/ToMe) its own patch of timm is measured too; where
torchao and executorch are installed, what they make of the model in int8.

    python benchmarks/curves.py MODEL DATA                 # answers are kept in --cache: a kill loses one row
    python benchmarks/curves.py MODEL DATA --answers       # no speeds yet: these want an idle machine
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from torch import Tensor, nn

import harness
import peers
import vitkit
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.writing import write
from vitkit.runtime.base import Cascade, Choice, Runtime, build
from vitkit.runtime.reductions import SCALES, fitted, harms, sure_enough
from vitkit.runtime.table import RUNTIMES
from vitkit.runtime.tune import KEPT, images_needed
from vitkit.runtime.tuned import digest_of
from vitkit.runtime.verify import Images, images_of, outputs_of
from vitkit.tasks import open_data_for
from vitkit.tasks.paired import drop_interval, kept_on, mcnemar
from vitkit.world import has_bf16

LIMITS = (0.001, 0.005, 0.01)
MERGES, FITTED = (8, 13), (2, 4, 6, 8)  # patches per block: the same in each, or fitted to each
SAME = 32  # images, by which two systems prove that they compute the same
BATCHES = (1, 8)
LOOKED_AT = 32  # images, by which speed is measured
PART = 200  # images, on which a promise is kept or not


class Timm(Runtime):
    """Its module as it is."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(name)
        self.module = module.eval()

    @torch.inference_mode()
    def compute(self, images: Tensor) -> Tensor:
        return self.module(images)


def shuffled(model: Any, data: str, count: int) -> Images:
    """So many labelled images of the evaluation split, always the same."""
    source = open_data_for(model, data).evaluation()
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    images = images_of(model, source.take(order[:count].numpy()), count)
    if images.labels is None or len(images) < count:
        raise SystemExit(f"{len(images)} labelled images of the evaluation split are too few: {count} are asked for")
    return images


def timm_of(source: str) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        write(open_checkpoint(source), Path(folder, "timm"), "timm")
        module: nn.Module = peers.import_timm().create_model(f"local-dir:{folder}/timm", pretrained=True)
    return module


def with_tome(module: nn.Module, per_block: int) -> nn.Module | None:
    """ToMe's own code; None where it is not there."""
    try:
        import tome  # type: ignore[import-not-found]
    except ImportError:
        return None
    patched: Any = copy.deepcopy(module)
    tome.patch.timm(patched)
    patched.r = per_block
    return patched


def torchao_int8(model: nn.Module) -> Runtime:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # type: ignore[import-not-found]

    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return Timm(torch.compile(quantized), "torchao int8")  # type: ignore[arg-type]


def executorch_int8(model: nn.Module) -> Runtime:
    """XNNPACK's dynamic int8, by its own quantizer."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # type: ignore
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as quantizer  # type: ignore
    from executorch.exir import to_edge_transform_and_lower  # type: ignore
    from executorch.runtime import Runtime as Program  # type: ignore
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore

    size: Any = model.config
    example = (torch.randn(2, size.channels, *size.image_size),)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    how = quantizer.XNNPACKQuantizer()
    how.set_global(quantizer.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
    ready = prepare_pt2e(torch.export.export(model, example, dynamic_shapes=shapes).module(), how)
    ready(*example)
    program = torch.export.export(convert_pt2e(ready), example, dynamic_shapes=shapes)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    method = Program.get().load_program(lowered.buffer).load_method("forward")
    return Timm(_Called(lambda images: method.execute([images])[0].clone()), "executorch int8")


class _Called(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, images: Tensor) -> Tensor:
        return self.call(images)


OTHERS = {"torchao int8": ("torchao", torchao_int8), "executorch int8": ("executorch", executorch_int8)}


class Answers:
    """Outputs of every configuration for the first so many images, kept on disk as they come."""

    def __init__(self, folder: Path, images: Images, config: Any) -> None:
        self.folder, self.images, self.config = folder, images, config
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, name: str, make: Callable[[], Runtime], count: int) -> Tensor:
        path = self.folder / f"{name.replace(' ', '-').replace(':', '_')}.npy"
        known = [np.load(path)] if path.exists() else []
        have = len(known[0]) if known else 0
        if have < count:
            start = time.perf_counter()
            known.append(outputs_of(make(), self.images[have:count], self.config, 8).numpy().astype(np.float32))
            np.save(path.with_suffix(".part.npy"), np.concatenate(known))
            path.with_suffix(".part.npy").replace(path)
            print(f"  {count - have} answers of {name} in {time.perf_counter() - start:.0f} s", flush=True)
        return torch.from_numpy(np.concatenate(known)[:count])

    def same(self, name: str, make: Callable[[], Runtime], other: Tensor) -> Tensor:
        """Those of `other`, if the first ones are equal; else its own."""
        own = self.of(name, make, SAME)
        equal = (own - other[:SAME]).abs().max() < 1e-3 * other.abs().max()
        return other if equal else self.of(name, make, len(other))

    def harm_of(self, model: Any, base: Tensor) -> list[float]:
        """Kept too: rounding, by other numbers of threads, could give other numbers of patches, hence other answers."""
        path = self.folder / "harm.json"
        if not path.exists():
            path.write_text(json.dumps(harms(model, MERGES[0], self.images[:16], base[:16])))
        found: list[float] = json.loads(path.read_text())
        return found


def choices(model: Any, harm: list[float]) -> Iterator[Choice]:
    """What is compared: every runtime and precision, then reductions of the precisions that are fast."""
    plain = [Choice(kind) for kind in ("eager", "onnx", "openvino") if RUNTIMES[kind].usable()]
    yield from plain
    half = [replace(choice, bf16=True) for choice in plain if RUNTIMES[choice.runtime].bf16]
    yield from half if has_bf16(torch.device("cpu")) else []
    for merge in MERGES:
        yield Choice(merge=merge)  # beside ToMe's own
    for int8 in (replace(choice, int8=True) for choice in plain if RUNTIMES[choice.runtime].usable(int8=True)):
        yield int8
        yield replace(int8, scale=SCALES[1])
        if int8.runtime == "onnx":
            for merge in (*MERGES, *(fitted(r, harm) for r in FITTED)):
                yield replace(int8, merge=merge)


def early_exits(outputs: dict[str, Tensor], truth: Tensor, chosen: int) -> Iterator[tuple[Choice, Tensor]]:
    """For each limit, half of which is spent on it: the probability that may stand, by the images to choose by.

    The second look may merge, as many as alone lose no more than the other half.
    """
    known = {name.removeprefix("vitkit "): found for name, found in outputs.items()}
    scale = SCALES[1]
    for kind, limit in product(("onnx", "openvino"), LIMITS):
        whole = Choice(kind, int8=True)
        small = replace(whole, scale=scale)
        prefix = f"{whole.name} merge "
        merged = [
            replace(whole, merge=name.removeprefix(prefix)) for name in known if name.startswith(f"{prefix}tome:")
        ]
        harmless = [
            full
            for full in merged
            if told(known[full.name][:chosen], known["timm"][:chosen], truth[:chosen])["drop_in_points"]
            <= 100 * limit / 2
        ]
        for full in (whole, *harmless[-1:]) if small.name in known else ():
            first, second = known[small.name], known[full.name]
            sure = sure_enough(first[:chosen], second[:chosen], truth[:chosen], limit / 2)
            if sure is not None:
                stands = confidence(first)[:, None] >= sure
                yield replace(full, scale=scale, sure=sure), torch.where(stands, first, second)


def confidence(outputs: Tensor) -> Tensor:
    return outputs.softmax(-1).amax(-1)


def easy_and_hard(outputs: Tensor) -> Tensor:
    """A few images with as many easy ones among them as among all: how fast early exit is depends on that."""
    order = confidence(outputs).argsort()
    few = order[torch.linspace(0, len(order) - 1, LOOKED_AT).long()]
    return few[torch.randperm(LOOKED_AT, generator=torch.Generator().manual_seed(0))]


def told(outputs: Tensor, base: Tensor, truth: Tensor) -> dict[str, Any]:
    """Accuracy, and what was lost of that of `base`."""
    before, after = base.argmax(-1) == truth, outputs.argmax(-1) == truth
    lost, won, count = int((before & ~after).sum()), int((~before & after).sum()), len(truth)
    low, high = drop_interval(lost, won, count)
    return {
        "images": count,
        "accuracy": round(float(after.double().mean()), 4),
        "drop_in_points": round(100 * (lost - won) / count, 2),
        "drop_interval": [round(100 * low, 2), round(100 * high, 2)],
        "lost": lost,
        "won": won,
        "mcnemar_p": float(f"{mcnemar(lost, won):.2g}"),
        "agreement": round(float((outputs.argmax(-1) == base.argmax(-1)).double().mean()), 4),
    }


def speeds(
    runtimes: dict[str, Runtime], images: Images, config: Any, batch: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds for a batch, in interleaved rounds; those of early exit over all of the images."""
    batches = list(images.batches(config, batch))

    def call(runtime: Runtime) -> Callable[[], None]:
        some = batches if "sure" in runtime.name else batches[:1]

        def run() -> None:
            for one in some:
                runtime.run(one)

        return run

    found = harness.interleaved({name: call(runtime) for name, runtime in runtimes.items()}, 20.0, rounds)
    return {name: [t / (len(batches) if "sure" in name else 1) for t in times] for name, times in found.items()}


def fastest_kept(rows: list[dict[str, Any]], outputs: dict[str, Tensor], truth: Tensor, chosen: int) -> None:
    """Marks, for each limit and batch size, the fastest of our rows whose promise would be given."""
    base = outputs["timm"]
    for limit in LIMITS:
        kept = {}
        for name, answers in outputs.items():
            seen = told(answers[:chosen], base[:chosen], truth[:chosen])
            promised = kept_on(seen["lost"], seen["won"], chosen, limit) >= KEPT and chosen >= images_needed(limit)
            kept[name] = answers is base or (promised and seen["drop_in_points"] <= 100 * limit)
        for batch in BATCHES:
            ours = [row for row in rows if row["batch"] == batch and row["system"].startswith("vitkit")]
            best = max((r for r in ours if kept[r["system"]]), key=lambda row: row["ratio_to_timm"])
            best.setdefault("fastest_at", []).append(limit)


def count_kept(rows: list[dict[str, Any]], outputs: dict[str, Tensor], truth: Tensor) -> None:
    """On how many parts of the held-out images the promises of a chosen row are kept."""
    whole = len(truth) // PART * PART
    for row in (row for row in rows if "fastest_at" in row):
        answers = (outputs[row["system"]], outputs["timm"], truth)
        parts = [told(*part) for part in zip(*(one[:whole].split(PART) for one in answers), strict=True)]
        row["kept_on_parts"] = {
            str(limit): [sum(part["drop_in_points"] <= 100 * limit + 1e-9 for part in parts), len(parts)]
            for limit in row["fastest_at"]
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--name", default="", help="of the model in the table")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--choose", type=int, default=330, help="images before these, to choose by")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--answers", action="store_true", help="only those, no speeds")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "vitkit-curves"))
    parser.add_argument("--save", type=Path, default=harness.RESULTS / "curves.json")
    args = parser.parse_args()
    about = harness.machine()
    model: Any = vitkit.load(args.model).eval()
    count, chosen = args.choose + args.images, args.choose
    images = shuffled(model, args.data, count)
    assert images.labels is not None
    truth = images.labels
    answers = Answers(args.cache / digest_of(model)[:12], images, model.config)
    module = timm_of(args.model)
    making: dict[str, Callable[[], Runtime]] = {"timm": lambda: Timm(module, "timm")}
    outputs = {"timm": answers.of("timm", making["timm"], count)}
    harm = answers.harm_of(model, outputs["timm"])
    for choice in choices(model, harm):
        name = f"vitkit {choice.name}"
        making[name] = lambda choice=choice: build(model, choice)  # type: ignore[misc]
        outputs[name] = (
            answers.same(choice.name, making[name], outputs["timm"])
            if choice.exact
            else answers.of(choice.name, making[name], count)
        )
    for r in MERGES:
        if (patched := with_tome(module, r)) is not None:
            name = f"ToMe {r} on timm"
            making[name] = lambda patched=patched, name=name: Timm(patched, name)  # type: ignore[misc]
            outputs[name] = answers.same(name, making[name], outputs[f"vitkit {Choice(merge=r).name}"])
    for name, (package, make) in OTHERS.items():
        if importlib.util.find_spec(package) is not None:
            making[name] = lambda make=make: make(model)  # type: ignore[misc]
            outputs[name] = answers.of(name, making[name], count)
    early = []
    for choice, found in early_exits(outputs, truth, chosen):
        early.append(choice)
        outputs[f"vitkit {choice.name}"] = found
    if args.answers:
        return
    runtimes, rows = {name: make() for name, make in making.items()}, []
    for choice in early:
        looks = {look: runtimes[f"vitkit {one.name}"] for look, one in choice.looks.items()}
        runtimes[f"vitkit {choice.name}"] = Cascade(looks["first"], looks["model"], choice.sure, choice.name)
    held = {name: found[chosen:] for name, found in outputs.items()}
    timed = images[chosen:][easy_and_hard(held["timm"])]
    for batch in BATCHES:
        times = speeds(runtimes, timed, model.config, batch, args.rounds)
        for name, seconds in times.items():
            ratio = harness.ratios(times["timm"], seconds)
            row = {"model": args.name or Path(args.model).name, "batch": batch, "system": name}
            row |= harness.speed(seconds, batch) | {"ratio_to_timm": round(statistics.median(ratio), 3)}
            row |= {"ratio_quartiles": harness.quartiles(ratio, 3), "rounds": len(seconds)}
            rows.append(row | told(held[name], held["timm"], truth[chosen:]))
    fastest_kept(rows, outputs, truth, chosen)
    count_kept(rows, held, truth[chosen:])
    shown = ["batch", "system", "ratio_to_timm", "accuracy", "drop_in_points", "drop_interval", "agreement"]
    shown += ["fastest_at", "kept_on_parts"]
    print(harness.table([{key: row.get(key) for key in shown} for row in rows]))
    known = json.loads(args.save.read_text())["rows"] if args.save.exists() else []
    others = [row for row in known if row["model"] != (args.name or Path(args.model).name)]
    harness.save("curves", args.save, about, [*others, *rows], quick=False)


if __name__ == "__main__":
    main()
