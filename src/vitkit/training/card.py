"""The model card of a run: README.md with metadata as the hub reads them, written from what the run knows.

What only a person can say - the licence, what the model is for, where it must not be used - is left open, in words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from vitkit.model.base import OutputKind
from vitkit.tasks.classified import ClassEvaluation
from vitkit.tasks.metrics import wilson
from vitkit.tasks.result import Evaluation
from vitkit.training.result import Result

NAME, REPO = "README.md", "OWNER/NAME"  # the second is replaced when it is pushed
_TASK: dict[OutputKind, str] = {"classes": "image-classification", "labels": "image-classification"}
_METRIC = {"top1": "accuracy", "map": "map", "r2": "r_squared"}  # as the hub calls them
_WATTS = {"cpu": 10.0, "mps": 30.0, "cuda": 300.0}  # assumed: of a core, of a chip, of a GPU
_LISTED = 20  # classes; more are counted
_SHOWN = 10  # pairs of classes that are confused
Facts = Mapping[str, object]


def card_of(about: Facts, result: Result, evaluation: Evaluation | None, kind: OutputKind) -> str:
    """`about` is the run's config.json."""
    train = _dict(about, "train")
    parts = [
        _metadata(train, result, kind, _count(about, "test")),
        f"# {result.out.resolve().name}\n",
        _what(about, train),
        _reached(about, result),
        _calibration(evaluation),
        _confusion(evaluation),
        _cost(about, result),
        _use(kind),
        _open_questions(),
    ]
    return "\n".join(part for part in parts if part)


def plain_card(name: str, config: Facts, kind: OutputKind) -> str:
    """Of a model that is not the result of a run."""
    about = "\n".join(f"| {key} | `{value}` |" for key, value in config.items() if isinstance(value, int | str | list))
    head = _front({"library_name": "vitkit", "pipeline_tag": _TASK.get(kind), "tags": ["vitkit", "vision-transformer"]})
    return "\n".join(
        [head, f"# {name}\n", "| setting | value |\n|---|---|", f"{about}\n", _use(kind), _open_questions()]
    )


# --- metadata ----------------------------------------------------------------------------------------


def _front(fields: Facts, after: str = "") -> str:
    """YAML, of which JSON is a part."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items() if value]
    hint = "# license: apache-2.0   (choose one, and remove the sign before it)"
    return "\n".join(["---", *lines, *([after] if after else []), hint, "---", ""])


def _metadata(train: Facts, result: Result, kind: OutputKind, images: int) -> str:
    init = str(train.get("init") or "")
    fields: dict[str, object] = {"library_name": "vitkit", "pipeline_tag": _TASK.get(kind)}
    fields |= {"tags": ["vitkit", "vision-transformer"], "base_model": init.removeprefix("hf:").split("@")[0]}
    if not init.startswith("hf:"):
        fields.pop("base_model")
    key, split = result.score.key, "test" if result.test else "validation"
    value = (result.test or result.best).get(key)
    if value is None:
        return _front(fields)
    data = {"type": _word(str(train.get("data"))), "name": _word(str(train.get("data"))), "split": split}
    metric = {"type": _METRIC.get(key, key), "value": round(float(value), 6), "name": result.score.words}
    found = {"task": {"type": _TASK.get(kind, "other")}, "dataset": data, "metrics": [metric]}
    index = json.dumps([{"name": result.out.resolve().name, "results": [found]}], ensure_ascii=False)
    return _front(fields, f"model-index: {index}")


def _word(data: str) -> str:
    """The last part of a path: where a set lies on somebody's disk is nobody's business."""
    return data.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or "data"


# --- sections ----------------------------------------------------------------------------------------


def _what(about: Facts, train: Facts) -> str:
    model, names = _dict(about, "model"), about.get("classes")
    classes = [str(name) for name in names] if isinstance(names, list) else []
    shown = ", ".join(classes[:_LISTED]) + (f" and {len(classes) - _LISTED} more" if len(classes) > _LISTED else "")
    splits = ", ".join(f"{name} {count:,}" for name, count in _dict(about, "splits").items() if isinstance(count, int))
    rows = [("model", f"{train.get('model') or train.get('init')} ({model.get('kind')})")]
    rows += [("image size", "x".join(str(n) for n in _list(model.get("image_size"))))]
    rows += [("data", f"{_word(str(train.get('data')))}: {splits} images")]
    rows += [(f"classes ({len(classes)})", shown)]
    settings = ("optimizer", "lr", "weight_decay", "batch_size", "steps", "budget", "schedule", "ema", "loss", "seed")
    rows += [("training", ", ".join(f"{key} {train[key]}" for key in settings if train.get(key)))]
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows), ""])


def _reached(about: Facts, result: Result) -> str:
    lines = ["## Results\n", "| metric | value | 95% interval | images |", "|---|---|---|---|"]
    for split, weights, value in result.scores():
        there = _count(about, "test" if split == "test" else "val") or _count(about, "test")
        images = result.images.get(split, (there, there))[0]
        share = result.score.key in ("top1", "top5") and images
        low, high = wilson(value, images) if share else (math.nan, math.nan)
        interval = f"{low:.1%} to {high:.1%}" if share else "not known"
        what = f"{split} {result.score.words} ({weights})"
        lines.append(f"| {what} | {result.score.text(value)} | {interval} | {images:,} |")
    lines.append("\nIntervals are Wilson's: of these images, not of other seeds or other data.\n")
    return "\n".join(lines)


def _calibration(evaluation: Evaluation | None) -> str:
    if not isinstance(evaluation, ClassEvaluation):
        return ""
    return (
        f"## Calibration\n\nExpected calibration error on the test split: {evaluation.ece:.1%} "
        f"(0% would be a model whose 80% are right in 80 of 100 cases).\n"
    )


def _confusion(evaluation: Evaluation | None) -> str:
    if not isinstance(evaluation, ClassEvaluation) or evaluation.confusion is None:
        return ""
    counts = np.array(evaluation.confusion)
    totals = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:_SHOWN]
    pairs = [divmod(int(place), len(counts)) for place in order]
    rows = [(evaluation.classes[i], evaluation.classes[j], counts[i, j], totals[i]) for i, j in pairs if counts[i, j]]
    if not rows:
        return "## Confusion\n\nNo image of the test split was taken for another class.\n"
    lines = [f"| {_cell(a)} | {_cell(b)} | {n} of {total} |" for a, b, n, total in rows]
    return "\n".join(["## Most confused classes\n", "| class | taken for | test images |", "|---|---|---|", *lines, ""])


def _cost(about: Facts, result: Result) -> str:
    machine, seconds = _dict(about, "machine"), result.seconds
    device, processes = str(machine.get("device", "cpu")), _whole(machine.get("processes"))
    units = _whole(machine.get("cores")) if device == "cpu" else processes
    watts = _WATTS.get(device, _WATTS["cpu"]) * units
    what = f"{units} {'cores' if device == 'cpu' else device} at an assumed {_WATTS.get(device, 10.0):.0f} W each"
    return (
        f"## Environmental cost\n\nOne run took {seconds / 60:.1f} minutes on {what}: about "
        f"{watts * seconds / 3600:.3g} Wh. An estimate, not a measurement; without earlier tries and cooling.\n"
    )


def _use(kind: OutputKind) -> str:
    read = "print(model.predict('image.jpg').value)" if kind == "values" else "print(model.predict('image.jpg').top(5))"
    return f"""## How to use it

With vitkit (`pip install 'vitkit[hub]'`):

```python
import vitkit

model = vitkit.load("hf:{REPO}")
{read}
```

For others, from a shell:
`vitkit convert hf:{REPO} --to timm out/` (then `timm.create_model(..., checkpoint_path=...)`),
`vitkit convert hf:{REPO} --to huggingface out/` (then `AutoModelForImageClassification.from_pretrained("out")`), and
`vitkit export hf:{REPO} model.onnx`.
"""


def _open_questions() -> str:
    return """## To be filled in

- Licence, of the weights and of the images they were trained on
- What it is meant for, and where it must not be used
- Who and what is on the images; known gaps and biases
"""


# --- reading what may be anything ---------------------------------------------------------------------


def _cell(value: object) -> str:
    """Text inside a table: no bar, no line break, no markup."""
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").split())


def _dict(facts: Facts, key: str) -> dict[str, object]:
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _count(about: Facts, split: str) -> int:
    return _whole(_dict(about, "splits").get(split), 0)


def _whole(value: object, default: int = 1) -> int:
    return value if isinstance(value, int) else default
