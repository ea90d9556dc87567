"""Every ViT of timm's modules, shrunken to two blocks, against what vitkit makes of its files: what the census test
walks, and what writes its table into docs/checkpoints.md.

python tests/parity/timm_census.py    # all names at their native sizes, then the table
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import peers

timm = peers.import_timm()
from timm.models import save_for_hf  # noqa: E402

from vitkit.checkpoints import timm as reader  # noqa: E402
from vitkit.checkpoints import timm_models  # noqa: E402
from vitkit.checkpoints.family import Checkpoint, Opened, Table  # noqa: E402
from vitkit.checkpoints.load import load  # noqa: E402
from vitkit.checkpoints.options import ModelOptions  # noqa: E402
from vitkit.checkpoints.tensors import LazyTensors  # noqa: E402
from vitkit.errors import CheckpointError  # noqa: E402
from vitkit.model.config import ViTConfig  # noqa: E402

MODULES = ["vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid"]
MODULES += ["vision_transformer_relpos", "naflexvit", "vision_transformer_sam"]
NAMES = {name: module for module in MODULES for name in timm.list_models(module=module)}
# Of the output's range. What is promised is 1e-4; in float64 the kind of GELU and the epsilon show below that too.
# timm keeps rotary angles in float32, hence not less; mixed rotary positions and hybrids run in float32 alone.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
DOCS = Path(__file__).parents[2] / "docs/checkpoints.md"
# What a file without a name cannot tell, and what does not change what is computed from a tensor of that size.
UNTOLD = ("preprocessing", "image_size", "indivisible", "layer_scale")


class Outcome(NamedTuple):
    word: str  # "exact", "refused" or "wrong"
    reason: str = ""
    second: str = ""  # the same at another size, or "" where timm has no other


def shrunken(name: str, native: bool) -> dict[str, object]:
    """Arguments for two blocks of two heads that are as wide as they were; unless `native`, of small images too."""
    own, side = timm_models.arguments(name), int(timm_models.pretrained_cfg(name)["input_size"][1])
    args: dict[str, object] = {"depth": 2, "num_classes": 5}
    hybrid = NAMES[name] == "vision_transformer_hybrid"
    if own.get("embed_layer") != "ConvStem":  # whose width is that of the model
        args |= {"num_heads": 2, "embed_dim": 2 * own.get("embed_dim", 768) // own.get("num_heads", 12)}
    if own.get("num_kv_heads"):
        args["num_kv_heads"] = (2, 1)
    if not native and NAMES[name] not in ("naflexvit", "vision_transformer_sam"):
        step = 32 if hybrid else own["patch_size"]
        args["img_size"] = (2 if hybrid else 4) * step + side % step
    return args


def peer(name: str, **args: object) -> torch.nn.Module:
    single = NAMES[name] == "vision_transformer_hybrid" or "rope_mixed" in name
    return randomize(timm.create_model(name, **args).eval()).to(torch.float32 if single else torch.float64)


@torch.no_grad()
def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Nothing stays at a neutral value. Tokens are small, so that the epsilon of the first norm counts."""
    random = torch.Generator().manual_seed(0)
    small = ("cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=random)
        if name in small:
            tensor.copy_(0.03 * noise)
        elif name.endswith(("gamma", "gamma_1", "gamma_2", "running_var")) or ("norm" in name and "weight" in name):
            tensor.copy_((1 + 0.2 * noise).abs())
        elif tensor.ndim > 1 and not name.endswith(("freqs", "table", "latent")):
            tensor.copy_(1.5 * noise / tensor[0].numel() ** 0.5)
        else:
            tensor.copy_(0.3 * noise)
    return model


def save(model: torch.nn.Module, folder: Path, args: dict[str, object]) -> None:
    """As timm saves to the hub."""
    save_for_hf(model, str(folder), model_args=args, safe_serialization=True)


def compare(ours: torch.nn.Module, theirs: torch.nn.Module, size: tuple[int, int]) -> str:
    dtype = next(theirs.parameters()).dtype
    images = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        expected, found = theirs(images), ours(images)
    off = float((found - expected).abs().max() / (expected.max() - expected.min()))
    return "exact" if off <= TOLERANCE[dtype] else f"off by {off:.1e} at {size}"


def larger(
    name: str, theirs: torch.nn.Module, size: tuple[int, int], args: dict[str, object]
) -> torch.nn.Module | None:
    """timm's model for a larger size that is not square; None where timm has none."""
    step = 32 if NAMES[name] == "vision_transformer_hybrid" else theirs.patch_embed.patch_size[0]
    new = (size[0] // step * step + 2 * step, size[1] // step * step + step)
    if hasattr(theirs, "set_input_size"):
        theirs.set_input_size(new)
    elif NAMES[name] == "vision_transformer_relpos":  # its MLP computes the scores of any offsets
        state, dtype = theirs.state_dict(), next(theirs.parameters()).dtype
        theirs = timm.create_model(name, **{**args, "img_size": new}).eval().to(dtype)
        theirs.load_state_dict(state)
    else:
        return None
    return theirs


def outcome(name: str, folder: Path, native: bool = False) -> Outcome:
    """Saved by timm as for the hub, loaded here, compared at its own and at another size."""
    args = shrunken(name, native)
    theirs = peer(name, **args)
    save(theirs, folder, args)
    try:
        ours = load(folder)
    except CheckpointError as error:
        return Outcome("refused", str(error).removeprefix(f"{folder}: "))
    size = ours.config.image_size
    first = compare(ours, theirs, size)
    if first != "exact":
        return Outcome("wrong", first)
    other = larger(name, theirs, size, args)
    second = compare(ours, other, other.patch_embed.img_size) if other else ""
    return Outcome("exact" if second in ("exact", "") else "wrong", second.replace("exact", ""), second)


def outlined(name: str, named: bool, options: ModelOptions) -> Checkpoint:
    """What the reader makes of the full model, without memory: with or without its config.json."""
    outlines = timm.create_model(name, depth=2, device="meta").state_dict()
    second = [key for key in outlines if key.startswith("blocks.1.")]
    for i in range(2, timm_models.arguments(name).get("depth", 12)):  # building all of them takes seconds
        outlines |= {key.replace("blocks.1.", f"blocks.{i}.", 1): outlines[key] for key in second}
    tensors = LazyTensors({key: tensor.to("meta") for key, tensor in outlines.items()}, lambda key: torch.empty(0))
    beside = {"config.json": Table({"architecture": name})} if named else {}
    opened = Opened(tensors, Path("model.safetensors"), beside=beside)
    assert reader.matches(opened)
    return reader.read(opened, options)


def told(config: ViTConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__ if name not in UNTOLD}


def nameless(name: str) -> str:
    """Without config.json: "exact", "asked", or what is wrong."""
    true = outlined(name, True, ModelOptions()).config
    try:
        found = outlined(name, False, ModelOptions()).config
    except CheckpointError:
        stated = {key: getattr(true, key) for key in timm_models.HIDDEN}
        found = outlined(name, False, ModelOptions.of(**stated)).config
        return "asked" if told(found) == told(true) else f"the answers {stated} do not give the model"
    wrong = [key for key, value in told(true).items() if told(found)[key] != value]
    return "exact" if not wrong else f"silently another {wrong}"


def table(outcomes: dict[str, Outcome], bare: dict[str, str]) -> str:
    lines = [
        "| module of timm | names | exact | refused | also at another size | without `config.json`: exact | asked |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for module in MODULES:
        names = [name for name in NAMES if NAMES[name] == module]
        found = Counter(outcomes[name].word for name in names)
        second = sum(outcomes[name].second == "exact" for name in names)
        without = Counter(bare.get(name, "") for name in names)
        row = [f"`{module}`", len(names), found["exact"], found["refused"], second, without["exact"], without["asked"]]
        lines.append(f"| {' | '.join(map(str, row))} |")
    reasons: dict[str, list[str]] = {}
    for name, found_ in outcomes.items():
        if found_.word == "refused":
            reasons.setdefault(found_.reason.removeprefix("not supported: ").partition(" (")[0], []).append(f"`{name}`")
    lines += ["", "Refused are:", "", *(f"- {reason}: {', '.join(names)}" for reason, names in sorted(reasons.items()))]
    return "\n".join([f"Against timm {timm.__version__}:", "", *lines])


START, END = "<!-- timm census -->", "<!-- end of timm census -->"


def main() -> None:
    torch.set_num_threads(1)
    outcomes: dict[str, Outcome] = {}
    bare: dict[str, str] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = outcome(name, Path(folder), native="--small" not in sys.argv)
        if outcomes[name].word == "exact":
            bare[name] = nameless(name)
        print(name, *outcomes[name], bare.get(name, ""), flush=True)
    if "--small" not in sys.argv:
        text = DOCS.read_text()
        before, after = text.partition(START)[0], text.partition(END)[2]
        DOCS.write_text(f"{before}{START}\n{table(outcomes, bare)}\n{END}{after}")


if __name__ == "__main__":
    main()
