"""A model of vitkit behind the classes of transformers: its configuration, its features, its logits.

`bundle.py` puts this file and what it imports into one, modeling_vitkit.py, which needs torch and transformers alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from vitkit.model.base import VisionModel
from vitkit.model.config import ResNetConfig, ViTConfig
from vitkit.model.stem import ResNet
from vitkit.model.vit import ViT

Config = type[ViTConfig] | type[ResNetConfig]
MODELS: dict[str, tuple[Config, Callable[..., VisionModel]]] = {
    "ViT": (ViTConfig, ViT),
    "ResNet": (ResNetConfig, ResNet),
}


class VitkitConfig(PretrainedConfig):
    """`vitkit` is the configuration of the model in vitkit's own words; `kind` says of which model."""

    model_type = "vitkit"

    def __init__(self, kind: str = "ViT", vitkit: dict[str, object] | None = None, **kwargs: object) -> None:
        self.kind, self.vitkit = kind, vitkit or {}
        super().__init__(**kwargs)


class VitkitPreTrainedModel(PreTrainedModel):
    config_class = VitkitConfig
    main_input_name = "pixel_values"
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: VitkitConfig) -> None:
        super().__init__(config)
        config_of, model_of = MODELS[config.kind]
        ours: ViTConfig | ResNetConfig = config_of.from_dict(dict(config.vitkit))
        if ours.classes and config.num_labels != ours.classes:  # another number of labels was asked for
            ours = ours.replace(classes=config.num_labels)
        self.model = model_of(ours)
        self.post_init()


class VitkitModel(VitkitPreTrainedModel):
    """The states of all tokens (of a ResNet, of all positions of the last map), and the pooled one."""

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPooling:
        (states,) = self.model.features(pixel_values, layers=(-1,), norm=True)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=self.model.pooled(pixel_values))


class VitkitForImageClassification(VitkitPreTrainedModel):
    """Logits; with labels also the loss, by `config.problem_type`: classes, several labels, or values."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_: object) -> ImageClassifierOutput:
        logits: Tensor = self.model(pixel_values)
        loss = None
        if labels is not None:
            kind = self.config.problem_type
            if kind == "multi_label_classification":
                loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
            elif kind == "regression":
                loss = F.mse_loss(logits, labels.to(logits.dtype).reshape(logits.shape))
            else:
                loss = F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)
