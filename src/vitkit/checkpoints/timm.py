"""timm's VisionTransformer, DeiT, EVA, BEiT, relative and hybrid ViTs <-> vitkit.

What tensors do not show (heads, the GELU, epsilon, pooling, rotary positions) is known from the architecture in
`config.json` and timm's own table of arguments, `timm_models.json`. Without a name it is what all published models
of the same layout have in common; else loading stops with a question. What is written lets
`timm.create_model("local-dir:...")` build the model.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from vitkit.checkpoints import reading, timm_arguments, timm_models, writing
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Table, Written
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.reading import FIRST
from vitkit.checkpoints.tensors import LazyTensors
from vitkit.checkpoints.timm_names import NAMES, to_ours, to_theirs
from vitkit.errors import CheckpointError
from vitkit.model.base import Outputs
from vitkit.model.config import Size, ViTConfig

_ANCHORS = ("patch_embed.proj.weight", "patch_embed.backbone.0.conv.weight", "embeds.proj.weight")
PLAIN = ("VisionTransformer", "VisionTransformerDistilled")
_FIRSTS = ("blocks.0.norm1.weight", "blocks.0.in_norm.weight", "blocks.0.attns.0.norm.weight")


def has_names(opened: Opened) -> bool:
    return all(any(name in opened.tensors for name in names) for names in (_ANCHORS, _FIRSTS))


def matches(opened: Opened) -> bool:
    """timm's own files: what others wrap, or keep a mask token of pre-training in, is Facebook's."""
    wrapped = bool(opened.notes) and opened.container not in ("state_dict", "state_dict_ema")  # by its training script
    ours = "mask_token" not in opened.tensors and (not wrapped or bool(opened.table("config.json")))
    return has_names(opened) and ours


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    return read_names(opened.tensors, opened.table("config.json"), options, [], _kinds(opened.tensors))


def _kinds(tensors: LazyTensors) -> Collection[str]:
    """timm's classes that call LayerScale as the file does."""
    if "blocks.0.gamma_1" in tensors:
        return "Eva", "Beit"
    scaled = any(name in tensors for name in ("blocks.0.ls1.gamma", "blocks.0.ls.gamma", "blocks.0.attns.0.ls.gamma"))
    return (*PLAIN, "VisionTransformerRelPos", *(() if scaled else ("Eva", "Beit")))


def read_names(
    foreign: LazyTensors,
    about: Table,
    options: ModelOptions,
    notes: list[str],
    kinds: Collection[str] = PLAIN,
    **assumed: object,
) -> Checkpoint:
    """Tensors with timm's names. `about` is config.json; `kinds` are the classes that a file without a name may be
    of; `assumed` are fields that another family means or shows."""
    architecture = about.text("architecture").partition(".")[0]
    pretrained = about.table("pretrained_cfg") or about
    pretrained = Table(timm_models.pretrained_cfg(architecture) | pretrained, about.name)
    known = _known(architecture, about) if architecture in timm_models.names() else {}
    reading.refuse_unsupported(foreign)
    size = _trained_size(about.table("model_args"), pretrained, options)
    tensors = to_ours(foreign, lambda offsets: _side(offsets, size, foreign))
    fields = (
        _named(known, about, _shown(tensors), options)
        if known
        else _nameless(tensors, kinds, assumed | _stated(about, options), notes)
    )
    fields |= _image_size(tensors, fields, size, notes)
    fields["position_resize"] = "timm"
    fields["preprocessing"] = assumed.get("preprocessing") or _preprocessing(pretrained, fields, notes)
    if not about:
        notes += reading.rare(fields | options.stated)
    checkpoint = reading.make_checkpoint(tensors, options, notes, NAMES.theirs, **fields | assumed)
    classes, described = checkpoint.config.classes, about.table("label_descriptions")
    names = about.words("label_names", classes) or pretrained.words("label_names", classes)
    checkpoint.outputs = Outputs(names=tuple(str(described.get(name, name)) for name in names))
    return checkpoint


def linear_head(foreign: LazyTensors) -> Fields:
    """The classifier of DINOv2 and DINOv3: class token and mean of the patches, side by side."""
    columns, width = foreign.need("linear_head.weight", 2)[1], foreign.need("patch_embed.proj.weight", 4)[0]
    if columns != 2 * width:
        of = f"a linear_head of {columns} columns, where class token and mean of the patches have {2 * width}"
        raise CheckpointError(f"not supported: {of}; heads of several layers are not read")
    return {"pooling": "cls+mean"}


_SIZES = ("width", "depth", "mlp_width", "patch_size", "channels", "classes")  # that a model may have been made with


def _named(known: Fields, about: Table, shown: Fields, options: ModelOptions) -> Fields:
    """What the name says, and of the tensors the sizes."""
    other = known["width"] != shown["width"] and "num_heads" not in about.table("model_args")
    if other and "heads" not in options.stated:  # another model than the name says
        raise CheckpointError(timm_models.unknown_heads(shown))
    fields = known | {key: shown[key] for key in _SIZES}  # what else differs is missing or extra, and said so
    if shown["final_norm"]:
        fields["norm_after_pooling"] = shown["norm_after_pooling"]  # a pooling may be changed later
    return _with_positions(fields, options.stated, known["positions"] == "none")


def _nameless(tensors: LazyTensors, kinds: Collection[str], stated: Fields, notes: list[str]) -> Fields:
    """What the tensors show, and what all published models with such tensors have in common."""
    shown = _shown(tensors)
    common = timm_models.alike(shown, kinds, "rotary.frequencies" in tensors, stated)
    words = ", ".join(f"{key}={value!r}" for key, value in common.items())
    notes.append(f"not in the file, but common to all published models with such tensors: {words}")
    fields = {**shown, **common, **stated}
    mean = fields["norm_after_pooling"] or not fields["class_token"]
    fields.setdefault("pooling", "mean" if mean else "cls")
    return _with_positions(fields, stated)


def _with_positions(fields: Fields, stated: Fields, none: bool = False) -> Fields:
    """Without a position table there must be something else, or it is said that there is nothing."""
    none = none or stated.get("positions") == "none"
    if fields["positions"] == "none" and not none and not stated.get("rotary", fields.get("rotary")):
        asked = "if the model really has no positions, pass positions='none' (--set positions=none)"
        raise CheckpointError(f"the tensor 'pos_embed' is missing; {asked}")
    return fields


def _known(architecture: str, about: Table) -> Fields:
    """By its name; a pooling that was chosen when the model was made is beside the arguments."""
    args = dict(about.table("model_args"))
    if about.get("global_pool") in timm_models.POOLINGS:
        args.setdefault("global_pool", about["global_pool"])
    return timm_models.known(architecture, args)


def _stated(about: Table, options: ModelOptions) -> Fields:
    """What is said of a model whose name is unknown: by config.json, and before it by the user."""
    args, stated = about.table("model_args"), Fields()
    if args.get("num_heads"):
        stated["heads"] = args.whole("num_heads")
    if args.get("act_layer"):
        stated["activation"] = timm_models.ACTIVATIONS[args.one_of("act_layer", timm_models.ACTIVATIONS)]
    if (pool := args.get("global_pool") or about.get("global_pool")) in timm_models.POOLINGS:
        stated["pooling"] = timm_models.POOLINGS[str(pool)]
    if args.get("pos_embed") == "none":
        stated["positions"] = "none"
    return stated | options.stated


def _shown(tensors: LazyTensors) -> Fields:
    """All fields that the tensors decide."""
    _, _, fields = reading.body_of(tensors)
    first = f"{FIRST}branches.0." if f"{FIRST}branches.0.norm1.weight" in tensors else FIRST
    up, down = (tensors.need(f"{first}mlp.{part}.weight", 2) for part in ("up", "down"))
    if up[0] == 2 * down[1]:
        fields["activation"] = "swiglu"
    if f"{first}norm2.weight" not in tensors:
        fields["block"] = "parallel"
    if "head.pool.probe" in tensors:
        width = tensors.need("head.pool.mlp.down.weight", 2)[1]
        fields |= {"pooling": "map", "map_mlp_width": width if width != down[1] or up[0] != down[1] else 0}
    tables = [word for word in ("positions.relative", f"{FIRST}relative") if tensors.within(f"{word}.")]
    if len(tables) > 1:
        raise CheckpointError(f"not supported: {timm_models.BOTH_TABLES}")
    for relative in tables:
        mlp = f"{relative}.mlp.up.weight"
        word = "relative" + "-mlp" * (mlp in tensors) + "-shared" * (relative == "positions.relative")
        word = "learned+" * ("positions.learned" in tensors) + word
        fields |= {"positions": word} | ({"relative_hidden": tensors.rows(mlp)} if mlp in tensors else {})
        return fields
    return fields | {"positions": "learned" if "positions.learned" in tensors else "none"}


def _trained_size(args: Table, pretrained: Table, options: ModelOptions) -> Size | None:
    if args.get("img_size"):
        return args.size("img_size")
    if pretrained.get("input_size"):
        _, height, width = pretrained.numbers("input_size")
        return int(height), int(width)
    return options.image_size


def _side(offsets: int, size: Size | None, foreign: LazyTensors) -> int:
    """2h - 1 of a table of (2h-1)(2w-1) offsets: of the size that is known, if that fits, or of a square."""
    kernel = foreign.need("patch_embed.proj.weight", 4)[2:]
    h, w = (n // k for n, k in zip(size, kernel, strict=True)) if size else (0, 0)
    square = round(offsets**0.5)
    if size and (2 * h - 1) * (2 * w - 1) == offsets:
        return 2 * h - 1
    if square * square != offsets:
        stated = "say which image size it was trained for, image_size=(height, width) (--image-size HxW)"
        raise CheckpointError(f"a table of {offsets} relative positions is not a square: {stated}")
    return square


def _image_size(tensors: LazyTensors, fields: Fields, size: Size | None, notes: list[str]) -> Fields:
    """The image size, and which of class token, distillation token and registers the position table counts."""
    patch: Size = fields["patch_size"]  # type: ignore[assignment]  # from the shape of a tensor
    if fields["positions"] == "learned":
        registers, first = tensors.rows("registers"), ("class_token" in tensors) + ("distillation_token" in tensors)
        of_kind = {"none": 0, "class": first, "all": first + registers}
        likeliest = ["none", "class", "all"] if registers else ["all", "none"]
        likeliest.sort(key=lambda kind: kind != fields.get("positioned_prefix"))
        grid, rows = reading.image_size_of(tensors, [of_kind[kind] for kind in likeliest], patch, size)
        prefix = next(kind for kind in likeliest if of_kind[kind] == rows)
        return _cut(grid, size, patch) | {"positioned_prefix": prefix}
    offsets = next((t.shape for name, t in tensors.outlines.items() if name.endswith("relative.by_offset")), None)
    if offsets is not None:
        return _cut(((offsets[1] + 1) // 2 * patch[0], (offsets[2] + 1) // 2 * patch[1]), size, patch)
    found = reading.assumed_size(patch, size, notes)
    return _cut((found[0] // patch[0] * patch[0], found[1] // patch[1] * patch[1]), size, patch)


def _cut(grid: Size, size: Size | None, patch: Size) -> Fields:
    """The image size of a grid: where patches do not divide it, a convolution leaves the rest out."""
    if size and size != grid and (size[0] // patch[0] * patch[0], size[1] // patch[1] * patch[1]) == grid:
        return {"image_size": size, "indivisible": "cut"}
    return {"image_size": grid}


def _preprocessing(pretrained: Table, fields: Fields, notes: list[str]) -> Fields:
    """As config.json says; else what timm has for the family: DeiT and its LayerScale successors want ImageNet's."""
    deit = fields["distillation_token"] or fields["layer_scale"]
    if not pretrained.get("mean") or not pretrained.get("std"):
        notes.append(f"preprocessing: not in the file, timm's mean {0.485 if deit else 0.5} and crop 0.9 are assumed")
        assumed = reading.IMAGENET if deit else {"mean": (0.5,), "std": (0.5,)}
        return {**assumed, "crop": 0.9, "fit": "crop", "interpolation": "bicubic"}
    fit = "squash" if pretrained.get("crop_mode") == "squash" else "crop"
    how = {"fit": fit, "interpolation": pretrained.text("interpolation") or "bicubic"}
    stats = {"mean": pretrained.numbers("mean"), "std": pretrained.numbers("std")}
    return {**stats, "crop": pretrained.get("crop_pct") or 0.875, **how}


def write(checkpoint: Checkpoint) -> Written:
    config, tensors = writing.vit_of(checkpoint, "timm")
    notes: list[str] = []
    if config.positions == "learned" and config.positioned_prefix == "class" and config.registers:
        if config.distillation_token:
            raise CheckpointError("timm cannot hold a distillation token beside registers; use --to native")
        notes.append(writing.fold_class_row(tensors, config.positioned_prefix_tokens))  # it positions all or none
        config = config.replace(positioned_prefix="none")
    if config.pre_norm and config.patch_bias:
        if torch.count_nonzero(tensors.pop("patches.bias")):
            raise CheckpointError("timm's patch embedding has no bias before a pre-norm, but this model has one")
        config = config.replace(patch_bias=False)
    described = timm_arguments.describe(config)
    lost: Fields = {"norm_eps": described.norm_eps, "position_resize": "timm"}
    notes += writing.not_kept(config, "timm", lost, "timm")
    foreign = to_theirs(tensors, described.layout, described.gates_apart)
    if config.stem and not config.stem.blocks:
        foreign = {name.replace("backbone.stem.", "backbone."): tensor for name, tensor in foreign.items()}
    return Written(foreign, notes, {"config.json": _config_json(config, described, checkpoint.outputs.names)})


def _config_json(config: ViTConfig, described: timm_arguments.Described, class_names: tuple[str, ...]) -> Fields:
    pre, classes, pooling = config.preprocessing, config.classes, described.args["global_pool"]
    mean, std = (writing.per_channel(values, config.channels) for values in (pre.mean, pre.std))
    fit = {"crop_pct": pre.crop, "crop_mode": "center" if pre.fit == "crop" else "squash"}
    pretrained: Fields = {"num_classes": classes, "input_size": [config.channels, *config.image_size], **fit}
    pretrained |= {"fixed_input_size": True, "interpolation": writing.interpolation(pre), "mean": mean, "std": std}
    pretrained |= {"first_conv": "patch_embed.proj", "classifier": "head"}
    about: Fields = {"architecture": described.architecture, "num_classes": classes, "num_features": config.width}
    about |= {"global_pool": pooling, "model_args": described.args}
    return about | {"pretrained_cfg": pretrained, **({"label_names": list(class_names)} if class_names else {})}
