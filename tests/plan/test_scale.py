"""Plans for many machines: bytes by hand, ranges in their order, and the simulation beside the closed forms."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from vitkit.plan import ASSUMED, Plan, Setup, plan, scale
from vitkit.plan.assumptions import Range
from vitkit.plan.scale import pipeline
from vitkit.plan.simulate import flow


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(Setup("vit-ti/16", images=300_000_000, gpus=64, device="a100", epochs=7, batch_size=8192))


def test_bytes_over_the_network_and_from_storage(made: Plan) -> None:
    many = scale(made)
    gradients = 4 * made.parameters
    assert many.nodes == 8
    assert many.network_bytes == pytest.approx(2 * 63 / 64 * gradients)
    assert many.network_rate == pytest.approx(many.network_bytes / made.step.total)
    assert many.storage_rate == pytest.approx(made.images_per_second * 110_000 / 8)
    assert many.storage_bytes == pytest.approx(300e6 * 110_000 / 8)
    assert many.index_bytes == 40 * 300_000_000
    assert many.checkpoint_bytes == pytest.approx(12 * made.parameters, rel=1e-3)  # weights and two of AdamW's


def test_shards_gather_parameters_and_share_checkpoints(made: Plan) -> None:
    sharded = plan(replace(made.setup, shard=True))
    one, many = scale(made), scale(sharded)
    assert many.network_bytes / one.network_bytes == pytest.approx(1.5, rel=1e-3)
    assert many.checkpoint_bytes == pytest.approx(one.checkpoint_bytes, rel=1e-3)
    assert many.checkpoint_seconds[1] == pytest.approx(one.checkpoint_seconds[1] / 8, rel=1e-3)


def test_one_machine_sends_nothing() -> None:
    assert scale(plan(Setup("mu", gpus=8, device="a100"))).network_bytes == 0


def test_ranges_go_from_best_to_worst(made: Plan) -> None:
    many = scale(made)
    for name in ("checkpoint_seconds", "node_failures", "days", "cost"):
        best, likely, worst = getattr(many, name)
        assert best < likely < worst, name
    assert many.efficiency[0] > many.efficiency[1] > many.efficiency[2]
    assert many.days[1] >= made.hours / 24


def test_storage_that_is_too_slow_makes_the_run_longer(made: Plan) -> None:
    narrow = replace(ASSUMED, storage=replace(ASSUMED.storage, low=1e7, likely=1e7, high=1e7))
    many = scale(made, narrow, simulate=True)
    share = 1e7 / 110_000 / (made.images_per_second / 8)
    assert many.fed[1] == pytest.approx(share)
    assert many.simulated is not None
    assert many.simulated["likely"].images_per_second == pytest.approx(8 * 1e7 / 110_000, rel=0.02)
    assert many.simulated["likely"].waits_for_data > 0.5


def test_without_noise_the_simulation_is_the_closed_form(made: Plan) -> None:
    quiet = {f.name: getattr(ASSUMED, f.name) for f in fields(ASSUMED)}
    quiet |= {name: replace(quiet[name], low=0.0, likely=0.0, high=0.0) for name in ("spread", "slow_steps")}
    line = pipeline(made, replace(ASSUMED, **quiet), "likely")
    plenty = replace(line, workers=200, decode=line.decode / 4, read=0.0)
    assert flow(plenty, 1000).images_per_second == pytest.approx(made.images_per_second, rel=1e-6)
    simulated = scale(made, simulate=True).simulated
    assert simulated is not None
    assert simulated["likely"].images_per_second < made.images_per_second  # stragglers


def test_every_assumption_has_a_unit_and_a_source() -> None:
    for name, low, likely, high, unit, source in ASSUMED.rows():
        assert low <= likely <= high, name
        assert unit, name
        assert source, name
    assert isinstance(ASSUMED.restart, Range)
    assert ASSUMED.restart.best == ASSUMED.restart.low


def test_the_table_of_assumptions_is_in_the_docs() -> None:

    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    for name, low, likely, high, *_ in ASSUMED.rows():
        assert f"| `{name}` | {low:,g} | {likely:,g} | {high:,g} |" in text


def test_command_prints_ranges_and_a_simulation(command) -> None:
    options = ["--gpus", "64", "--device", "h100", "--images", "300000000", "--epochs", "1", "--batch-size", "4096"]
    code, out, _ = command("plan", "vit-ti/16", *options, "--simulate")
    assert code == 0
    for words in ("8 nodes", "best", "likely", "worst", "index of the shards", "waits for the slowest"):
        assert words in out
    code, out, _ = command("plan", "vit-ti/16", *options, "--json")
    found = json.loads(out)["scale"]
    assert found["nodes"] == 8
    assert found["simulated"] is None
    assert found["assumptions"]["node_mtbf"]["likely"] == 6300


def test_expected_time_is_work_over_efficiency(made: Plan) -> None:
    many = scale(made)
    assert many.days[1] * many.efficiency[1] == pytest.approx(made.hours / 24 / many.fed[1], rel=1e-6)
