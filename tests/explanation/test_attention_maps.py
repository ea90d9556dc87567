"""Attention from the output token: what is captured, rolled out and read out."""

import numpy as np
import pytest
import torch
from torch import Tensor

import vitkit
from peers import import_transformers, randomize
from vitkit.errors import InputError
from vitkit.explanation.attention import output_attention, query_attention, rollout, with_residual
from vitkit.explanation.inside import attention_weights, readout, readouts


def plain_rollout(layers: list[np.ndarray]) -> np.ndarray:
    """T x T, one image; loops over heads and rows."""
    count = layers[0].shape[-1]
    total = np.eye(count)
    for heads in layers:
        mean = sum(heads) / len(heads)
        mixed = np.zeros((count, count))
        for i in range(count):
            for j in range(count):
                mixed[i, j] = 0.5 * mean[i, j] + (0.5 if i == j else 0.0)
            mixed[i] /= mixed[i].sum()
        total = mixed @ total
    return total


def random_layers(depth: int = 4) -> list[Tensor]:
    return [torch.randn(2, 3, 9, 9, dtype=torch.float64).softmax(-1) for _ in range(depth)]


def last_rollout(layers: list[Tensor]) -> Tensor:
    return list(rollout(map(with_residual, layers)))[-1]


def test_rollout_of_identity_is_identity() -> None:
    eye = torch.eye(9)[None, None]
    torch.testing.assert_close(last_rollout([eye] * 5)[0], torch.eye(9))


def test_rows_of_rollout_sum_to_one() -> None:
    torch.testing.assert_close(last_rollout(random_layers()).sum(-1), torch.ones(2, 9, dtype=torch.float64))


def test_rollout_against_loops() -> None:
    layers = random_layers()
    found = last_rollout(layers)
    for b in range(2):
        np.testing.assert_allclose(found[b].numpy(), plain_rollout([w[b].numpy() for w in layers]), atol=1e-12)


def test_residual_rows_sum_to_one_even_when_attention_does_not() -> None:
    weights = torch.rand(1, 2, 5, 5)
    torch.testing.assert_close(with_residual(weights).sum(-1), torch.ones(1, 5))


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls+mean", "map"])
def test_maps_are_those_of_the_full_matrices(pooling: str) -> None:
    model = randomize(vitkit.create("mu", pooling=pooling, registers=1, image_size=(16, 32)), scale=0.3)
    images = torch.randn(2, 3, 16, 32)
    found = output_attention(model, images)
    layers = attention_weights(model, images)
    share = readout(model, images)
    torch.testing.assert_close(share.sum(-1), torch.ones(2))
    for layer, weights in enumerate(layers):
        row = torch.einsum("bq,bhqk->bhk", share, weights)[..., 2:].unflatten(-1, (2, 4))
        np.testing.assert_allclose(found.raw[:, layer], row.numpy(), atol=1e-6)
    rolled = (share[:, None] @ last_rollout(layers))[:, 0, 2:].unflatten(-1, (2, 4))
    np.testing.assert_allclose(found.rollout, rolled.numpy(), atol=1e-6)
    assert (found.probe is None) == (pooling != "map")


def test_readout_says_who_is_read() -> None:
    images = torch.randn(1, 3, 32, 32)
    of = {p: readout(vitkit.create("mu", pooling=p), images)[0] for p in ("cls", "mean", "cls+mean")}
    assert of["cls"].tolist() == [1.0] + [0.0] * 16
    assert of["mean"][0] == 0
    assert of["mean"][1:].tolist() == pytest.approx([1 / 16] * 16)
    assert of["cls+mean"][0] == pytest.approx(0.5)
    distilled = readout(vitkit.create("mu", distillation_token=True), images)[0]
    assert distilled[:3].tolist() == [0.5, 0.5, 0.0]


def test_the_probe_of_a_map_head_is_the_one_that_pools() -> None:
    """The probe's attention, applied to the values, gives what the head itself makes of the tokens."""
    model = randomize(vitkit.create("mu", pooling="map"), scale=0.3)
    pool = model.head.pool
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        tokens, weights = model.tokens(images), readouts(model, images)  # B T D, B H T
        values = pool.key_value(tokens).chunk(2, dim=-1)[1].unflatten(-1, (2, -1))  # B T H K
        x = pool.out(torch.einsum("bht,bthk->bhk", weights, values).flatten(1))
        torch.testing.assert_close(x + pool.mlp(pool.norm(x)), pool(tokens))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2))


def test_only_the_layers_asked_for_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    import vitkit.model.attention as attention

    formed = []
    plain = attention.attention_weights
    monkeypatch.setattr(attention, "attention_weights", lambda *a: formed.append(1) or plain(*a))
    model = vitkit.create("mu", depth=5).eval()
    assert len(attention_weights(model, torch.randn(1, 3, 32, 32), layers=[1, -1])) == 2
    assert len(formed) == 2


def test_query_is_a_row_of_the_matrix() -> None:
    model = randomize(vitkit.create("mu", registers=3), scale=0.3)
    images = torch.randn(2, 3, 32, 32)
    found = query_attention(model, images, (2, 1), layers=[1])
    weights = attention_weights(model, images, layers=[1])[0]
    np.testing.assert_allclose(found[:, 0].reshape(2, 2, 16), weights[:, :, 4 + 9, 4:].numpy(), atol=1e-7)
    with pytest.raises(InputError, match="rows are 0 to 3"):
        query_attention(model, images, (4, 0))


@pytest.mark.parametrize(("dtype", "scale", "apart"), [(torch.float32, 0.05, 1e-6), (torch.float64, 0.3, 1e-6)])
def test_equals_hugging_face_output_attentions(dtype: torch.dtype, scale: float, apart: float) -> None:
    """Larger weights need float64 to stay within it; even then Hugging Face takes the softmax in float32."""
    transformers = import_transformers()
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    config._attn_implementation = "eager"
    theirs = randomize(transformers.ViTModel(config, add_pooling_layer=False), scale=scale).to(dtype)
    ours = (
        vitkit.create("mu", width=48, depth=3, heads=4, mlp_width=96, norm_eps=config.layer_norm_eps).eval().to(dtype)
    )
    ours.load_state_dict(_from_hugging_face(theirs.state_dict(), 3), strict=False)
    images = torch.randn(2, 3, 32, 32, dtype=dtype)
    with torch.no_grad():
        known = theirs(images, output_attentions=True).attentions
    found = attention_weights(ours, images)
    assert len(found) == len(known) == 3
    for mine, other in zip(found, known, strict=True):
        assert (mine - other).abs().max() < apart


def _from_hugging_face(theirs: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    ours = {
        "class_token": theirs["embeddings.cls_token"][0],
        "positions.learned": theirs["embeddings.position_embeddings"][0],
        "patches.weight": theirs["embeddings.patch_embeddings.projection.weight"],
        "patches.bias": theirs["embeddings.patch_embeddings.projection.bias"],
    }
    old = any(".attention.attention." in name for name in theirs)
    for i in range(depth):
        names = [n for n in theirs if f"layer.{i}." in n or f"layers.{i}." in n]
        block = {n.split(f".{i}.", 1)[1]: theirs[n] for n in names}
        q, k, v = ("query", "key", "value") if old else ("q_proj", "k_proj", "v_proj")
        for part in ("weight", "bias"):
            qkv = [next(t for n, t in block.items() if n.endswith(f"{x}.{part}")) for x in (q, k, v)]
            ours[f"encoder.blocks.{i}.attention.qkv.{part}"] = torch.cat(qkv)
            for mine, endings in {
                "attention.out": ("attention.output.dense", "o_proj"),
                "norm1": ("layernorm_before",),
                "norm2": ("layernorm_after",),
                "mlp.up": ("intermediate.dense", "fc1"),
                "mlp.down": ("output.dense", "fc2"),
            }.items():
                found = [t for n, t in block.items() if n.endswith(tuple(f"{e}.{part}" for e in endings))]
                if mine == "mlp.down" and len(found) == 2:  # "output.dense" ends both names
                    found = [t for n, t in block.items() if n == f"output.dense.{part}"]
                assert len(found) == 1, (mine, list(block))
                ours[f"encoder.blocks.{i}.{mine}.{part}"] = found[0]
    return ours
