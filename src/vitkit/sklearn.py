"""Vision Transformers as scikit-learn's estimators: `ViTClassifier`, `ViTRegressor` and the transformer `ViTFeatures`.

    from vitkit.sklearn import ViTClassifier
    cross_val_score(ViTClassifier(epochs=20, random_state=0), images, labels)

They train by the one training loop of vitkit, in memory, and obey scikit-learn's rules: parameters are kept as they
were given, `fit` starts over and repeats itself with the same `random_state`, a fitted estimator can be pickled.

X is one of
    arrays  N H W, N H W C or N C H W; uint8 as it is, other numbers from the range that they had in `fit`
    rows    N x features, a flat image each: a square one, or of `image_shape`
    paths   a list, or an array, of the names of image files
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from vitkit.checkpoints.load import load
from vitkit.checkpoints.native import save
from vitkit.data.dataset import Dataset
from vitkit.data.keys import permutation
from vitkit.data.source import Names, Source
from vitkit.data.sources.arrays import channels_last
from vitkit.errors import ConfigError, DataError, InputError, MissingPackage
from vitkit.model.base import VisionModel
from vitkit.prediction import open_model, stream
from vitkit.prediction.predicted import Prediction, predictions
from vitkit.prediction.tables import features_of
from vitkit.training.config import TrainConfig
from vitkit.training.files import checked
from vitkit.training.live import PlainView
from vitkit.training.run import train
from vitkit.training.stopping import Stopped

try:
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        RegressorMixin,
        TransformerMixin,
    )
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_consistent_length, check_is_fitted, column_or_1d
    from sklearn.utils.validation import validate_data as check_rows
except ImportError as e:
    raise MissingPackage("scikit-learn>=1.6", "vitkit.sklearn", "data") from e

if TYPE_CHECKING:
    from sklearn.utils import Tags

    from vitkit.data.given import GivenImages

__all__ = ["ViTClassifier", "ViTFeatures", "ViTRegressor"]

ImageShape = Literal["square", "pad"] | tuple[int, ...]


class _Images(BaseEstimator):
    """What X is, learned in `fit` and held to later; and how the state is pickled."""

    image_shape: ImageShape
    random_state: object

    # --- X -> a source of images -----------------------------------------------------------------------

    def _source(self, X: GivenImages, reset: bool) -> Source:
        """The images as vitkit reads them; `reset`: learn what X looks like."""
        paths = _paths(X)
        kind = "arrays" if paths is None else "paths"
        if not reset and kind != self.input_kind_:
            raise InputError(f"X holds {kind}, and {type(self).__name__} was fitted on {self.input_kind_}; give these")
        self._learn(reset, input_kind_=kind)
        if paths is not None:
            return Source("X", classes=("",), labels=np.zeros(len(paths), np.int64), names=Names(paths))
        pixels = self._array(X, reset).transpose(0, 3, 1, 2)  # N C H W
        count, names = len(pixels), Names(f"X[{i}]" for i in range(len(pixels)))
        tensor = torch.from_numpy(np.ascontiguousarray(pixels))
        flat = getattr(self, "flat_", False)
        return Source("X", "all", {}, ("",), np.zeros(count, np.int64), names, flip_safe=not flat, pixels=tensor)

    def _array(self, X: GivenImages, reset: bool) -> np.ndarray:
        """Rows or arrays -> uint8 N H W C."""
        if np.asarray(X).ndim <= 2:  # also tables; a sparse matrix, which is refused, has none
            rows = check_rows(self, X, reset=reset, dtype="numeric", ensure_min_samples=1)
            height, width, channels = self._shape_of(rows.shape[1])
            room = height * width * channels - rows.shape[1]
            values = np.pad(rows, ((0, 0), (0, room))).reshape(len(rows), height, width, channels)
            self._learn(reset, flat_=True)
        else:
            values = _channels_last(check_array(X, allow_nd=True, dtype="numeric"))
            self._learn(reset, flat_=False, image_shape_=values.shape[1:])
            if values.shape[3] != self.image_shape_[2]:
                have = f"X has images of {values.shape[3]} channels"
                raise InputError(f"{have}, and fit saw {self.image_shape_[2]}; give images of the same kind")
        return self._to_bytes(values, reset)

    def _shape_of(self, features: int) -> tuple[int, int, int]:
        """Height, width and channels of the image in a row."""
        side = int(np.ceil(features**0.5))
        if isinstance(self.image_shape, str):
            if self.image_shape == "square" and side * side != features:
                hint = "give image_shape=(height, width) or (height, width, channels), or arrays N H W C"
                raise InputError(f"rows of {features} features are no square images; {hint}")
            return side, side, 1
        shape = (*self.image_shape, 1)[:3]
        if len(shape) < 3 or int(np.prod(shape)) != features:
            hint = f"give the height, width and channels of {features} numbers"
            raise InputError(f"image_shape={self.image_shape} does not fit rows of {features} features; {hint}")
        return int(shape[0]), int(shape[1]), int(shape[2])

    def _to_bytes(self, values: np.ndarray, reset: bool) -> np.ndarray:
        """Numbers -> 0..255, by the range that they had in `fit`; what is outside of it is cut off."""
        if reset:
            self.range_ = None if values.dtype == np.uint8 else (float(values.min()), float(values.max()))
        if self.range_ is None:
            return values if values.dtype == np.uint8 else np.clip(np.rint(values), 0, 255).astype(np.uint8)
        low, high = self.range_
        scaled = (values.astype(np.float64) - low) * (255 / (high - low) if high > low else 0.0)
        return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)

    def _learn(self, reset: bool, **facts: object) -> None:
        if reset:
            for name, value in facts.items():
                setattr(self, name, value)

    # --- randomness, and the state -----------------------------------------------------------------------

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def __getstate__(self) -> dict[str, object]:
        """The model as the bytes of a .safetensors file: no code is run when they are read."""
        state = dict(super().__getstate__())
        if isinstance(model := state.get("model_"), VisionModel):
            with tempfile.TemporaryDirectory() as folder:
                save(model, path := Path(folder) / "model.safetensors")
                state["model_"] = path.read_bytes()
        return state

    def __setstate__(self, state: Mapping[str, object]) -> None:
        state = dict(state)
        if isinstance(content := state.get("model_"), bytes):
            with tempfile.TemporaryDirectory() as folder:
                (path := Path(folder) / "model.safetensors").write_bytes(content)
                state["model_"] = load(path)
        super().__setstate__(state)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = tags.input_tags.two_d_array = tags.input_tags.string = True
        tags.non_deterministic = False
        return tags


class _Trained(_Images):
    """What classifier and regressor share: the run."""

    def __init__(
        self,
        model: str = "",
        *,
        init: str | None = None,
        epochs: float = 0.0,
        batch_size: int = 0,
        lr: float = 0.0,
        augment: str | None = None,
        freeze: str = "",
        image_size: int | tuple[int, int] | None = None,
        image_shape: ImageShape = "square",
        validation_fraction: float = 0.0,
        settings: Mapping[str, object] | None = None,
        random_state: object = None,
        verbose: bool = False,
    ) -> None:
        """
        model                a name of `vitkit zoo`; "": chosen by the size of the images
        init                 a checkpoint to fine-tune, as `vitkit.load` takes it
        epochs, batch_size, lr, augment, freeze, image_size  as in `vitkit.train`; 0, "" and None: chosen
        image_shape          of flat rows: "square", (height, width[, channels]), or "pad": any number of columns,
                             filled up with zeros to a square
        validation_fraction  of the images, held out to choose the best weights; 0: the last weights are kept
        settings             any other field of `TrainConfig`: {"optimizer": "sgd", "ema": 0.999}
        verbose              print how far it is
        """
        self.model, self.init, self.epochs, self.batch_size, self.lr = model, init, epochs, batch_size, lr
        self.augment, self.freeze, self.image_size, self.image_shape = augment, freeze, image_size, image_shape
        self.validation_fraction, self.settings, self.random_state = validation_fraction, settings, random_state
        self.verbose = verbose

    def _train(self, source: Source, groups: np.ndarray) -> None:
        """Run the training loop in a folder that is gone afterwards."""
        seed = self._seed()
        splits = self._splits(groups, seed)
        source.splits = {str(name): int(n) for name, n in zip(*np.unique(splits, return_counts=True), strict=True)}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            config = self._config(str(Path(folder) / "run"), seed, source.flip_safe)
            try:
                data = Dataset(source, splits, split_missing=False)
                result = train(config, watcher=PlainView() if self.verbose else None, dataset=data)
            except Stopped as e:  # by Ctrl-C: there is no run that could be resumed
                raise KeyboardInterrupt from e
            self.model_: VisionModel = result.model
        self.n_iter_ = result.steps

    def _config(self, out: str, seed: int, images: bool) -> TrainConfig:
        named: dict[str, object] = {"model": self.model, "init": self.init, "epochs": self.epochs, "lr": self.lr}
        named |= {"batch_size": self.batch_size, "freeze": self.freeze, "image_size": self.image_size}
        named |= {"augment": self.augment or (None if images else "none"), "data": "X", "out": out, "seed": seed}
        given = dict(self.settings or {})
        if twice := sorted(given.keys() & (named.keys() - {"data", "out"})):
            raise ConfigError(f"settings holds {', '.join(twice)}; give {'them' if len(twice) > 1 else 'it'} by name")
        return TrainConfig(**{"workers": 0, **checked(given), **named})  # type: ignore[arg-type]  # it checks them

    def _splits(self, groups: np.ndarray, seed: int) -> np.ndarray:
        """train, and of every class a share as val."""
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction={self.validation_fraction} must be at least 0 and below 1")
        splits = np.full(len(groups), "train", dtype="<U5")
        mixed = permutation(seed, 0, len(groups), "validation")
        for group in np.unique(groups) if self.validation_fraction else ():
            rows = mixed[groups[mixed] == group]
            splits[rows[: int(len(rows) * self.validation_fraction)]] = "val"
        return splits

    def _predictions(self, X: GivenImages) -> list[Prediction]:
        check_is_fitted(self)
        source = self._source(X, reset=False)
        found = list(predictions(open_model(self.model_, "eager"), source))
        _raise_if_unreadable([p.error for p in found], source)
        return found


class ViTClassifier(ClassifierMixin, _Trained):
    """A Vision Transformer that tells classes apart; labels of any kind, one for each image."""

    def fit(self, X: GivenImages, y: Sequence[object] | np.ndarray) -> ViTClassifier:
        if y is None:
            raise ValueError("This ViTClassifier estimator requires y to be passed, but the target y is None.")
        source = self._source(X, reset=True)
        check_consistent_length(np.arange(len(source)), y)
        check_classification_targets(y)
        self.classes_, source.labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("ViTClassifier cannot be fitted: y holds one class; give images of two classes or more")
        source.classes = tuple(str(i) for i in range(len(self.classes_)))  # the model's names are given below
        self._train(source, source.labels)
        self.model_.class_names = [str(label) for label in self.classes_]
        return self

    def predict_proba(self, X: GivenImages) -> np.ndarray:
        """N x classes, in the order of `classes_`."""
        return np.stack([p.probabilities for p in self._predictions(X)]).astype(np.float64)

    def predict(self, X: GivenImages) -> np.ndarray:
        chosen = self.predict_proba(X).argmax(axis=1)
        found: np.ndarray = self.classes_[chosen]
        return found


class ViTRegressor(RegressorMixin, _Trained):
    """A Vision Transformer that predicts one number for each image, or several."""

    def fit(self, X: GivenImages, y: Sequence[object] | np.ndarray) -> ViTRegressor:
        if y is None:
            raise ValueError("This ViTRegressor estimator requires y to be passed, but the target y is None.")
        source = self._source(X, reset=True)
        check_consistent_length(np.arange(len(source)), y)
        values = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if values.ndim == 2 and values.shape[1] == 1 and np.asarray(y).ndim == 2:
            values = column_or_1d(y, warn=True).astype(np.float64)
        if len(values) < 2:
            raise InputError("n_samples = 1: one number has no spread to learn from; give more images")
        self.one_ = values.ndim == 1
        source.labels = values[:, None] if self.one_ else values  # N T
        source.classes, source.targets = (), tuple(f"y{i}" for i in range(source.labels.shape[1]))
        self._train(source, np.zeros(len(source), np.int64))
        return self

    def predict(self, X: GivenImages) -> np.ndarray:
        """N, or N x targets as `y` was."""
        found = np.array([[*p.values_by_name.values()] for p in self._predictions(X)])
        return found[:, 0] if self.one_ else found

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class ViTFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, _Images):
    """What a model sees in each image, as numbers for any other estimator: N x width."""

    def __init__(
        self,
        model: str | Path | VisionModel = "vit-ti/16",
        *,
        features: str = "",
        image_shape: ImageShape = "square",
        batch_size: int | None = None,
        random_state: object = None,
    ) -> None:
        """
        model         a checkpoint, a run, hf:owner/name, timm:name; or a name of the zoo, whose weights are random
        features      cls or mean; "": what the model's own head reads
        image_shape   of flat rows, as in `ViTClassifier`
        random_state  of a model with random weights
        """
        self.model, self.features, self.image_shape = model, features, image_shape
        self.batch_size, self.random_state = batch_size, random_state

    def fit(self, X: GivenImages, y: object = None) -> ViTFeatures:
        """Learns nothing but the range of X: the weights stay as they are."""
        if self.features not in ("", "cls", "mean"):
            raise ConfigError(f"features={self.features!r} is no row of numbers; choose cls or mean")
        self._source(X, reset=True)
        if isinstance(self.model, VisionModel):
            self.model_ = self.model
        else:
            torch.manual_seed(self._seed())
            self.model_ = load(self.model)
        self._n_features_out = self.model_.config.width
        return self

    def transform(self, X: GivenImages) -> np.ndarray:
        check_is_fitted(self)
        source = self._source(X, reset=False)
        opened = open_model(self.model_, "eager", features=self.features)
        rows = list(stream(opened, source, self.batch_size))
        _raise_if_unreadable([row["error"] for row in rows], source)
        return np.stack([np.asarray(features_of(row)) for row in rows]).astype(np.float32)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags


def _paths(X: GivenImages) -> list[str] | None:
    """The names of files in a list, an array or a column; None: X holds something else."""
    values = getattr(X, "to_numpy", lambda: X)() if not hasattr(X, "tocsr") else None
    if isinstance(values, np.ndarray) and (values.ndim == 1 or values.shape[1:] == (1,)):
        values = values.ravel().tolist() if values.dtype.kind in "OUST" else None
    if isinstance(values, list | tuple) and values and all(isinstance(item, str | Path) for item in values):
        return [str(item) for item in values]
    return None


def _channels_last(images: np.ndarray) -> np.ndarray:
    """N H W, N H W C or N C H W -> N H W C."""
    if images.ndim == 3:
        return images[..., None]
    if images.ndim != 4 or 0 in images.shape:
        raise InputError(f"X has the shape {images.shape}; give N H W, N H W C or N C H W")
    return images if channels_last(images.shape) else images.transpose(0, 2, 3, 1)


def _raise_if_unreadable(errors: Sequence[object], source: Source) -> None:
    for index, error in enumerate(errors):
        if error is not None:
            raise DataError(f"{source.where(index)} cannot be read: {error}; leave it out of X")
