"""Running an evaluation: exact on any number of ranks, honest about bad files, and leaves the model as it was."""

import json
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitkit
from evaluate.subjects import CONFIG, Oracle, in_memory
from peers import randomize
from strategies import configs
from vitkit.data import Loader, open_data
from vitkit.data.source import Source
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.evaluation import Evaluation, evaluate, evaluation_loader, quick
from vitkit.evaluation.run import run_part
from vitkit.model.config import Preprocessing, ViTConfig
from vitkit.progress import Progress
from vitkit.tasks import columns_of
from vitkit.tasks.match import map_classes, matched, parse_map
from vitkit.tasks.result import Records, merge
from vitkit.tasks.table import task_of


def answers(count: int, classes: int = 4, seed: int = 1) -> torch.Tensor:
    return 3 * torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def test_every_number_is_that_of_scikit_learn() -> None:
    source = in_memory()
    logits = answers(len(source))
    found = evaluate(Oracle(source, logits), source, batch_size=7)
    p, y = logits.softmax(dim=1).numpy(), source.labels
    predicted = p.argmax(axis=1)
    assert found.samples == len(source)
    assert found.top1 == pytest.approx(sk.accuracy_score(y, predicted))
    assert found.top5 == 1.0  # of four classes
    assert found.loss == pytest.approx(
        sk.log_loss(y, logits.double().softmax(dim=1).numpy(), labels=range(4)), rel=1e-5
    )
    assert (found.confusion == sk.confusion_matrix(y, predicted)).all()
    assert found.per_class.support.tolist() == source.counts.tolist()
    assert np.diag(found.confusion).sum() == round(found.top1 * found.samples)
    losses = -np.log(p[np.arange(len(y)), y])
    wrong = np.flatnonzero(predicted != y)
    assert [m.index for m in found.worst] == wrong[np.argsort(-losses[wrong])].tolist()
    first = found.worst[0]
    assert (first.where, first.label) == (f"made up[{first.index}]", source.classes[y[first.index]])
    assert first.predicted == source.classes[predicted[first.index]]
    assert first.probability == pytest.approx(p[first.index].max(), rel=1e-5)


def test_several_labels() -> None:
    source = in_memory(several=True)
    logits = answers(len(source))
    found = evaluate(Oracle(source, logits), source, batch_size=7)
    assert found.map == pytest.approx(sk.average_precision_score(source.labels, logits.numpy(), average="macro"))
    assert (found.top1, found.top5, found.confusion) == (None, None, None)
    assert found.loss == pytest.approx(sk.log_loss(source.labels.ravel(), logits.sigmoid().double().ravel()), rel=1e-5)
    told = found.to_dict()
    assert told["map"] == found.map
    assert set(told["per_class"][0]) == {"class", "precision", "recall", "f1", "support", "ap"}
    assert found.reliability.count.sum() == source.labels.size
    assert all(m.label != m.predicted for m in found.worst)
    assert set(quick(Oracle(source, logits), evaluation_loader(source, CONFIG))) == {"map", "loss", "samples"}


def test_json_has_the_promised_keys_and_no_infinities() -> None:
    source = in_memory(9)
    logits = answers(9)
    logits[3, 2] = float("nan")
    found = evaluate(Oracle(source, logits), source)
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {"top1", "top5", "loss", "ece", "map", "per_class", "confusion", "samples", "bad_files"} <= told.keys()
    assert (found.not_finite, told["loss"], told["map"]) == (1, None, None)
    assert len(told["per_class"]) == 4
    assert np.array(told["confusion"]).sum() == 9
    assert sum(b["count"] for b in told["reliability"]) == 8


# --- ranks -------------------------------------------------------------------------------------------


def same(a: Records, b: Records) -> bool:
    alike = a.columns.keys() == b.columns.keys() and np.array_equal(a.indices, b.indices)
    return alike and all(np.array_equal(a[name], b[name]) for name in a.columns)


def part_of(model: torch.nn.Module, loader: Loader) -> Records:
    return run_part(model, model, task_of(model, loader.source.label_kind).record, loader)


def found_in(records: Records, source: Source, model: torch.nn.Module) -> Evaluation:
    return task_of(model, source.label_kind).evaluation(records, source)


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 16),
    world=st.integers(1, 5),
    several=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_number_of_ranks_gives_the_same_records(
    count: int, batch: int, world: int, several: bool, seed: int
) -> None:
    source = in_memory(count, several=several, seed=seed)
    logits = answers(count, seed=seed)
    whole = part_of(Oracle(source, logits), evaluation_loader(source, CONFIG, count))
    parts = []
    for rank in range(world):
        model = Oracle(source, logits)
        loader = evaluation_loader(source, CONFIG, batch, rank=rank, world_size=world)
        parts.append(part_of(model, loader))
        assert len(model.calls) == len(loader)  # every rank takes every step, as a sharded model needs
    merged = merge(parts[::-1])
    assert same(merged, whole)
    assert sum(map(len, parts)) == count == len(set(merged.indices.tolist()))
    ours, theirs = (found_in(r, source, model).to_dict() for r in (merged, whole))
    assert ours == theirs


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_real_model_on_several_ranks(world: int) -> None:
    source = in_memory(50)
    model = randomize(vitkit.create(CONFIG), scale=0.5)
    whole = evaluate(model, source)
    parts = [part_of(model, evaluation_loader(source, CONFIG, 16, rank=r, world_size=world)) for r in range(world)]
    merged = found_in(merge(parts), source, model)
    assert merged.loss == pytest.approx(whole.loss, rel=1e-5)
    assert (merged.top1, merged.top5) == (whole.top1, whole.top5)
    assert (merged.confusion == whole.confusion).all()


def test_several_ranks_without_torch_distributed_is_an_error() -> None:
    source = in_memory(8)
    with pytest.raises(ConfigError, match="torchrun"):
        evaluate(Oracle(source, answers(8)), source, rank=0, world_size=2)


_OF_TWO = """
import copy, json, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
sys.path[:0] = sys.argv[1:]
import vitkit
from evaluate.subjects import CONFIG, in_memory
from peers import randomize
from vitkit.evaluation import evaluate
from vitkit.world import joined
torch.set_num_threads(1)
source, model, parts = in_memory(37), randomize(vitkit.create(CONFIG), scale=0.5), []
with joined() as world:
    rank, world_size = world.rank, world.size
    sharded = copy.deepcopy(model).train()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for kind in (model, DistributedDataParallel(copy.deepcopy(model)), sharded):  # one rank gets none of the last batch
        found = evaluate(kind, source, batch_size=12, rank=rank, world_size=world_size)
        parts.append([world_size, found.to_dict()])
    sharded(torch.randn(2, 1, 8, 8)).sum().backward()
Path(__file__).with_name(f"rank{rank}.json").write_text(json.dumps(parts))  # two processes share one output
"""


@pytest.mark.slow
def test_two_processes_under_torchrun(tmp_path: Path) -> None:
    """The model itself, in DistributedDataParallel and sharded: all as exact as alone."""
    import subprocess
    import sys

    script = tmp_path / "two.py"
    script.write_text(_OF_TWO)
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(tests)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = evaluate(randomize(vitkit.create(CONFIG), scale=0.5), in_memory(37)).to_dict()
    assert [len(parts) for parts in found] == [3, 3]
    for world, told in found[0] + found[1]:
        assert world == 2
        assert all(told[key] == alone[key] for key in ("samples", "top1", "top5", "confusion", "per_class"))
        assert told["loss"] == pytest.approx(alone["loss"], rel=1e-5)


# --- the model is left as it was ---------------------------------------------------------------------


def test_modes_are_restored() -> None:
    source = in_memory(8)
    model = vitkit.create(CONFIG).train()
    model.encoder.eval()
    before = [m.training for m in model.modules()]
    evaluate(model, source)
    assert [m.training for m in model.modules()] == before


@settings(max_examples=12)
@given(configs(classes=4, channels=1, image_size=12, patch_size=4, stem=None, preprocessing=Preprocessing(size=12)))
def test_a_model_can_be_trained_after_it_was_evaluated(config: ViTConfig) -> None:
    """Nothing that was computed without gradients may stay behind in a cache."""
    model = vitkit.create(config).train()
    quick(model, evaluation_loader(in_memory(5), config))
    model(torch.randn(2, 1, 12, 12)).sum().backward()


def test_half_precision_models_get_half_precision_images() -> None:
    found = evaluate(randomize(vitkit.create(CONFIG)).bfloat16(), in_memory(8))
    assert np.isfinite(found.loss)


def test_progress_is_told() -> None:
    source = in_memory(20)
    seen: list[tuple[float, float | None]] = []

    class Told(Progress):
        def update(self, what: str, done: float, total: float | None = None) -> None:
            assert what == "evaluating made up"
            seen.append((done, total))

    model = Oracle(source, answers(20))
    evaluate(model, source, batch_size=8, progress=Told())
    assert seen == [(8, 20), (16, 20), (20, 20)]
    seen.clear()
    loader = evaluation_loader(source, CONFIG, 8, rank=1, world_size=3)
    run_part(model, model, task_of(model).record, loader, progress=Told())
    assert [done for done, _ in seen][-1] == seen[0][1]


def test_a_loader_can_be_used_again_and_again() -> None:
    source = in_memory(20)
    model, loader = Oracle(source, answers(20)), evaluation_loader(source, CONFIG, 8)
    iterator = iter(loader)
    next(iterator)  # someone looked at a batch and went away
    assert quick(model, loader) == quick(model, loader)
    assert quick(model, loader)["samples"] == 20


# --- bad files ---------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    from data.making import write_folder

    return write_folder(tmp_path / "photos", {"cats": 12, "dogs": 12})


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_files_are_listed_and_not_counted(photos: Path, workers: int) -> None:
    bad = {str(photos / "cats" / "003.jpg"), str(photos / "dogs" / "007.jpg"), str(photos / "dogs" / "008.jpg")}
    for path in bad:
        Path(path).write_bytes(b"no image")
    config = CONFIG.replace(classes=2, channels=3)
    source = open_data(photos).split("all")
    found = evaluate(randomize(vitkit.create(config)), source, batch_size=5, workers=workers)
    assert {b.path for b in found.bad_files} == bad
    assert found.samples == 21
    assert {source.where(int(i)) for i in found.records.indices}.isdisjoint(bad)
    assert found.per_class.support.tolist() == [11, 10]


def test_a_class_of_which_nothing_can_be_read_does_not_end_the_evaluation(photos: Path) -> None:
    for path in (photos / "cats").iterdir():
        path.write_bytes(b"")
    found = evaluate(vitkit.create(CONFIG.replace(classes=2, channels=3)), open_data(photos).split("all"))
    assert found.per_class.support.tolist() == [0, 12]
    assert len(found.bad_files) == 12


def test_nothing_readable_at_all_is_an_error(photos: Path) -> None:
    for path in photos.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no image of .* can be read.*vitkit data check"):
        evaluate(vitkit.create(CONFIG.replace(classes=2, channels=3)), open_data(photos).split("all"))


# --- classes -----------------------------------------------------------------------------------------


def named(model: torch.nn.Module, *names: str) -> torch.nn.Module:
    model.class_names = names
    return model


def test_classes_in_another_order_are_mapped_by_name() -> None:
    source = in_memory()
    logits = answers(len(source))
    plain = evaluate(named(Oracle(source, logits), "ant", "bee", "cow", "dog"), source)
    order = [2, 0, 3, 1]
    shuffled = named(Oracle(source, logits[:, order]), *(source.classes[i] for i in order))
    assert columns_of(shuffled, source).tolist() == [1, 3, 0, 2]
    assert evaluate(shuffled, source).to_dict() == plain.to_dict()


@pytest.mark.parametrize("names", [None, ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3")])
def test_without_names_the_order_counts_and_is_told(names: tuple[str, ...] | None) -> None:
    source = in_memory()
    model = Oracle(source, answers(len(source)))
    model.class_names = names
    columns, note = matched(model, source)
    assert columns is None
    assert "no class names: those of made up are taken in order" in note


def test_numbers_are_names_where_the_model_has_them_else_indices() -> None:
    source = in_memory()
    model = named(Oracle(source, answers(len(source))), "3", "2", "1", "0")
    assert matched(model, source.renamed(dict(zip(source.classes, "0123", strict=True))))[0].tolist() == [3, 2, 1, 0]
    named(model, "ant", "bee", "cow", "dog")
    columns, note = matched(model, source.renamed(dict(zip(source.classes, "0132", strict=True))))
    assert columns.tolist() == [0, 1, 3, 2]
    assert "indices" in note


def test_other_names_are_an_error_until_they_are_mapped(tmp_path: Path) -> None:
    """A model of 0..3 and data of ant, bee ...: as many classes, and not the same."""
    source = in_memory()
    logits = answers(len(source))
    expected = evaluate(named(Oracle(source, logits), *source.classes), source)
    model = named(Oracle(source, logits[:, [1, 0, 2, 3]]), "0", "1", "2", "3")
    with pytest.raises(ConfigError, match=r"only the model has 0, 1, 2, 3; only the data has ant.*--map DATA=MODEL"):
        evaluate(model, source)
    (tmp_path / "names.json").write_text('{"ant": "1", "bee": 0}')
    names = parse_map([str(tmp_path / "names.json"), "cow=2", "dog=3"])
    assert names == {"ant": "1", "bee": "0", "cow": "2", "dog": "3"}
    assert evaluate(model, map_classes(model, source, names)).metrics == expected.metrics


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"ent": "0"}, "no class 'ent'.*Did you mean ant"),
        ({"ant": "7"}, "class 7 does not exist"),
        ({"ant": "cow"}, "ant, cow of made up would all be called 'cow'"),
    ],
)
def test_maps_that_do_not_fit(names: dict[str, str], words: str) -> None:
    source = in_memory()
    model = named(Oracle(source, answers(len(source))), "ant", "bee", "cow", "dog")
    with pytest.raises(VitkitError, match=words):
        map_classes(model, source, names)


@pytest.mark.parametrize("text", ["ant", "=0", "ant=", "missing.json"])
def test_a_map_is_pairs(text: str) -> None:
    with pytest.raises(ConfigError, match="write DATA=MODEL"):
        parse_map([text])


@pytest.mark.parametrize(
    ("classes", "names", "words"),
    [
        (0, None, ["classes=0", "--probe knn"]),
        (7, None, ["model has 7 classes", "made up has 4", "ant, bee, cow, dog"]),
        (4, ("ant", "bee", "cow", "elk"), ["only the model has elk", "only the data has dog", "--map", "--probe"]),
        (3, ("ant", "bee", "cow"), ["model's 3 classes", "4 of made up", "only the data has dog"]),
    ],
)
def test_classes_that_do_not_fit_are_named(classes: int, names: tuple[str, ...] | None, words: list[str]) -> None:
    model = vitkit.create(CONFIG, classes=classes)
    model.class_names = names
    with pytest.raises(ConfigError) as e:
        evaluate(model, in_memory())
    assert all(word in str(e.value) for word in words), str(e.value)
