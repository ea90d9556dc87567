"""A folder of Hugging Face that brings its own code: for every model, also where transformers has no class.

    AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)

`modeling_vitkit.py` is cut out of vitkit's own source (`bundle.py`); vitkit itself is not needed to run it. Here it is
never run: reading such a folder takes the configuration and the tensors, as of our own file.
"""

from __future__ import annotations

from vitkit import __version__
from vitkit.checkpoints import writing
from vitkit.checkpoints.bundle import Bundle
from vitkit.checkpoints.family import Checkpoint, Fields, Opened, Written
from vitkit.checkpoints.huggingface.processor import processor_json
from vitkit.checkpoints.huggingface.writer import labels_json
from vitkit.checkpoints.native import KINDS, check_outputs
from vitkit.checkpoints.options import ModelOptions
from vitkit.errors import CheckpointError
from vitkit.model.base import Outputs
from vitkit.model.build import outline
from vitkit.model.config import AnyConfig

_TYPE, _PREFIX, _CODE = "vitkit", "model.", "modeling_vitkit"
_WRAPPER = "vitkit.checkpoints.huggingface.wrapper"
_CLASSES = {"AutoConfig": "VitkitConfig", "AutoModel": "VitkitModel"}
_CLASSIFIER = {"AutoModelForImageClassification": "VitkitForImageClassification"}
_LICENSE = """
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
""".lstrip()
_README = """---
library_name: transformers
tags: [vitkit, image-classification, vision-transformer]
---

A {kind} that brings its own code: one file, `modeling_vitkit.py`, which needs torch and transformers.

```python
from transformers import {auto}

model = {auto}.from_pretrained("this folder", trust_remote_code=True).eval()
```

Written by vitkit {version}, which reads this folder too: `vitkit.load("this folder")`.
"""


def write(checkpoint: Checkpoint) -> Written:
    config, outputs = checkpoint.config, checkpoint.outputs
    check_outputs(config, outputs)
    classes = _CLASSES | (_CLASSIFIER if config.classes else {})
    about: Fields = {"model_type": _TYPE, "architectures": [list(classes.values())[-1]]}
    about["auto_map"] = {auto: f"{_CODE}.{name}" for auto, name in classes.items()}
    about |= {"kind": config.kind, "vitkit": config.to_dict(), "outputs": outputs.to_dict()}
    pre = processor_json(config.preprocessing, config.channels)
    beside: dict[str, Fields] = {"config.json": about | labels_json(config, outputs), "preprocessor_config.json": pre}
    card = _README.format(kind=config.kind, auto=list(classes)[-1], version=__version__)
    texts = {f"{_CODE}.py": code(config), "README.md": card}
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in checkpoint.tensors.items()}
    plain = writing.interpolation(config.preprocessing) != config.preprocessing.interpolation
    lost = "interpolation='bilinear-plain' is not kept: the image processor resizes with antialiasing"
    return Written(tensors, [lost] if plain else [], beside, texts=texts)


def code(config: AnyConfig) -> str:
    """The source of a model of this configuration, and of its classes for transformers."""
    used = {cls for part in outline(config).modules() for cls in type(part).__mro__}
    roots = [(_WRAPPER, name) for name in (*_CLASSES.values(), *_CLASSIFIER.values())]
    about = f'"""A {config.kind} of vitkit {__version__}, in one file cut out of its source; it needs no vitkit."""'
    return f"{_LICENSE}\n{about}\n\n{Bundle(roots, used).text()}"


def matches(opened: Opened) -> bool:
    return opened.table("config.json").get("model_type") == _TYPE


def read(opened: Opened, options: ModelOptions) -> Checkpoint:
    about, notes = opened.table("config.json"), list[str]()
    config: AnyConfig = KINDS[about.one_of("kind", list(KINDS))].from_dict(about.table("vitkit"))
    outputs = Outputs.from_dict(dict(about.table("outputs")))
    try:
        check_outputs(config, outputs)
    except CheckpointError:
        notes.append("the names of the classes are not those of so many classes, and were left out")
        outputs = Outputs(outputs.kind)
    changes = {name: value for name, value in options.stated.items() if getattr(config, name, None) != value}
    notes += [f"{name}={value!r}: stated by the user, the file says otherwise" for name, value in changes.items()]
    tensors = opened.tensors.within(_PREFIX, notes)
    return Checkpoint(config.replace(**changes), tensors, outputs, notes, lambda name: f"{_PREFIX}{name}")
