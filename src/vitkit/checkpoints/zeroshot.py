"""CLIP or SigLIP and the names of classes -> an ordinary classifier, frozen: the text tower runs here, once.

The vector of "a photo of a cat", times the logit scale, becomes the row of "cat" in the classifier, which sees image
embeddings of length 1. Several templates are averaged as CLIP's authors do: each vector divided by its length, the
mean divided by its own. Texts become tokens by the checkpoint's own tokenizer files.

Shapes: S texts of T tokens, D width.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.checkpoints.family import Checkpoint, Opened, Table, read_json
from vitkit.checkpoints.huggingface.kind import ACTIVATIONS
from vitkit.checkpoints.load import open_checkpoint
from vitkit.checkpoints.options import ModelOptions
from vitkit.checkpoints.source import locate, open_path
from vitkit.checkpoints.tensors import LazyTensors
from vitkit.errors import CheckpointError, MissingPackage
from vitkit.model.base import Outputs
from vitkit.model.config import ViTConfig
from vitkit.model.mlp import ACTIVATIONS as FUNCTIONS

Tokens = tuple[list[list[int]], int]  # of each text, and what fills up
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "spiece.model")
_CLIP = {"num_attention_heads": 8, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "eos_token_id": 49407}
_SIGLIP = {"num_attention_heads": 12, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
TYPES = {"clip": _CLIP, "metaclip_2": _CLIP, "siglip": _SIGLIP, "siglip2": _SIGLIP}  # and what text_config leaves out


def zeroshot(
    source: str | Path, labels: Sequence[str], templates: Sequence[str] = ("a photo of a {}",), **stated: object
) -> Checkpoint:
    """The image tower of `source` with a classifier of `labels`, each put into the {} of every template."""
    _check(labels, templates)
    opened, options = open_path(locate(source, TOKENIZER)), ModelOptions.of(**stated)
    vectors = _embedded(opened, source, [template.replace("{}", label) for template in templates for label in labels])
    vectors = F.normalize(vectors.unflatten(0, (len(templates), -1)).mean(dim=0), dim=-1)  # classes D
    bias = opened.tensors["logit_bias"] if "logit_bias" in opened.tensors else torch.zeros(())
    image = open_checkpoint(source, options)
    assert isinstance(image.config, ViTConfig)
    dtype = image.tensors["patches.weight"].dtype
    head = {"head.classifier.weight": (opened.tensors["logit_scale"].float().exp() * vectors).to(dtype)}
    head["head.classifier.bias"] = bias.float().reshape(-1).expand(len(labels)).to(dtype).contiguous()
    config = image.config.replace(classes=len(labels), unit_length=True)
    return replace(image, config=config, tensors={**image.tensors, **head}, outputs=Outputs(names=tuple(labels)))


def has_text_tower(source: str | Path) -> bool:
    """Whether `embed_texts` takes it; a name of the zoo, a run and most checkpoints have none."""
    try:
        return _tower(open_path(locate(source, TOKENIZER))) is not None
    except CheckpointError:
        return False


def embed_texts(source: str | Path, texts: Sequence[str]) -> Tensor:
    """S D of length 1, in the space of the image tower's pooled features."""
    return _embedded(open_path(locate(source, TOKENIZER)), source, texts)


def _tower(opened: Opened) -> str | None:
    kind = opened.table("config.json").text("model_type")
    return kind if kind in TYPES and "logit_scale" in opened.tensors else None


def _embedded(opened: Opened, source: str | Path, texts: Sequence[str]) -> Tensor:
    if (kind := _tower(opened)) is None:
        raise CheckpointError(f"{source} has no text tower that vitkit runs; give a model of {', '.join(TYPES)}")
    about = Table(TYPES[kind] | opened.table("config.json").table("text_config"))
    tokens, mask = tokenize(opened.path.parent, texts, kind, opened.tensors)
    return F.normalize(text_vectors(opened.tensors, about, kind, tokens, mask), dim=-1)


def _check(labels: Sequence[str], templates: Sequence[str]) -> None:
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise CheckpointError(f"zero-shot needs two labels or more, each once; got {', '.join(labels) or 'none'}")
    for template in templates:
        if "{}" not in template:
            raise CheckpointError(f"the template {template!r} has no {{}} for the label; write 'a photo of a {{}}'")


def tokenize(folder: Path, texts: Sequence[str], kind: str, tensors: LazyTensors) -> tuple[Tensor, Tensor]:
    """S T tokens, as long as the tower's table of positions, and where they are not padding."""
    length = tensors.need("text_model.embeddings.position_embedding.weight", 2)[0]
    config = folder / "tokenizer_config.json"
    about = read_json(config) if config.is_file() else Table()
    if (folder / "spiece.model").is_file():
        rows, padding = _sentencepiece(folder / "spiece.model", texts, length)
    else:
        rows, padding = _tokenizers(folder / "tokenizer.json", texts, length, about, lower=kind == "siglip2")
    pads = [[padding] * (length - len(row)) for row in rows]
    left = about.get("padding_side") == "left"
    tokens = torch.tensor([pad + row if left else row + pad for row, pad in zip(rows, pads, strict=True)])
    ones = [[1] * len(row) for row in rows]
    zeros = [[0] * len(pad) for pad in pads]
    mask = torch.tensor([pad + row if left else row + pad for row, pad in zip(ones, zeros, strict=True)]).bool()
    inputs = about.get("model_input_names") or ["attention_mask"]
    return tokens, mask if isinstance(inputs, list) and "attention_mask" in inputs else torch.ones_like(mask)


def _tokenizers(path: Path, texts: Sequence[str], length: int, about: Table, lower: bool) -> Tokens:
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise MissingPackage("tokenizers", "reading the texts of labels", "zeroshot") from e
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no tokenizer.json and no spiece.model; fetch one beside the weights")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    word = about.get("pad_token")
    pad = tokenizer.token_to_id(str(word.get("content") if isinstance(word, dict) else word))
    return [tokenizer.encode(text.lower() if lower else text).ids for text in texts], pad or 0


def _sentencepiece(path: Path, texts: Sequence[str], length: int) -> Tokens:
    """SigLIP's: small letters, no punctuation, single spaces; the end mark is the padding too."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as e:
        raise MissingPackage("sentencepiece", "reading the texts of labels", "zeroshot") from e
    model = SentencePieceProcessor(model_file=str(path))
    end, unknown = model.piece_to_id("</s>"), "<unk>"
    start = len(model.encode(unknown))  # a prefix, so that the mark of the first word is not lost
    rows = []
    for text in texts:
        plain = f"\u2581{text}".lower().translate(str.maketrans("", "", string.punctuation))
        pieces = model.encode(unknown + re.sub(r"\s+", " ", plain).strip())
        rows.append([*pieces[start:][: length - 1], end])
    return rows, end


@torch.no_grad()
def text_vectors(tensors: LazyTensors, about: Table, kind: str, tokens: Tensor, mask: Tensor) -> Tensor:
    """S T -> S D. CLIP's tokens look back only and the end mark is read; SigLIP's look at all, the last is read."""
    causal = TYPES[kind] is _CLIP
    part = {name: t.float() for name, t in tensors.within("text_model.").items()}
    x = part["embeddings.token_embedding.weight"][tokens] + part["embeddings.position_embedding.weight"]  # S T D
    allowed = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)  # S 1 T T
    allowed = allowed.tril() if causal else allowed
    for i in range(1 + max(int(n.split(".")[2]) for n in part if n.startswith("encoder.layers."))):
        x = _block(
            x, {n.partition(f"layers.{i}.")[2]: t for n, t in part.items() if f"layers.{i}." in n}, about, allowed
        )
    x = _norm(x, part, "final_layer_norm", about)
    if not causal:
        return F.linear(x[:, -1], part["head.weight"], part["head.bias"])
    end = about.whole("eos_token_id")
    old = kind == "clip" and end == 2  # a wrong number in early files: then the end mark is the largest
    where = tokens.argmax(dim=-1) if old else (tokens == end).int().argmax(dim=-1)
    return F.linear(x[torch.arange(len(x)), where], tensors["text_projection.weight"].float())


def _block(x: Tensor, part: dict[str, Tensor], about: Table, allowed: Tensor) -> Tensor:
    heads, y = about.whole("num_attention_heads"), _norm(x, part, "layer_norm1", about)
    q, k, v = (_linear(y, part, f"self_attn.{p}_proj").unflatten(-1, (heads, -1)).transpose(1, 2) for p in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
    x = x + _linear(y, part, "self_attn.out_proj")
    activation, _ = FUNCTIONS[ACTIVATIONS[about.one_of("hidden_act", ACTIVATIONS)]]
    return x + _linear(activation(_linear(_norm(x, part, "layer_norm2", about), part, "mlp.fc1")), part, "mlp.fc2")


def _linear(x: Tensor, part: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, part[f"{name}.weight"], part[f"{name}.bias"])


def _norm(x: Tensor, part: dict[str, Tensor], name: str, about: Table) -> Tensor:
    eps = float(str(about["layer_norm_eps"]))
    return F.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part[f"{name}.bias"], eps)
