"""MAE against Hugging Face's ViTMAEForPreTraining: the same weights and the same noise give the same loss and masks."""

import pytest
import torch
from torch import nn

import peers
import vitkit
from vitkit.model.vit import ViT
from vitkit.tasks.pretraining.mae import MaeOptions, MaskedAutoencoder

transformers = peers.import_transformers()


def copy_block(ours: nn.Module, theirs: nn.Module) -> None:
    attention = theirs.attention
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv"]
        getattr(ours.attention.qkv, kind).copy_(torch.cat(parts))
    for mine, other in (
        (ours.attention.out, attention.o_proj),
        (ours.norm1, theirs.layernorm_before),
        (ours.norm2, theirs.layernorm_after),
    ):
        mine.load_state_dict(other.state_dict())
    linears = [m for m in ours.mlp.modules() if isinstance(m, nn.Linear)]
    for mine, other in zip(linears, (theirs.mlp.fc1, theirs.mlp.fc2), strict=True):
        mine.load_state_dict(other.state_dict())


@torch.no_grad()
def copy(learner: MaskedAutoencoder, peer: nn.Module) -> None:
    model, vit, decoder = learner.vit, peer.vit, learner.decoder
    patches = vit.embeddings.patch_embeddings.projection
    model.patches.weight.copy_(patches.weight)
    model.patches.bias.copy_(patches.bias)
    model.class_token.copy_(vit.embeddings.cls_token[0])
    model.positions.learned.copy_(vit.embeddings.position_embeddings[0])
    model.norm.load_state_dict(vit.layernorm.state_dict())
    for ours, theirs in zip(model.encoder.blocks, vit.layers, strict=True):
        copy_block(ours, theirs)
    for ours, theirs in zip(decoder.encoder.blocks, peer.decoder.decoder_layers, strict=True):
        copy_block(ours, theirs)
    decoder.embed.load_state_dict(peer.decoder.decoder_embed.state_dict())
    decoder.norm.load_state_dict(peer.decoder.decoder_norm.state_dict())
    decoder.out.load_state_dict(peer.decoder.decoder_pred.state_dict())
    decoder.mask_token.copy_(peer.decoder.mask_token[0, 0])
    # its sines have wavelengths of their own (its row for the class token is zero, as ours)
    decoder.vectors = lambda grid: peer.decoder.decoder_pos_embed[0, 1:]


@pytest.mark.parametrize(("masking", "norm_pixels"), [(0.75, True), (0.5, False)])
def test_loss_and_masks_are_those_of_hugging_face(masking: float, norm_pixels: bool) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    decoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 128}
    sizes |= {f"decoder_{name}": value for name, value in decoder.items()}
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(**sizes, mask_ratio=masking, norm_pix_loss=norm_pixels)
    peer = transformers.ViTMAEForPreTraining(config)
    for parameter in (p for p in peer.parameters() if p.requires_grad):  # no zero may hide a mistake
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model = vitkit.create("mu", width=32, depth=2, heads=4, mlp_width=64, classes=0)
    assert isinstance(model, ViT)
    learner = MaskedAutoencoder(model, MaeOptions(masking=masking, decoder_width=32, norm_pixels=norm_pixels))
    copy(learner, peer)
    images, noise = torch.randn(3, 3, 32, 32), torch.rand(3, 16)
    theirs = peer(images, noise=noise)
    predicted, masked = learner.predict(images, noise)
    assert torch.equal(masked.hidden, theirs.mask)
    assert torch.equal(masked.restore, theirs.ids_restore)
    # float32 sums in another order: 1e-5
    torch.testing.assert_close(predicted, theirs.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(learner.losses(images, noise).mean(), theirs.loss, atol=1e-5, rtol=1e-5)
    learner.losses(images, noise).mean().backward()
    theirs.loss.backward()
    ours, other = model.patches.weight.grad, peer.vit.embeddings.patch_embeddings.projection.weight.grad
    torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-4)
