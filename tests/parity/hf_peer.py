"""transformers' side of a comparison, without vitkit: how each class is called, and which of its outputs are compared.

`python hf_peer.py FOLDER`, in an interpreter that need not have vitkit, opens every checkpoint FOLDER/*/written as the
class that its config.json names and saves its outputs for FOLDER/*/images.pt as FOLDER/*/outputs.pt.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path

import torch

import peers

transformers = peers.import_transformers()


def patchified(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """As the image processor of SigLIP 2 gives them."""
    batch, channels, h, w = images.shape
    cut = images.reshape(batch, channels, h // 8, 8, w // 8, 8).permute(0, 2, 4, 3, 5, 1)
    shapes = torch.tensor([[h // 8, w // 8]] * batch)
    mask = torch.ones(batch, h * w // 64, dtype=torch.long)
    return {
        "pixel_values": cut.reshape(batch, -1, 64 * channels),
        "spatial_shapes": shapes,
        "pixel_attention_mask": mask,
    }


def call(model: torch.nn.Module, images: torch.Tensor):
    """The peer's outputs, with its positions resized where it must be asked for that."""
    name = type(model).__name__
    if name.startswith("Siglip2"):
        return model(**patchified(images))
    if name in ("CLIPModel", "SiglipModel"):
        return model.get_image_features(images, interpolate_pos_encoding=True)
    options: dict[str, object] = {}
    if name.startswith("ViTMAE"):  # it shuffles the patches: here in order
        options["noise"] = torch.arange(images.shape[2] * images.shape[3] // 64.0).expand(len(images), -1)
    native = getattr(model.config, "image_size", None) == list(images.shape[2:])  # not square: never to be resized
    wanted = "interpolate_pos_encoding" in inspect.signature(model.forward).parameters and not native
    if wanted or name.startswith(("CLIP", "Siglip", "MetaClip", "AltCLIP", "ChineseCLIP")):
        options["interpolate_pos_encoding"] = True
    return model(images, **options)


def outputs(model: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """What vitkit computes too: logits, or the pooled output and the last hidden states."""
    out, name = call(model, images), type(model).__name__
    for key in ("logits", "image_embeds"):
        if getattr(out, key, None) is not None:
            return {"pooled": out[key]}
    pooled = out if isinstance(out, torch.Tensor) else getattr(out, "pooler_output", None)
    found = {} if pooled is None else {"pooled": pooled}
    if "CLIP" in name or isinstance(out, torch.Tensor) or out.last_hidden_state is None:  # CLIP's are not normalised
        return found
    states, count = out.last_hidden_state, getattr(model.config, "num_detection_tokens", 0)
    if count:  # behind the patches there, before them here
        states = torch.cat([states[:, :1], states[:, -count:], states[:, 1:-count]], dim=1)
    return found | {"tokens": states}


@torch.no_grad()
def computed(folder: Path, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Nothing may be missing that is read, but a pooler; a classifier may stand beside a base class."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    state, extra = model.state_dict(), sorted(info["unexpected_keys"])
    missing = [key for key in info["missing_keys"] if state[key].numel() and not key.endswith("mask_token")]
    assert all(key.startswith("pooler.dense.") for key in missing), f"missing: {missing}"
    assert extra in ([], ["classifier.bias", "classifier.weight"]), f"unexpected: {extra}"
    assert not info["mismatched_keys"], info["mismatched_keys"]
    found = outputs(model.eval(), images)
    if missing:  # a pooler that the model never had, and that transformers drew at random
        del found["pooled"]
    if extra:
        from safetensors.torch import load_file

        beside = load_file(folder / "model.safetensors")
        if "pooled" not in found:  # as the note of the writer says
            states = found["tokens"]
            found["pooled"] = states.mean(1) if "Aimv2" in architecture else states[:, 0]
        found["pooled"] = found["pooled"] @ beside["classifier.weight"].T + beside["classifier.bias"]
    return found


def main(folder: Path) -> None:
    for one in sorted(folder.iterdir()):
        try:
            found: object = computed(one / "written", torch.load(one / "images.pt"))
        except Exception as e:  # all folders are reported, not the first that fails
            found = f"{type(e).__name__}: {e}"
        torch.save(found, one / "outputs.pt")


if __name__ == "__main__":
    assert importlib.util.find_spec("vitkit") is None
    main(Path(sys.argv[1]))
