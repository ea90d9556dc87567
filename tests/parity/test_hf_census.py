"""Every ViT-like class of transformers, saved by `save_pretrained`: exact, or refused in words, never silently wrong.

Two blocks each, random weights with nothing at a neutral value, compared to 1e-4 of the output's range at the native
size and at a larger, non-square one where the peer can resize. A third of the classes by the hash of their names in
the fast tests, all in the slow ones. `python tests/parity/test_hf_census.py` writes the table into docs/checkpoints.md.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from pathlib import Path

import hf_peer
import pytest
import torch

import peers
from vitkit.checkpoints.huggingface.kind import DEFAULTS
from vitkit.checkpoints.huggingface.reader import BY_TYPE
from vitkit.checkpoints.load import load
from vitkit.errors import VitkitError

transformers = peers.import_transformers()

TOLERANCE = 1e-4  # of the output's range
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 48}
LABELS = {"num_labels": 5}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
RELATIVE, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
CLASSES: dict[str, dict[str, object]] = {  # class -> options of its configuration
    "ViTModel": MLP,
    "ViTForImageClassification": MLP | LABELS,
    "DeiTModel": MLP,
    "DeiTForImageClassification": MLP | LABELS,
    "DeiTForImageClassificationWithTeacher": MLP | LABELS,
    "ViTMAEModel": MLP | {"mask_ratio": 0.0},
    "ViTMSNForImageClassification": MLP | LABELS,
    "IJepaModel": MLP,
    "IJepaForImageClassification": MLP | LABELS,
    "Dinov2Model": {},
    "Dinov2ForImageClassification": {**LABELS, "use_swiglu_ffn": True},
    "Dinov2WithRegistersModel": {"num_register_tokens": 3},
    "Dinov2WithRegistersForImageClassification": {**LABELS, "num_register_tokens": 3},
    "DINOv3ViTModel": MLP | {"num_register_tokens": 3},
    "BeitModel": MLP | {"use_absolute_position_embeddings": True, "use_mean_pooling": False},
    "BeitForImageClassification": MLP | LABELS | RELATIVE,
    "Data2VecVisionForImageClassification": MLP | LABELS | SHARED,
    "YolosModel": MLP | {"image_size": [32, 48], "num_detection_tokens": 4, "use_mid_position_embeddings": False},
    "PixioModel": {"n_cls_tokens": 3},
    "InternVLVisionModel": MLP,
    "CLIPVisionModel": MLP,
    "CLIPVisionModelWithProjection": MLP | {"projection_dim": 24},
    "CLIPForImageClassification": MLP | LABELS,
    "CLIPModel": MLP,
    "MetaClip2VisionModelWithProjection": MLP | {"projection_dim": 24},
    "AltCLIPVisionModel": MLP,
    "ChineseCLIPVisionModel": MLP,
    "SiglipVisionModel": MLP,
    "SiglipForImageClassification": MLP | LABELS,
    "SiglipModel": MLP,
    "Siglip2VisionModel": MLP | {"num_patches": 16},
    "Siglip2ForImageClassification": MLP | LABELS | {"num_patches": 16},
    "Aimv2VisionModel": MLP,
    "MLCDVisionModel": MLP,
}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {  # other configurations of the same classes
    "DINOv3ViTModel, gated": ("DINOv3ViTModel", MLP | {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True}),
    "DINOv3ViTModel, no biases": (
        "DINOv3ViTModel",
        MLP | {"query_bias": False, "value_bias": False, "proj_bias": False, "mlp_bias": False},
    ),
    "BeitModel, relative and absolute": ("BeitModel", MLP | RELATIVE | {"use_absolute_position_embeddings": True}),
    "BeitModel, relative and shared": ("BeitModel", MLP | RELATIVE | SHARED),
    "BeitModel, no LayerScale": ("BeitModel", MLP | {"layer_scale_init_value": 0.0}),
    "InternVLVisionModel, RMSNorm": ("InternVLVisionModel", MLP | {"norm_type": "rms_norm", "attention_bias": True}),
    "InternVLVisionModel, q/k norm": ("InternVLVisionModel", MLP | {"use_qk_norm": True}),
    "InternVLVisionModel, final norm": ("InternVLVisionModel", MLP | {"use_mean_pooling": False}),
    "YolosModel, middle positions": ("YolosModel", MLP | {"image_size": [32, 48], "num_detection_tokens": 4}),
    "Aimv2VisionModel, native": ("Aimv2VisionModel", MLP | {"is_native": True}),
    "Aimv2VisionModel, biases, no head": (
        "Aimv2VisionModel",
        MLP | {"qkv_bias": True, "mlp_bias": True, "use_head": False},
    ),
    "SiglipVisionModel, 36 pixels": ("SiglipVisionModel", MLP | {"image_size": 36}),
    "SiglipVisionModel, no head": ("SiglipVisionModel", MLP | {"vision_use_head": False}),
}
ALL = {name: (name, options) for name, options in CLASSES.items()} | VARIANTS
FAST = [name for name in ALL if zlib.crc32(name.encode()) % 3 == 0]
REFUSED = {  # the only ones that may be, and the key that the error names
    "MLCDVisionModel": "model_type",
    "BeitModel, relative and shared": "use_shared_relative_position_bias",
    "InternVLVisionModel, q/k norm": "use_qk_norm",
    "YolosModel, middle positions": "use_mid_position_embeddings",
    "Aimv2VisionModel, native": "is_native",
}


def build(name: str, **changes: object) -> torch.nn.Module:
    kind, options = ALL[name]
    options = options | changes
    model = getattr(transformers, kind)
    config = model.config_class
    if "vision_config" in getattr(config, "sub_configs", {}):
        labels = {key: value for key, value in options.items() if key in LABELS}
        vision = SMALL | {key: value for key, value in options.items() if key not in LABELS}
        made = config(vision_config=vision, text_config=TEXT, projection_dim=24, **labels)
    else:
        made = config(**SMALL | options)
    return randomized(model(made))


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """All that is saved; what is computed from the configuration, such as rotary frequencies, stays."""
    computed = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in model.state_dict()}
    peers.randomize(model, scale=0.1)
    for name, buffer in model.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])
    return model


def error(ours: torch.nn.Module, theirs: torch.nn.Module, size: tuple[int, int]) -> float:
    """The largest difference, as a part of the output's range."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    wanted = hf_peer.outputs(theirs, images)
    found = [((ours if key == "pooled" else ours.tokens)(images), value) for key, value in wanted.items()]
    assert found
    assert all(a.shape == b.shape for a, b in found), [(a.shape, b.shape) for a, b in found]
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in found)


@torch.no_grad()
def outcome(name: str, folder: Path) -> tuple[str, str]:
    """("exact" or "wrong" or "refused", the error at both sizes or the reason)."""
    theirs = build(name)
    theirs.save_pretrained(folder)
    try:
        ours = load(folder)
    except VitkitError as e:
        return "refused", str(e).removeprefix(f"{folder}: ")
    native = error(ours, theirs, (32, 48) if "Yolos" in name else (36, 36) if "36" in name else (32, 32))
    try:
        hf_peer.call(theirs, torch.zeros(1, 3, 48, 64))
        larger = error(ours, theirs, (48, 64))
    except (RuntimeError, ValueError):  # the peer cannot resize its positions
        larger = 0.0
    exact = native <= TOLERANCE and larger <= TOLERANCE
    return "exact" if exact else "wrong", f"{native:.0e} native, {larger:.0e} larger"


def check(name: str, folder: Path) -> None:
    found, why = outcome(name, folder / "m")
    assert found != "wrong", why
    assert found == ("refused" if name in REFUSED else "exact"), why
    if found == "refused":
        assert REFUSED[name] in why
    (folder / "bare").mkdir()
    shutil.copy(folder / "m/model.safetensors", folder / "bare/model.safetensors")
    with pytest.raises(VitkitError, match=r"config\.json"):
        load(folder / "bare")


@pytest.mark.parametrize("name", FAST)
def test_a_third(name: str, tmp_path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in FAST])
def test_the_rest(name: str, tmp_path) -> None:
    check(name, tmp_path)


def test_enough_classes() -> None:
    assert len([name for name in CLASSES if name not in REFUSED]) >= 21


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_what_config_json_leaves_out(model_type: str) -> None:
    """The defaults of every kind are those of its class."""
    theirs = transformers.CONFIG_MAPPING[model_type]().to_dict()
    for key, value in (DEFAULTS | BY_TYPE[model_type].defaults).items():
        found = theirs.get(key, value)
        assert (tuple(found) if isinstance(found, list) else found) == value, key


def table() -> str:
    """The rows of docs/checkpoints.md, made by a run of all."""
    rows = ["| class of transformers | loads | at another size |", "|---|---|---|"]
    for name in ALL:
        with tempfile.TemporaryDirectory() as folder:
            found, why = outcome(name, Path(folder) / "m")
        resized = "the peer cannot" if "0e+00 larger" in why else "exact"
        reason = f"refused: {why.split(' in config.json')[0].removeprefix('not supported: ')}"
        rows.append(f"| {name} | {found if found != 'refused' else reason} | {resized if found == 'exact' else ''} |")
    return "\n".join(rows)


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs/checkpoints.md"
    before, _, rest = page.read_text().partition("<!-- hf census -->\n")
    page.write_text(f"{before}<!-- hf census -->\n{table()}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")
