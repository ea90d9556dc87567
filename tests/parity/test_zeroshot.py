"""Zero-shot classifiers give transformers' own `logits_per_image`, to 1e-4; every command takes them unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from hf_peer import patchified
from PIL import Image
from test_hf_census import MLP, SMALL, TEXT
from typer.testing import CliRunner

import peers
import vitkit
from vitkit.checkpoints.load import load
from vitkit.checkpoints.zeroshot import zeroshot
from vitkit.cli.main import app
from vitkit.data import normalise
from vitkit.errors import CheckpointError
from vitkit.web.app import create_app
from vitkit.web.models import load_served
from vitkit.web.settings import ServeSettings
from web.serving import image, images_of, with_client

transformers = peers.import_transformers()
tokenizers = pytest.importorskip("tokenizers")

LABELS = ["cat", "dog", "grey heron"]
TEMPLATE = "a photo of a {}"
MARKS = ["<pad>", "<unk>", "<s>", "</s>"]
WORDS = [*MARKS, "a", "photo", "of", "the", "drawing", "cat", "dog", "grey", "heron", "small", "."]


def words_tokenizer(length: int, **options: object):
    """One word, one token; with marks of beginning and end."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("<s>", 2), ("</s>", 3)]
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=marks)
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=length, **special, **options)


def pieces_tokenizer(folder: Path):
    """SigLIP's own, of sentencepiece, trained on a few sentences."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentences = [TEMPLATE.replace("{}", word) for word in WORDS[4:]] * 20
    folder.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=str(folder / "spiece"), vocab_size=30, minloglevel=2
    )
    return transformers.SiglipTokenizer(str(folder / "spiece.model"), model_input_names=["input_ids"])


def made(kind: str, folder: Path):
    """A model with a text tower and its tokenizer, saved together."""
    length = 12
    text = TEXT | {"max_position_embeddings": length, "eos_token_id": 3, "num_hidden_layers": 2}
    vision = SMALL | MLP | ({"num_patches": 16} if kind == "Siglip2" else {})
    config = getattr(transformers, f"{kind}Config")(vision_config=vision, text_config=text, projection_dim=24)
    model = peers.randomize(getattr(transformers, f"{kind}Model")(config), scale=0.1)
    model.logit_scale.data.fill_(2.5)
    model.save_pretrained(folder)
    inputs = {} if kind == "CLIP" else {"model_input_names": ["input_ids"]}
    tokenizer = pieces_tokenizer(folder) if kind == "Siglip" else words_tokenizer(length, **inputs)
    tokenizer.save_pretrained(folder)
    return model, lambda texts: tokenizer(
        texts, padding="max_length" if kind != "CLIP" else True, max_length=length, truncation=True, return_tensors="pt"
    )


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "Siglip2", "MetaClip2"])
@torch.no_grad()
def test_logits_of_the_peer(kind: str, tmp_path) -> None:
    theirs, tokenize = made(kind, tmp_path)
    images = torch.randn(3, 3, 32, 32)
    given = patchified(images) if kind == "Siglip2" else {"pixel_values": images}
    texts = [TEMPLATE.replace("{}", label) for label in LABELS]
    wanted = theirs(**tokenize(texts), **given).logits_per_image
    ours = load(zeroshot(tmp_path, LABELS, [TEMPLATE]))
    assert ours.class_names == tuple(LABELS)
    torch.testing.assert_close(ours(images), wanted, atol=1e-4 * float(wanted.max() - wanted.min()), rtol=0)
    assert float(wanted.std(dim=1).min()) > 0.01  # the labels differ


@torch.no_grad()
def test_templates_are_averaged_by_length_and_direction(tmp_path) -> None:
    theirs, tokenize = made("CLIP", tmp_path)
    templates = [TEMPLATE, "a drawing of the small {}.", "{}"]
    rows = []
    for template in templates:
        out = theirs.get_text_features(**tokenize([template.replace("{}", label) for label in LABELS]))
        rows.append(torch.nn.functional.normalize(getattr(out, "pooler_output", out), dim=-1))
    wanted = torch.nn.functional.normalize(torch.stack(rows).mean(dim=0), dim=-1) * theirs.logit_scale.exp()
    head = zeroshot(tmp_path, LABELS, templates).tensors["head.classifier.weight"]
    torch.testing.assert_close(head, wanted, atol=1e-5, rtol=1e-5)


def test_what_is_wrong_is_said(tmp_path) -> None:
    made("CLIP", tmp_path)
    with pytest.raises(CheckpointError, match="two labels or more"):
        zeroshot(tmp_path, ["cat"])
    with pytest.raises(CheckpointError, match=r"has no \{\}"):
        zeroshot(tmp_path, LABELS, ["a photo"])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        zeroshot(tmp_path, LABELS)
    vit = transformers.ViTModel(transformers.ViTConfig(**SMALL | MLP))
    vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(CheckpointError, match="vit-b/16 is a name of the zoo and has no trained weights"):
        zeroshot("vit-b/16", LABELS, [TEMPLATE])
    with pytest.raises(CheckpointError, match="has no text tower"):
        zeroshot(tmp_path / "vit", LABELS)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def photos(tmp_path) -> Path:
    for i in range(12):
        folder = tmp_path / "photos" / LABELS[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (40, 40, 3), np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


@pytest.mark.slow
def test_commands_take_the_run(tmp_path, photos) -> None:
    made("CLIP", tmp_path / "clip")
    names = tmp_path / "names.txt"
    names.write_text("dog\ngrey heron\n")
    out = str(tmp_path / "run")
    about = json.loads(
        run("zeroshot", str(tmp_path / "clip"), "--labels", TEMPLATE, "cat", str(names), "--out", out, "--json")
    )
    assert about["classes"] == LABELS
    assert json.loads(run("inspect", out, "--json"))["class_names"] == LABELS
    run("evaluate", out, str(photos), "--split", "all", "--out", str(tmp_path / "eval"))
    run("explain", out, str(next(photos.rglob("*.png"))), "--out", str(tmp_path / "maps"))
    run("export", out, "--to", "torch-export", "--out", str(tmp_path / "model.pt2"))
    run("export", out, "--to", "onnx", "--out", str(tmp_path / "model.onnx"))
    run("tune", out, str(photos), "--runtimes", "eager", "--seconds", "0.1")
    model = vitkit.load(out)
    assert model.config.unit_length
    assert vitkit.load(out, classes=5)(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_a_run_is_served(tmp_path) -> None:
    """The probabilities are those of transformers' logits, under the labels' own names; a map explains the first."""
    theirs, tokenize = made("CLIP", tmp_path / "clip")
    run("zeroshot", str(tmp_path / "clip"), "--labels", TEMPLATE, *LABELS, "--out", str(tmp_path / "run"))
    (served,) = load_served([str(tmp_path / "run")], ServeSettings())
    sent = image()
    predicted, model, explained = with_client(create_app([served], ServeSettings()), lambda client: asked(client, sent))
    with torch.no_grad():
        texts = tokenize([TEMPLATE.replace("{}", label) for label in LABELS])
        wanted = theirs(**texts, pixel_values=images_of(served, sent)).logits_per_image[0].softmax(-1)
    (one,) = predicted["predictions"]
    found = {rank["name"]: rank["probability"] for rank in one["classes"]}
    assert found == pytest.approx(dict(zip(LABELS, wanted.tolist(), strict=True)), abs=1e-4)
    assert model["classes"] == LABELS
    assert np.shape(explained["values"]) == (4, 4)
    assert np.ptp(explained["values"]) > 0


async def asked(client: httpx.AsyncClient, sent: bytes) -> list[dict]:
    answers = [await client.post("/api/v1/predict?top=3", content=sent), await client.get("/api/v1/model")]
    answers.append(await client.post("/api/v1/explain?method=relevance&class=dog", content=sent))
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text[:300] for answer in answers]
    return [answer.json() for answer in answers]


@torch.no_grad()
def test_words_search_a_set_as_the_peer_ranks_it(tmp_path, photos: Path) -> None:
    """The order of the images and their cosines are those of the logits of transformers."""
    theirs, tokenize = made("CLIP", tmp_path / "clip")
    index = vitkit.index(photos, tmp_path / "clip", out=tmp_path / "i")
    assert index.about["features"] == "pooled"
    hits = index.search_text("a photo of the small cat", 12)
    model = load(tmp_path / "clip")
    source = vitkit.open_data(photos).split("all")
    pre = model.config.preprocessing
    pixels = normalise(torch.stack([source.pixels_of(h.row, pre, 3) for h in hits]), pre)
    wanted = theirs(**tokenize(["a photo of the small cat"]), pixel_values=pixels).logits_per_image[:, 0]
    cosines = wanted / theirs.logit_scale.exp()
    np.testing.assert_allclose([h.score for h in hits], cosines.numpy(), atol=1e-4)
    assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
