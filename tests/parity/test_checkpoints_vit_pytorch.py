"""vit-pytorch's ViT and SimpleViT: trained for a step, saved as tutorials do, loaded with heads stated, equal logits.

Tolerance: 2e-6 of the largest logit; both compute in float32, in another order where attention is fused.
"""

from __future__ import annotations

import pytest
import torch

import peers
import vitkit
from vitkit.checkpoints import writing
from vitkit.checkpoints.load import open_checkpoint
from vitkit.errors import CheckpointError

BASE = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 96}
README = {  # the README's ways to call it, smaller
    "as it is": ("ViT", {"dim_head": 16, "dropout": 0.1, "emb_dropout": 0.1}),
    "dim_head of its own": ("ViT", {}),  # 64 in each of 4 heads, for a width of 64
    "mean pooling": ("ViT", {"pool": "mean", "dim_head": 16}),
    "grey images": ("ViT", {"channels": 1, "patch_size": 8}),
    "no projection": ("ViT", {"heads": 1, "dim_head": 64}),
    "not square": ("ViT", {"image_size": (64, 32), "dim_head": 8}),
    "no classes": ("ViT", {"num_classes": 0, "dim_head": 16}),
    "simple": ("SimpleViT", {}),
    "simple, grey": ("SimpleViT", {"channels": 1, "dim_head": 16}),
    "simple, not square": ("SimpleViT", {"image_size": (32, 96), "dim_head": 16}),
}


@torch.enable_grad()
def trained(model: torch.nn.Module, size, channels: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """One step of SGD on random images, so that no weight is as it was made."""
    images = torch.randn(4, channels, *((size, size) if isinstance(size, int) else size))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out = model.train()(images)
    (out**2).mean().backward()
    optimizer.step()
    return model.eval(), images


def built(name: str) -> tuple[torch.nn.Module, torch.Tensor, dict]:
    torch.manual_seed(0)
    kind, changes = README[name]
    args = BASE | changes
    model = getattr(peers.import_vit_pytorch(), kind)(**args)
    return *trained(model, args["image_size"], args.get("channels", 3)), args


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()) + 1e-7)


@torch.no_grad()
@pytest.mark.parametrize("name", README)
def test_a_state_dict_loads_exactly_with_heads_stated(tmp_path, name: str) -> None:
    theirs, images, args = built(name)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    size = args["image_size"] if not isinstance(args["image_size"], int) else None
    ours = vitkit.load(tmp_path / "vit.pth", heads=args["heads"], image_size=size)
    expected = theirs(images)
    close(ours(images), expected if args["num_classes"] else expected[:, 0])
    if name != "no projection":
        with pytest.raises(CheckpointError, match=r"does not say how many heads .* pass heads=N \(--heads N\)"):
            vitkit.load(tmp_path / "vit.pth", image_size=size)


@torch.no_grad()
@pytest.mark.parametrize("name", README)
def test_what_is_read_is_written_back_bit_for_bit(tmp_path, name: str) -> None:
    theirs, images, args = built(name)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    size = args["image_size"] if not isinstance(args["image_size"], int) else None
    checkpoint = open_checkpoint(tmp_path / "vit.pth", heads=args["heads"], image_size=size or 64)
    notes = writing.write(checkpoint, tmp_path / "back.pth", "vit_pytorch")
    back = torch.load(tmp_path / "back.pth")
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, back[key]) for key, tensor in theirs.state_dict().items())
    call = next(line for line in notes if "load it into" in line).removeprefix("load it into ")
    again = eval(call, {"vit_pytorch": peers.import_vit_pytorch()}).eval()
    again.load_state_dict(back)
    assert torch.equal(again(images), theirs(images))


@torch.no_grad()
def test_a_plain_model_made_here_is_written_and_runs_there(tmp_path) -> None:
    sizes = {"image_size": 32, "width": 32, "depth": 2, "heads": 2, "mlp_width": 48, "classes": 5}
    like = {"qkv_bias": False, "patch_norms": ("before", "after"), "norm_eps": 1e-5, "patch_size": 8}
    model = peers.randomize(vitkit.create(vitkit.ViTConfig(**sizes, **like)))
    vitkit.save(model, tmp_path / "m.safetensors")
    notes = writing.write(open_checkpoint(tmp_path / "m.safetensors"), tmp_path / "v.pt", "vit_pytorch")
    call = next(line for line in notes if "load it into" in line).removeprefix("load it into ")
    theirs = eval(call, {"vit_pytorch": peers.import_vit_pytorch()}).eval()
    theirs.load_state_dict(torch.load(tmp_path / "v.pt"))
    images = torch.randn(2, 3, 32, 32)
    close(model(images), theirs(images))
    vitkit.save(vitkit.create("mu"), tmp_path / "mu.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot hold a model with (qkv_bias|patch_norms)"):
        writing.write(open_checkpoint(tmp_path / "mu.safetensors"), tmp_path / "mu.pth", "vit_pytorch")


@torch.no_grad()
def test_the_student_of_a_distillation_wrapper_is_read(tmp_path) -> None:
    vit_pytorch = peers.import_vit_pytorch()
    distill = __import__("vit_pytorch.distill", fromlist=["DistillWrapper"])
    args = BASE | {"dim_head": 16}
    student = distill.DistillableViT(**args)
    for teacher in (vit_pytorch.ViT(**args), torch.nn.Sequential()):
        if not len(list(teacher.children())):
            teacher.add_module("conv1", torch.nn.Conv2d(3, 10, 64))  # the names of a ResNet
        wrapper = peers.randomize(distill.DistillWrapper(student=student, teacher=teacher))
        torch.save(wrapper.state_dict(), tmp_path / "w.pth")
        ours = vitkit.load(tmp_path / "w.pth", heads=4)
        images = torch.randn(2, 3, 64, 64)
        close(ours(images), student.eval()(images))
        assert any("left out" in line for line in ours.load_report)


def old_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names before 1.0: norms outside `fn`, the last norm in the head, no norms around the patches."""
    named = {}
    for name, tensor in tensors.items():
        for new, old in {
            ".0.to_": ".0.fn.to_",
            ".1.net.0.": ".1.norm.",
            ".1.net.1.": ".1.fn.net.0.",
            ".1.net.4.": ".1.fn.net.3.",
            "mlp_head.": "mlp_head.1.",
            "transformer.norm.": "mlp_head.0.",
        }.items():
            name = name.replace(new, old)
        named[name] = tensor[None] if name in ("cls_token", "pos_embedding") else tensor
    return named


@torch.no_grad()
def test_files_of_old_versions_are_read_and_their_pooling_is_asked_for(tmp_path) -> None:
    theirs, images, _ = built("as it is")
    torch.save(old_layout(theirs.state_dict()), tmp_path / "old.pth")
    with pytest.raises(CheckpointError, match=r"pass pooling='cls' or pooling='mean-all' \(--set pooling=cls\)"):
        vitkit.load(tmp_path / "old.pth", heads=4)
    close(vitkit.load(tmp_path / "old.pth", heads=4, pooling="cls")(images), theirs(images))  # LN(x)[0] = LN(x[0])
    mean = vitkit.load(tmp_path / "old.pth", heads=4, pooling="mean-all")
    states: list[torch.Tensor] = []
    theirs.transformer.layers[-1][1].register_forward_hook(lambda m, args, out: states.append(args[0] + out))
    theirs(images)
    expected = theirs.mlp_head(theirs.transformer.norm(states[0].mean(dim=1)))
    close(mean(images), expected)


def test_what_the_file_cannot_say_is_asked_for(tmp_path) -> None:
    theirs, _, _ = built("as it is")
    tensors = theirs.state_dict()
    torch.save(tensors, tmp_path / "v.pth")
    with pytest.raises(CheckpointError, match="heads=5 must divide the 64 channels"):
        vitkit.load(tmp_path / "v.pth", heads=5)
    odd = peers.import_vit_pytorch().ViT(**BASE | {"patch_size": (8, 16), "channels": 2})
    torch.save(odd.state_dict(), tmp_path / "odd.pth")
    model = vitkit.load(tmp_path / "odd.pth", heads=4, channels=2, patch_size=(8, 16), image_size=64)
    images = torch.randn(1, 2, 64, 64)
    close(model(images), odd.eval()(images).detach())
    wide = peers.import_vit_pytorch().ViT(**BASE | {"channels": 5})
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    with pytest.raises(CheckpointError, match="state both, patch_size="):
        vitkit.load(tmp_path / "wide.pth", heads=4)
    del tensors["pos_embedding"]
    torch.save(tensors, tmp_path / "v.pth")
    with pytest.raises(CheckpointError, match="'pos_embedding' is missing"):
        vitkit.load(tmp_path / "v.pth", heads=4)


def test_other_models_of_vit_pytorch_are_refused(tmp_path) -> None:
    deep = __import__("vit_pytorch.deepvit", fromlist=["DeepViT"]).DeepViT(**BASE)
    torch.save(deep.state_dict(), tmp_path / "deep.pth")
    with pytest.raises(CheckpointError, match=r"reattn_weights|not part of the model|pooling"):
        vitkit.load(tmp_path / "deep.pth", heads=4)
