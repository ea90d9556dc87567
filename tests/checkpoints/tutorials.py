"""Five Vision Transformers as tutorials write them, each with its own names, and the map of each."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 48, 4, 2, 7


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class EinopsPatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        cut = Rearrange("b c (h s1) (w s2) -> b (h w) (s1 s2 c)", s1=PATCH, s2=PATCH)
        self.projection = nn.Sequential(cut, nn.Linear(PATCH * PATCH * 3, WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn((SIZE // PATCH) ** 2 + 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(x)
        return torch.cat([repeat(self.cls_token, "() n e -> b n e", b=len(x)), x], dim=1) + self.positions


class Attention(nn.Module):
    """`order` is the layout of the fused projection; None: three of them. `scale` is where and what it is."""

    def __init__(self, order: str | None, scale: str = "head") -> None:
        super().__init__()
        self.order, self.scale = order, scale
        if order:
            self.qkv = nn.Linear(WIDTH, WIDTH * 3)
        else:
            self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.order:
            q, k, v = rearrange(self.qkv(x), f"b n ({self.order}) -> qkv b h n d", h=HEADS, qkv=3)
        else:
            parts = (self.queries(x), self.keys(x), self.values(x))
            q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=HEADS) for part in parts)
        energy = torch.einsum("bhqd, bhkd -> bhqk", q, k)
        if self.scale == "after-softmax":
            weights = energy.softmax(dim=-1) / WIDTH**0.5
        else:
            weights = (energy / (WIDTH if self.scale == "width" else WIDTH // HEADS) ** 0.5).softmax(dim=-1)
        return self.projection(rearrange(torch.einsum("bhal, bhlv -> bhav ", weights, v), "b h n d -> b n (h d)"))


def block(attention: nn.Module, activation: type[nn.Module] = nn.GELU) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH))
    attending = Residual(nn.Sequential(nn.LayerNorm(WIDTH), attention, nn.Dropout(0.0)))
    return nn.Sequential(attending, Residual(nn.Sequential(nn.LayerNorm(WIDTH), mlp, nn.Dropout(0.0))))


class Sequentials(nn.Sequential):
    """The article's: einops patches, blocks of nn.Sequential, the mean of all tokens, then the norm and a layer."""

    def __init__(self, order: str | None = "h d qkv", scale: str = "head") -> None:
        head = nn.Sequential(Reduce("b n e -> b e", "mean"), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
        blocks = nn.Sequential(*(block(Attention(order, scale)) for _ in range(DEPTH)))
        super().__init__(EinopsPatches(), blocks, head)


class Plain(nn.Module):
    """A convolution, an encoder of its own or PyTorch's, the class token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH))
        self.encoder, self.norm, self.head = encoder, nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.encoder(x))[:, 0])


class Unfolded(Plain):
    """nn.Unfold and a matrix: patches with the channels first."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(block(Attention(None), nn.ReLU) for _ in range(DEPTH))))
        self.unfold, self.embed = nn.Unfold(PATCH, stride=PATCH), nn.Linear(PATCH * PATCH * 3, WIDTH)
        for part in self.modules():
            if isinstance(part, nn.LayerNorm):
                part.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.unfold(x).transpose(1, 2))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.encoder(x))[:, 0])


def torch_encoder(norm_first: bool = True) -> nn.Module:
    args = {"batch_first": True, "norm_first": norm_first, "activation": "gelu", "layer_norm_eps": 1e-6}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, **args)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


OURS = "encoder.blocks.{i}."
FUSED = {"qkv.*": "attention.qkv.*"}
APART = {"queries.*": "attention.query.*", "keys.*": "attention.key.*", "values.*": "attention.value.*"}


def in_sequentials(start: str, attention: dict[str, str]) -> dict[str, str]:
    attending = {f"{start}{{i}}.0.fn.1.{theirs}": OURS + ours for theirs, ours in attention.items()}
    attending |= {
        f"{start}{{i}}.0.fn.0.*": f"{OURS}norm1.*",
        f"{start}{{i}}.0.fn.1.projection.*": f"{OURS}attention.out.*",
    }
    mlp = {"0.*": "norm2.*", "1.0.*": "mlp.up.*", "1.3.*": "mlp.down.*"}
    return attending | {f"{start}{{i}}.1.fn.{theirs}": OURS + ours for theirs, ours in mlp.items()}


ARTICLE = {"0.projection.1.*": "patches.*", "0.cls_token": "class_token", "0.positions": "positions.learned"}
ARTICLE |= {"2.1.*": "head.norm.*", "2.2.*": "head.classifier.*"}
PLAIN = {"embed.*": "patches.*", "cls": "class_token", "pos": "positions.learned", "norm.*": "norm.*"}
PLAIN |= {"head.*": "head.classifier.*", "steps": ""}
TORCH = {"self_attn.in_proj_*": "attention.qkv.*", "self_attn.out_proj.*": "attention.out.*", "norm1.*": "norm1.*"}
TORCH |= {"norm2.*": "norm2.*", "linear1.*": "mlp.up.*", "linear2.*": "mlp.down.*"}
SAID = {"heads": HEADS, "activation": "gelu", "norm_eps": 1e-6, "block": "pre-norm", "score_scale": "head"}
ALL = SAID | {"norm_eps": 1e-5, "pooling": "mean-all", "patch_size": PATCH}

MODELS = {  # name -> how it is made, [names], [config], [layout]
    "article": (
        Sequentials,
        ARTICLE | in_sequentials("1.", FUSED),
        ALL,
        {"qkv": "h d qkv", "patches": "p q c"},
    ),
    "apart": (
        lambda: Sequentials(None),
        ARTICLE | in_sequentials("1.", APART),
        ALL,
        {"patches": "p q c"},
    ),
    "scaled by width": (
        lambda: Sequentials("qkv h d", "width"),
        ARTICLE | in_sequentials("1.", FUSED),
        ALL | {"score_scale": "width"},
        {"qkv": "qkv h d", "patches": "p q c"},
    ),
    "torch's encoder": (
        lambda: Plain(torch_encoder()),
        PLAIN | {f"encoder.layers.{{i}}.{theirs}": OURS + ours for theirs, ours in TORCH.items()},
        SAID | {"pooling": "cls"},
        {},
    ),
    "unfolded": (
        Unfolded,
        PLAIN | in_sequentials("encoder.", APART),
        SAID | {"pooling": "cls", "activation": "relu", "patch_size": PATCH},
        {"patches": "c p q"},
    ),
}
