"""Whether tensors fit a configuration, said in full: what is missing, extra or of another shape."""

from __future__ import annotations

import torch

from vitkit.checkpoints.layout import Checkpoint
from vitkit.errors import CheckpointError
from vitkit.model.build import Model, outline
from vitkit.model.config import ViTConfig

SHOWN = 10


def check_fit(checkpoint: Checkpoint, where: str) -> Model:
    """The model without memory (on the meta device), if the tensors fit it. Otherwise raise, with all that differs."""
    tensors, config = checkpoint.tensors, checkpoint.config
    layers = config.depth if isinstance(config, ViTConfig) else 0
    layers += config.stem.blocks if config.stem else 0
    if layers > len(tensors):  # do not even build what cannot fit
        raise CheckpointError(f"{where}: {layers} layers are declared, but there are only {len(tensors)} tensors")
    try:
        model = outline(config)
    except (RuntimeError, OverflowError, MemoryError, ValueError, TypeError) as e:  # sizes beyond all bounds
        reason = str(e).splitlines()[0]
        raise CheckpointError(f"{where}: the configuration describes a model that cannot be built ({reason})") from e
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected]
    other = [n for n in expected if n in tensors and tuple(tensors[n].shape) != expected[n]]
    wrong = [n for n in expected if n in tensors and not tensors[n].is_floating_point()]
    if not (missing or extra or other or wrong):
        return model

    def theirs(name: str) -> str:
        return checkpoint.in_file(name) or name

    lines = [f"{where}: the weights do not fit the model"]
    lines += _listed("missing", [theirs(n) for n in missing])
    lines += _listed("not part of the model", extra)
    shapes = [f"{theirs(n)} is {tuple(tensors[n].shape)}, should be {expected[n]}" for n in other]
    lines += _listed("of another shape", shapes)
    lines += _listed("not floating-point", [f"{theirs(n)} is {tensors[n].dtype}" for n in wrong])
    lines.append(f"  likely cause: {_likely_cause(missing, extra, other)}")
    raise CheckpointError("\n".join(lines))


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f", and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return [f"  {len(items)} {what}: {', '.join(items[:SHOWN])}{more}"]


def _likely_cause(missing: list[str], extra: list[str], other: list[str]) -> str:
    if missing and not extra and not other:
        return "the file is incomplete or was cut down; fetch or save it again"
    if extra and not missing and not other:
        return (
            "a variant of ViT that vitkit does not have, or parts of training in the file; remove those tensors first"
        )
    if missing and extra:
        return "tensors were renamed, or this is a variant of ViT that vitkit does not have"
    if other and all(name.startswith("head.") for name in other):
        return "the number of classes was changed in one place only; save the model again"
    return "the file was changed after it was saved, or a stated field (heads, image_size, ...) is wrong"


def to_one_dtype(checkpoint: Checkpoint, dtype: torch.dtype | None) -> None:
    """All weights in `dtype`; None keeps the file's, or the widest where a file mixes several."""
    found = {t.dtype for t in checkpoint.tensors.values()}
    wanted = dtype
    if wanted is None and len(found) > 1:
        for one in found:
            wanted = one if wanted is None else torch.promote_types(wanted, one)
        checkpoint.notes.append(
            f"dtype: the file mixes {', '.join(sorted(map(_word, found)))}; all became {_word(wanted)}"
        )
    elif wanted is not None and found != {wanted}:
        checkpoint.notes.append(f"dtype: {', '.join(sorted(map(_word, found)))} -> {_word(wanted)}")
    if wanted is not None:
        checkpoint.tensors = {n: t.to(wanted) for n, t in checkpoint.tensors.items()}


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
