"""What a run is made of, put together from its configuration: task, data, model, optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vitkit.checkpoints.family import Checkpoint
from vitkit.checkpoints.load import load, open_checkpoint
from vitkit.checkpoints.options import ModelOptions
from vitkit.data import Augment, BadFiles, Loader, Source, cached, evaluation_split, normalise
from vitkit.data.dataset import Dataset
from vitkit.data.keys import permutation
from vitkit.data.order import stratified_order, stratified_part
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import evaluation_loader
from vitkit.model.attention import Attention
from vitkit.model.base import VisionModel
from vitkit.model.build import Model, create, outline
from vitkit.model.stem import WhitenedStem
from vitkit.model.vit import ViT
from vitkit.model.zoo import ZOO
from vitkit.progress import Progress
from vitkit.storage import workplace
from vitkit.tasks import Settings, Task
from vitkit.tasks.table import task_of_data
from vitkit.tasks.trainee import Teacher, Trainee
from vitkit.training import optim
from vitkit.training.config import TrainConfig
from vitkit.world import World, ensure_group

EVALUATED = 1_000  # images that pre-training is evaluated on
WHITENED = 500  # images that tell the whitening filters
STANDARDISED = 128  # images that tell the mean and deviation of a teacher's features
Loaders = tuple[Loader, Loader | None, Loader | None]  # of the splits train, val, test


@dataclass
class Parts:
    config: TrainConfig
    world: World
    task: Task
    model: Model  # the weights that learn
    trainee: Trainee  # the model and what the task adds to it
    wrapped: nn.Module  # the trainee, compiled and wrapped for many processes
    average: optim.Average | None
    optimizers: list[torch.optim.Optimizer]
    learning: list[nn.Parameter]
    scaler: torch.amp.GradScaler
    loader: Loader
    validation: Loader | None
    test: Loader | None
    answers: bool = False  # before the first step: the checkpoint was made for these very outputs

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated and kept: the average, where there is one."""
        if self.average is not None:
            return self.average.model
        if self.config.shard:  # FSDP gathers the weights where it was put around
            return self.wrapped
        return self.model if self.trainee.plain else self.trainee

    @property
    def test_share(self) -> float:
        """Images of the test split per image of the validation split."""
        if self.test is None or self.validation is None:
            return 0.0
        return len(self.test.source) / max(1, len(self.validation.source))

    @property
    def held_out(self) -> dict[str, Loader]:
        loaders = {"validation": self.validation, "test": self.test}
        return {name: loader for name, loader in loaders.items() if loader is not None}

    @property
    def evaluated_images(self) -> dict[str, tuple[int, int]]:
        """How many images are evaluated, and how many the split has; of validation and test."""
        sources = {name: loader.source for name, loader in self.held_out.items()}
        return {name: (len(s), s.splits.get(s.split, len(s))) for name, s in sources.items()}

    def on_input(self, model: nn.Module) -> nn.Module:
        """A model as it takes what the loaders give: images, or states of frozen blocks."""
        if not self.trainee.start:
            return model
        above = Trainee(model)  # type: ignore[arg-type]  # of our own kind: other trainees see images
        above.start = self.trainee.start
        return above

    def autocast(self) -> AbstractContextManager[object]:
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return nullcontext() if half is None else torch.autocast(self.world.device.type, half)


def task_for(config: TrainConfig, source: Source) -> Task:
    settings = Settings(config.loss, config.class_weights, config.augment or Augment(), config.options)
    return task_of_data(source, config.task, settings)


def open_init(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint to fine-tune, looked into but not yet adapted."""
    if config.init in ZOO and not Path(config.init).exists():
        hint = f"train it from scratch with --model {config.init}, or give --init a checkpoint"
        raise ConfigError(f"{config.init} is a name of the zoo and has no trained weights; {hint}")
    return None if config.init is None else open_checkpoint(config.init, _options(config))


def _options(config: TrainConfig, **more: object) -> ModelOptions:
    given = {"image_size": config.image_size} if config.image_size is not None else {}
    return ModelOptions.of(**{**config.changes, **given, **more})


def assemble(
    config: TrainConfig,
    world: World,
    data: Dataset,
    progress: Progress,
    init: Checkpoint | None = None,
    teacher: nn.Module | None = None,
) -> Parts:
    task = task_for(config, data.split("train"))
    if init is not None:  # the checkpoint to fine-tune, with a head for the task
        model = load(init, options=_options(config, classes=task.count, dtype="float32"))
        task.prepare(model)
    else:
        torch.manual_seed(config.seed)
        model = create(config.model, **_options(config, classes=task.count).changes)
        model.outputs = task.outputs
        fit_stem(model, data.split("train"))
    answers = init is not None and any(bool(part.weight.any()) for part in model.classifiers)
    model = model.to(world.device)
    torch.manual_seed(config.seed)  # low-rank updates start at random
    freeze(model, config.freeze)
    add_lora(model, config.lora)
    model.gradient_checkpointing = config.gradient_checkpointing
    average = optim.Average(model, config.ema) if config.ema else None
    if config.shard and average is not None:
        wrap(average.model, world, shard=True)
    if teacher is not None or config.teacher is not None:
        guide = teacher if teacher is not None else load(str(config.teacher))
        how = (config.teacher_share, config.temperature, config.teacher_features, config.teacher_patches)
        task.learn_from(guided := Teacher(guide, model, *how).to(world.device))
        if guided.features:
            guided.standardise(some_images(data.split("train"), model, STANDARDISED).to(world.device))
    elif config.teacher_features or config.teacher_patches:
        raise ConfigError("teacher_features are those of a teacher; name one with --set teacher=CHECKPOINT")
    torch.manual_seed(config.seed)  # what the task adds starts at random
    trainee = task.trainee(model, config.patch_dropout).to(world.device)
    wrapped = wrap(compiled(trainee, config, world, progress), world, config.shard)
    optimizers = optim.build(model, config, trainee.added())
    for optimizer in optimizers:
        if isinstance(optimizer, optim.Muon) and world.on_one_machine and not config.shard:
            optimizer.world = world  # between machines, exchanging would take longer than computing
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    learning = [p for p in trainee.parameters() if p.requires_grad]
    scaler = torch.amp.GradScaler(world.device.type, enabled=config.precision == "fp16")
    models = (model, trainee, wrapped, average, optimizers, learning, scaler)
    return Parts(config, world, task, *models, *loaders(config, world, data, model, task), answers)


def fit_stem(model: Model, source: Source) -> None:
    """The whitening filters of a new model, from images that are spread over the set; the same in every process."""
    if not isinstance(model, ViT) or not isinstance(model.stem, WhitenedStem):
        return
    model.stem.whitening.fit(some_images(source, model, WHITENED))


def some_images(source: Source, model: Model, count: int) -> Tensor:
    """As the model sees them, spread over the set; always the same."""
    some = np.unique(np.linspace(0, len(source) - 1, num=min(count, len(source))).astype(int))
    batches = evaluation_loader(source.take(some), model.config)
    return torch.cat([normalise(batch.images, model.config.preprocessing) for batch in batches])


def loaders(config: TrainConfig, world: World, data: Dataset, model: Model, task: Task) -> Loaders:
    """Training batches, and evaluation of the val and test splits where the set has them.

    Pre-training is evaluated on a sample of val, or where that is small of train and val: it learns no labels by heart.
    """
    source, pre, channels = data.split("train"), model.config.preprocessing, model.config.channels
    if config.head == "converge" and config.budget:  # when the time is over, the features of a fair part are there
        source = source.take(stratified_order(source.groups, config.seed)[: config.train_images or None])
    source = stratified_part(source, config.train_images, config.seed)
    workers = max(0, config.workers)
    if config.cache:
        source = cached(source, pre, config.augment, channels, workers=workers)
    bad_files = BadFiles(workplace(config.out) / "bad-files.csv", total=len(source), max_bad=config.max_bad)
    place = (workers, world.rank, world.size)
    varied = (config.batch_size, config.augment, config.seed)
    training = Loader(source, pre, *varied, *place, config.balanced, bad_files, channels)
    training.samples.views = config.views
    if not len(training):
        raise DataError(f"{config.data} has only {len(source)} images to train on; add more")
    there = [split for split in ("val", "test") if source.splits.get(split)]
    if task.pretrains:
        evaluated = "val" if source.splits.get("val", 0) >= EVALUATED else "+".join(["train", *there[:1]])
        part = stratified_part(sample(data.split(evaluated)), config.validation_images, config.seed)
        return training, evaluation_loader(part, model.config, None, *place), None

    def evaluated_on(split: str, count: int) -> Loader | None:
        part = stratified_part(data.split(split), count, config.seed) if split in there else None
        return None if part is None else evaluation_loader(part, model.config, None, *place)

    validation = evaluated_on(validation_split(source.splits), config.validation_images)
    return training, validation, evaluated_on("test", config.test_images)


def validation_split(splits: Mapping[str, int]) -> str:
    return "test" if not splits.get("val") and evaluation_split(splits) == "test" else "val"


def sample(source: Source) -> Source:
    """At most `EVALUATED` images of a split, always the same."""
    return source.take(np.sort(permutation(0, 0, len(source), "sample")[:EVALUATED]))


def compiled(trainee: Trainee, config: TrainConfig, world: World, progress: Progress) -> nn.Module:
    """torch.compile where it pays: on a GPU, or when asked for. Where it fails the run continues without."""
    if not trainee.plain or config.compile == "no" or (config.compile == "auto" and world.device.type != "cuda"):
        return trainee
    model = trainee.model.config
    try:
        module: nn.Module = torch.compile(trainee)  # type: ignore[assignment]
        with torch.no_grad():
            module(torch.zeros(2, model.channels, *model.image_size, device=world.device))
    except Exception as e:  # a missing compiler, an unsupported GPU: none of it is worth a run
        progress.note(f"torch.compile does not work here ({type(e).__name__}); it runs without")
        return trainee
    return module


def wrap(trainee: nn.Module, world: World, shard: bool) -> nn.Module:
    """DDP, or FSDP over the blocks and then the rest; a world of one needs neither."""
    if world.size == 1 and not shard:
        return trainee
    if not shard:
        plain = getattr(trainee, "plain", True)
        some = not plain or any(not p.requires_grad for p in trainee.parameters())
        ids = [world.device.index] if world.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(trainee, device_ids=ids, find_unused_parameters=some)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ensure_group()
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in trainee.modules():
        for block in part.blocks if isinstance(part, VisionModel) else ():
            fully_shard(block, mesh=mesh)
    fully_shard(trainee, mesh=mesh)
    return trainee


# --- training only a part of a model ----------------------------------------------------------------


class LowRank(nn.Module):
    """weight -> weight + B A / sqrt(r): B starts at zero, so that the model starts as it was."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.a = nn.Parameter(torch.randn(rank, inputs, device=weight.device, dtype=weight.dtype) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=weight.device, dtype=weight.dtype))
        self.scale = rank**-0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def freeze(model: Model, what: str) -> None:
    """ "backbone" leaves only the classifier to learn; a number freezes the embedding and so many blocks."""
    if not what:
        return
    learning: list[nn.Module] = [*model.classifiers]
    if what != "backbone":
        if not isinstance(model, ViT):
            raise ConfigError(f"freeze={what} counts Transformer blocks, and a ResNet has none; use freeze=backbone")
        blocks, count = list(model.encoder.blocks), int(what)
        if count > len(blocks):
            raise ConfigError(f"freeze={what}: the model has only {len(blocks)} blocks; use freeze=backbone for all")
        learning = [module for module in (*blocks[count:], model.norm, model.head) if module is not None]
    model.requires_grad_(False)
    for module in learning:
        module.requires_grad_(True)


def add_lora(model: Model, rank: int) -> None:
    """Freeze all but the classifier, and give the attention's maps low-rank updates that learn."""
    if not rank:
        return
    if not isinstance(model, ViT):
        raise ConfigError("lora updates the maps of attention, and a ResNet has none; use freeze=backbone")
    freeze(model, "backbone")
    attentions = [module for module in model.encoder.modules() if isinstance(module, Attention)]
    for linear in [part for attention in attentions for part in attention.children()]:
        if isinstance(linear, nn.Linear):
            parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


@torch.no_grad()
def plain(model: Model) -> Model:
    """The model without adapters: low-rank updates are added into the weights they belong to."""
    if not any(parametrize.is_parametrized(m) for m in model.modules()):
        return model
    merged = outline(model.config)
    owners = {name: name.rpartition(".") for name in merged.state_dict()}
    tensors = {name: getattr(model.get_submodule(o), leaf).detach() for name, (o, _, leaf) in owners.items()}
    merged.load_state_dict(tensors, assign=True)
    merged.outputs = model.outputs
    return merged.eval()
