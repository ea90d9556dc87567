"""From Python: `train`, `pretrain`, `evaluate`, `predict`, `embed`, `explain`, `export`, `profile`, as the commands.

A model is what `vitkit.load` and `vitkit.create` return, or whatever `load` takes: a file, a run directory,
hf:owner/name, timm:name, a name of the zoo. `options` are those of `load`: image_size, classes, heads and so on;
they need a name or a path, for a model that is loaded has them already. `progress` is shown in a notebook and on a
terminal; `progress=vitkit.progress.SILENT` shows none. Results show themselves in a notebook and to `rich.print`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from vitkit.checkpoints.options import ModelOptions
from vitkit.curation import Index, build_index
from vitkit.data import Source
from vitkit.data.dataset import Dataset
from vitkit.data.given import GivenImages, is_one
from vitkit.errors import ConfigError
from vitkit.evaluation.run import evaluate as run_evaluation
from vitkit.explanation.build import Report, build_report, make_subject
from vitkit.explanation.table import choose
from vitkit.model.base import VisionModel
from vitkit.prediction import open_inputs, open_model, stream
from vitkit.prediction.opened import load_for
from vitkit.prediction.predicted import Predictions, predictions
from vitkit.prediction.tables import features_of
from vitkit.progress import SILENT, Progress, progress_here
from vitkit.runtime.export import Export
from vitkit.runtime.export import export as write_export
from vitkit.runtime.profile import Profile, name_of
from vitkit.runtime.profile import profile as measure
from vitkit.runtime.table import need_format
from vitkit.tasks import METHODS, open_data_for
from vitkit.tasks.match import map_classes
from vitkit.tasks.result import Evaluation
from vitkit.tasks.table import check_method
from vitkit.training.config import TrainConfig, free_folder
from vitkit.training.files import checked, read_settings
from vitkit.training.live import view_here
from vitkit.training.result import Result, Watcher
from vitkit.training.run import train as run_training

Loadable = VisionModel | str | Path


def train(
    data: str | Path | TrainConfig = "",
    *,
    config: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    accept_changed_data: bool = False,
    watcher: Watcher | None = None,
    teacher: VisionModel | None = None,
    **settings: object,
) -> Result:
    """Train or fine-tune a model: `vitkit.train("photos/", budget="5m", out="runs/photos")`.

    data      a data set, as `open_data` takes it; or a whole `TrainConfig`; may stand in the file `config`
    config    settings from a .toml or .json file, or from a run, which is then repeated bit for bit
    resume    resume the run in the folder `out`
    restart   start the run in the folder `out` again at its first step; its checkpoints are kept aside
    accept_changed_data  resume although the data set is not what it was
    watcher   is called at every step and evaluation; None: shown in a notebook and on a terminal
    teacher   a model to distil from
    settings  the fields of `TrainConfig`: model, init, out, epochs, steps, budget, batch_size, lr, ...

    The run is in `run.out`; `run.model` is its best model: `run.model.predict("cat.jpg")`.
    """
    if isinstance(data, TrainConfig):
        made = data.replace(**checked(settings))
    else:
        given = {**(read_settings(config) if config else {}), **checked(settings)}
        given["data"] = str(data or given.get("data") or "")
        given["out"] = str(given.get("out") or free_folder(str(given["data"])))
        made = TrainConfig(**given)  # type: ignore[arg-type]  # it checks its fields
    how = {"resume": resume, "restart": restart, "accept_changed_data": accept_changed_data}
    view = view_here() if watcher is None else None
    with nullcontext() if view is None else view.shown:
        return run_training(made, **how, watcher=view or watcher, teacher=teacher)  # type: ignore[arg-type]


def pretrain(
    data: str | Path,
    *,
    method: str = METHODS[0],
    resume: bool = False,
    restart: bool = False,
    accept_changed_data: bool = False,
    watcher: Watcher | None = None,
    **settings: object,
) -> Result:
    """Learn from images without labels: `vitkit.pretrain("folder", method="mae", budget="10m")`.

    data      images, as `open_data` takes them, or a folder of images; labels, if there are any, are only reported
    method    mae, masked-patch, dino or lejepa
    init      a checkpoint to continue from; by default weights are fresh
    options   of the method: {"masking": 0.75}
    The rest is as in `train`. `result.verdict` says whether it worked, and `train(..., init=result.out)` fine-tunes it.
    """
    check_method(method)
    settings["out"] = str(settings.get("out") or free_folder(f"{Path(data).stem or 'run'}-{method}"))
    how = {"resume": resume, "restart": restart, "accept_changed_data": accept_changed_data, "watcher": watcher}
    return train(data, task=method, **how, **settings)  # type: ignore[arg-type]  # TrainConfig checks them


def evaluate(
    model: Loadable,
    data: str | Path | Dataset | Source,
    *,
    split: str | None = None,
    classes_from: str | int = "auto",
    class_map: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    workers: int = 0,
    device: str | None = None,
    views: int = 1,
    progress: Progress | None = None,
    **options: object,
) -> Evaluation:
    """Measure a model on a data set, with the model's own preprocessing; `.metrics` has the numbers.

    split         train, val, test or several as "val+test"; None: test if there is one, else val
    views         of every image, up to ten (mirrored, moved), whose outputs are averaged: slower, often more accurate
    classes_from  which folders are the classes, as in `open_data`
    class_map     what the data's classes are called in the model, where that differs: {"zero": "0"}
    """
    with progress_here(progress) as shown:
        loaded = load_for(model, "eager", device, _options(model, options), shown)
        if not isinstance(data, Source):
            dataset = data if isinstance(data, Dataset) else open_data_for(loaded, data, shown, classes_from)
            data = dataset.split(split) if split else dataset.evaluation()
        if class_map:
            data = map_classes(loaded, data, class_map)
        return run_evaluation(loaded, data, batch_size=batch_size, workers=workers, views=views, progress=shown)


def predict(
    model: Loadable,
    images: GivenImages,
    *,
    top: int = 5,
    split: str | None = None,
    batch_size: int | None = None,
    runtime: str = "auto",
    merge: int | str = 0,
    device: str | None = None,
    trust: str | None = None,
    **options: object,
) -> Predictions:
    """A `Prediction` per image: `.label`, `.probability`, `.top(5)`, or `.value`; `.error` says why not.

    model   also a file that `export` has written
    images  files, folders, data sets (all of it, or its `split`), URLs, bytes, Pillow images, arrays, tensors; or a
            list of these
    top     classes in the row that a prediction also is: p["class"], p["probability"], p["class_2"] ...
    trust   the SHA-256 of a .pt2 file, which may run code when it is opened
    """
    opened = open_model(model, runtime, merge, device, _options(model, options), top=top, trust=trust)
    found = Predictions(predictions(opened, open_inputs(images, split), batch_size))
    found.one = is_one(images)
    return found


def embed(
    model: Loadable,
    images: GivenImages,
    *,
    features: str = "",
    split: str | None = None,
    batch_size: int | None = None,
    runtime: str = "auto",
    merge: int | str = 0,
    device: str | None = None,
    **options: object,
) -> np.ndarray:
    """The features of images, one row each in the order given; an image that cannot be read has a row of NaN.

    features  cls, mean, tokens (every patch) or pooled (what the classifier sees); "": what the model's head reads
    """
    opened = open_model(model, runtime, merge, device, _options(model, options), features=features)
    found = [features_of(row) for row in stream(opened, open_inputs(images, split), batch_size)]
    shape = next((array.shape for array in found if array is not None), (0,))
    return np.stack([np.full(shape, np.nan) if array is None else array for array in found]).astype(np.float32)


def explain(
    model: Loadable,
    images: GivenImages = (),
    *,
    data: str | None = None,
    out: str | Path = "explained",
    only: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    query: str | None = None,
    run: str | Path | None = None,
    most: int = 8,
    samples: int = 200,
    device: str | None = None,
    class_map: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Report:
    """Draw what a Vision Transformer has learned; `report.page` is the page, figures and arrays are beside it.

    images   files, folders or what else `predict` takes, looked at one by one: the first `most` of them
    data     a data set for statistics and, with labels, accuracy: `samples` of its images
    only     names of figures, such as "attention"; None: all that this model and these images allow
    classes  to explain, by name or index; (): the likeliest two of each image
    query    the patch whose attention is shown: "ROW,COLUMN" counted from 0
    run      directory of a training run, for its curves; None: the model's own
    class_map  what the data's classes are called in the model, as in `evaluate`
    """
    choose(only)  # a misspelt figure is an error before anything long is done
    wanted = _options(model, options)
    subject = make_subject(model, images, data, classes, query, run, wanted, most, samples, device, class_map)
    with progress_here(progress) as shown:
        return build_report(subject, Path(out), only, shown)


def export(
    model: Loadable,
    path: str | Path,
    *,
    data: str | None = None,
    int8: bool = False,
    merge: int | str = 0,
    raw: bool = False,
    dynamic_size: bool = False,
    top: int = 0,
    progress: Progress | None = None,
    **options: object,
) -> Export:
    """Write a model as .onnx, .xml (OpenVINO) or .pt2 (torch.export), kept only if it agrees with the model.

    data  compare on this data set, and report the accuracy; None: on made-up images
    int8  8-bit matrix products; `merge` tokens per block; `raw` takes pixels and does the preprocessing itself
    dynamic_size  images of any size that the patches divide: positions are resized inside (.onnx, .pt2)
    top   besides the logits, the probabilities and numbers of so many classes
    """
    to = need_format(path)
    with progress_here(progress) as shown:
        loaded = load_for(model, "eager", "cpu", _options(model, options), shown)
        source = None if data is None else open_data_for(loaded, data, shown).evaluation()
        how = (int8, merge, raw, None, shown, dynamic_size, top)
        return write_export(loaded, to, path, source, *how)


def profile(
    model: Loadable,
    *,
    batch: int = 8,
    seconds: float = 2.0,
    out: str | Path | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Profile:
    """Where the time of a model goes on this machine: `.by_kind`, `.by_layer`, and in `.advice()` what would help.

    batch    images in a batch
    seconds  spent on measuring without the profiler, then again with it
    out      a .png or .svg to draw it into, as an icicle
    """
    with progress_here(progress) as shown:
        loaded = load_for(model, "eager", device, _options(model, options), shown)
        found = measure(loaded, batch, name_of(model), seconds, progress=shown)
    if out is not None:
        found.draw(Path(out))
    return found


def index(
    data: str | Path,
    model: Loadable | None = None,
    *,
    out: str | Path | None = None,
    device: str | None = None,
    classes_from: str | int = "auto",
    force: bool = False,
    progress: Progress = SILENT,
    **options: object,
) -> Index:
    """Features of every image of a set; `.search(image)`, `.duplicates()` and `.label_errors()` work on them.

    model  any checkpoint, run or model; None: a descriptor of edges and colours that needs no weights
    out    a folder; None: DATA.index. What it holds already is not computed again
    force  overwrite an index that was made with another model
    options  of the model, as `vitkit.load` takes them
    """
    stated = _options(model, options) if model is not None else None
    return build_index(
        data, model, out, progress, device=device, classes_from=classes_from, force=force, options=stated
    )


def _options(model: Loadable, options: dict[str, object]) -> ModelOptions | None:
    if isinstance(model, VisionModel) and options:
        raise ConfigError(f"the model is loaded already; give {', '.join(options)} to vitkit.load")
    return ModelOptions.of(**options) if options else None
