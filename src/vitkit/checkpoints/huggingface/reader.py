"""A folder of Hugging Face -> vitkit. config.json says everything; shapes are checked when the model is loaded."""

from __future__ import annotations

import re

from torch import Tensor

from vitkit.checkpoints import reading
from vitkit.checkpoints.family import Checkpoint, Opened, Table
from vitkit.checkpoints.huggingface import beit, clip, dinov3, vit
from vitkit.checkpoints.huggingface.kind import DEFAULTS, Kind, common, image_size, neutral_value
from vitkit.checkpoints.huggingface.processor import preprocessing
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.tensors import WITH_LEADING_AXIS, LazyTensors
from vitkit.errors import CheckpointError
from vitkit.model.base import OutputKind, Outputs
from vitkit.model.build import outline as outline_of
from vitkit.model.config import AnyConfig

KINDS: list[Kind] = [*vit.KINDS, *beit.KINDS, *clip.KINDS, *dinov3.KINDS]
BY_TYPE = {kind.type: kind for kind in reversed(KINDS)}
_TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model"}
_TOWERS |= {"aimv2": "aimv2_vision_model", "internvl": "internvl_vision", "metaclip_2": "metaclip_2_vision_model"}
_TOWERS |= {"altclip": "altclip_vision_model", "chinese_clip": "chinese_clip_vision_model"}
_PATCHES = re.compile(r"^(.*?)embeddings\.patch_embed(dings?)?(\.projection)?\.weight$")
HEADS = r"(cls_|distillation_)?classifier\..*|visual_projection\.weight"
_OTHERS = r"(.*\.)?(text_model|language_model|multi_modal_projector)\..*|logit_(scale|bias)|text_projection\..*"
OUTPUTS: dict[str, OutputKind] = {"multi_label_classification": "labels", "regression": "values"}


def matches(opened: Opened) -> bool:
    return any(map(_PATCHES.match, opened.tensors))


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    if not (about := opened.table("config.json")):
        raise CheckpointError("weights of Hugging Face need the config.json that belongs beside them; fetch it too")
    kind, notes = kind_of(about), list[str]()
    vision = vision_table(about, kind)
    tensors = kind.unpack(_to_our_names(opened.tensors, kind, notes), vision)
    fields = common(tensors := tensors.fused(), vision) | kind.fields(tensors, vision)
    fields["image_size"] = size = image_size(tensors, vision, fields, notes)
    if any(n % p for n, p in zip(size, vision.size("patch_size"), strict=True)):
        fields["indivisible"] = "cut"  # a convolution leaves out what fills no patch
    fields["preprocessing"] = preprocessing(opened, kind, notes)
    checkpoint = reading.make_checkpoint(tensors, options, notes, kind.names.theirs, **fields)
    if kind.neutral:
        checkpoint.tensors = _with_neutral(tensors, checkpoint.config, kind.neutral)
    checkpoint.outputs = _outputs(about, checkpoint.config.classes)
    return checkpoint


def kind_of(about: Table) -> Kind:
    vision = about.table("vision_config").text("model_type") or _TOWERS.get(about.text("model_type"), "")
    if vision in BY_TYPE:
        return BY_TYPE[vision]
    return BY_TYPE[about.one_of("model_type", [*BY_TYPE, *_TOWERS])]


def vision_table(about: Table, kind: Kind) -> Table:
    """config.json of the vision tower, with what it leaves out; `architectures` are those of the whole."""
    inside = about.table("vision_config") | about.table("vision_config_dict")  # the latter in old files
    vision = inside if inside or about.text("model_type") in _TOWERS else about
    stated = {name: value for name, value in vision.items() if value is not None}
    merged = DEFAULTS | kind.defaults | stated | {"architectures": about.get("architectures")}
    if "num_patches" in merged:  # SigLIP 2 has no image size of its own
        patch = Table(merged).whole("patch_size")
        merged["image_size"] = patch * round(Table(merged).whole("num_patches") ** 0.5)
    return Table(merged)


def _to_our_names(tensors: LazyTensors, kind: Kind, notes: list[str]) -> LazyTensors:
    prefix = next(match[1] for name in tensors if (match := _PATCHES.match(name)))
    has_classifier = any(re.fullmatch(HEADS, name) and "classifier" in name for name in tensors)
    left_out = f"{_OTHERS}|{kind.left_out}" + (r"|pooler\.dense\..*" if has_classifier else "")

    def our_name(name: str) -> str | None:
        inside = re.sub(*kind.alias, name.removeprefix(prefix))
        return None if re.fullmatch(left_out, inside) else kind.names.ours(inside)

    return tensors.renamed(our_name, notes, "of other parts").converted(_two_axes)


def _two_axes(name: str, tensor: Tensor) -> Tensor:
    """Tokens and tables as (N, width), whatever axes they have on disk."""
    if name not in WITH_LEADING_AXIS:
        return tensor
    if not 1 <= tensor.ndim <= 3 or (tensor.ndim == 3 and len(tensor) != 1):
        raise CheckpointError(f"the tensor for {name!r} has shape {tuple(tensor.shape)}, but should have (1, N, width)")
    return tensor.reshape(-1, tensor.shape[-1])


def _with_neutral(tensors: LazyTensors, config: AnyConfig, pattern: str) -> LazyTensors:
    dtype = tensors.outlines["patches.weight"].dtype
    added = {
        name: neutral_value(name, outline.to(dtype))
        for name, outline in outline_of(config).state_dict().items()
        if re.fullmatch(pattern, name) and name not in tensors
    }
    outlines = {**tensors.outlines, **{name: tensor.to("meta") for name, tensor in added.items()}}
    return LazyTensors(outlines, lambda name: added[name] if name in added else tensors[name])


def _outputs(about: Table, classes: int) -> Outputs:
    names = about.words("id2label", classes)
    named = () if names == tuple(f"LABEL_{i}" for i in range(classes)) else names
    return Outputs(OUTPUTS.get(about.text("problem_type"), "classes"), named)
