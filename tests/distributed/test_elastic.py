"""Nodes that die, hang, lose their network or their disk: training goes on by itself, with every sample in its place.

A node is an agent of torchrun on loopback, or in a network namespace of its own. The address where they meet lives
outside of all of them, so that any may die. Every test has its time limit: nothing hangs.
"""

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit
from elastic_cluster import BATCH, IMAGES, LIMIT, STEPS, Cluster, check_bits, check_samples, counted, losses, seen
from vitkit.data import open_data
from vitkit.data.order import epoch_order
from vitkit.training import attempts
from vitkit.training.log import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(0)
    labels = np.arange(IMAGES + 24) % 2
    images = random.integers(0, 60, (len(labels), 8, 8, 1), dtype=np.uint8)
    images[labels == 1, 2:6, 2:6] += 100
    path = tmp_path_factory.mktemp("squares") / "squares.npz"
    np.savez(path, x_train=images[:IMAGES], y_train=labels[:IMAGES], x_val=images[IMAGES:], y_val=labels[IMAGES:])
    return str(path)


@pytest.fixture(scope="module")
def peace(data: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two processes that nothing disturbs."""
    made = Cluster(tmp_path_factory.mktemp("peace"), data)
    made.add(2)
    made.finish()
    check_samples(made)
    yield made
    made.close()


@pytest.fixture
def cluster(data: str, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, data)
    yield made
    made.close()


def test_a_rank_is_killed(cluster: Cluster, peace: Cluster) -> None:
    node = cluster.add(2)
    cluster.until_step(15)
    os.kill(cluster.ranks(node)[-1], signal.SIGKILL)
    cluster.finish()
    assert len([line for line in attempts.read(cluster.out) if "step" in line]) == 2
    check_bits(cluster, peace)


def test_a_node_is_killed_and_another_comes(cluster: Cluster, peace: Cluster) -> None:
    """2 ranks, 1, and 2 again: no sample is lost or seen twice, and what is learned is the same but for rounding."""
    cluster.pace(1)  # it takes a while until a node is missed
    cluster.add(1)
    other = cluster.add(1)
    cluster.until_world(2, starts=1)
    cluster.kill(other)
    cluster.until_world(1, starts=2)
    cluster.add(1)
    cluster.until_world(2, starts=3)
    cluster.finish()
    check_samples(cluster)
    assert seen(cluster) == seen(peace)
    assert losses(cluster.out) == pytest.approx(losses(peace.out), abs=1e-4)


def test_a_rank_hangs(cluster: Cluster, peace: Cluster) -> None:
    """Stopped, it holds all up, and none fails: the watchdogs end the attempt, with the stacks of every rank."""
    node = cluster.add(2, "--hang-limit", "8")
    cluster.until_step(15)
    os.kill(cluster.ranks(node)[-1], signal.SIGSTOP)
    cluster.finish()
    stacks = {p.name: p.read_text() for p in (cluster.out / "stacks").iterdir()}
    assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
    assert all("run_watched" in text and "elastic_worker.py" in text for text in stacks.values())
    assert any("the limit of --hang-limit" in text for text in stacks.values())
    check_bits(cluster, peace)


def test_the_newest_checkpoint_is_damaged(cluster: Cluster, peace: Cluster) -> None:
    node = cluster.add(2)
    cluster.until_step(15)
    os.kill(node.pid, signal.SIGSTOP)  # so that it does not start them again before the damage is done
    for rank in cluster.ranks(node):
        os.kill(rank, signal.SIGKILL)
    newest = sorted((cluster.out / "checkpoints").glob("step-*"))[-1]
    content = bytearray((newest / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "state.pt").write_bytes(content)
    os.kill(node.pid, signal.SIGCONT)
    cluster.finish()
    assert f"{int(newest.name[5:])} is damaged" in cluster.text()
    assert list((cluster.out / "checkpoints").glob("aside-*"))
    check_bits(cluster, peace)


def test_the_disk_of_one_rank_is_full_for_a_while(cluster: Cluster, data: str, tmp_path: Path) -> None:
    """A sharded run, whose ranks all write: the others hear of it, go on, and all of them try again."""
    cluster.add(2, "--shard", FULL_DISK="1 20 24")
    cluster.finish()
    assert "could not be written" in cluster.text()
    assert "process 1" in cluster.text()
    assert len([line for line in attempts.read(cluster.out) if "step" in line]) == 1
    logged = [line["step"] for line in read(cluster.out / "log.jsonl") if "loss" in line]
    assert logged == list(range(1, STEPS + 1))
    assert list((cluster.out / "checkpoints").glob("step-*"))
    assert vitkit.load(cluster.out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_disk_of_the_run_is_full_for_a_while(cluster: Cluster, peace: Cluster, small_disk: Path) -> None:
    cluster.out = small_disk / "run"
    cluster.add(2)
    cluster.until_step(12)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    cluster.until("a note about the disk", lambda: "The run goes on" in cluster.text() or "No space" in cluster.text())
    ballast.unlink()
    cluster.finish()
    check_bits(cluster, peace)


def test_shards_of_two_ranks_are_read_by_one_and_by_three(cluster: Cluster, peace: Cluster, tmp_path: Path) -> None:
    """Each part of the run is stopped, and the next one has another number of ranks; the last step becomes one file."""
    for part, ranks in enumerate((2, 1, 3), start=1):
        cluster.pace(0.2)
        node = cluster.add(ranks, "--shard")
        cluster.until_world(ranks, starts=part)
        if part < 3:
            node.send_signal(signal.SIGTERM)
            assert node.wait(LIMIT) != 0
            cluster.nodes.clear()
    cluster.finish()
    check_samples(cluster)
    assert seen(cluster) == seen(peace)
    assert losses(cluster.out) == pytest.approx(losses(peace.out), abs=1e-4)
    last = cluster.out / "checkpoints" / f"step-{STEPS:09d}"
    assert len(list((last / "shards").glob("*.distcp"))) == 3
    model, whole = vitkit.load(last), vitkit.load(cluster.out / "model.safetensors")
    vitkit.save(model, tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (cluster.out / "model.safetensors").read_bytes()
    assert model.config == whole.config


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images in eight shards of 15, and one to evaluate on."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tars")
    for name in (*(f"train-{n}" for n in range(8)), "val-0"):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for i in range(IMAGES // 8):
                png = io.BytesIO()
                Image.fromarray(random.integers(0, 60, (8, 8), dtype=np.uint8) + 100 * (i % 2)).save(png, "PNG")
                for suffix, content in (("png", png.getvalue()), ("cls", f"{i % 2}".encode())):
                    info = tarfile.TarInfo(f"{i:02}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def test_four_ranks_then_two_then_three_read_every_shard_once(tars: Path, tmp_path: Path) -> None:
    """Stopped in the middle of epochs, and started again with another number of ranks."""
    cluster, parts = Cluster(tmp_path, str(tars)), ((4, 14), (2, 37), (3, STEPS))
    try:
        for ranks, stop in parts:
            node = cluster.add(ranks, "--workers", "0")
            if stop < STEPS:
                cluster.until_step(stop)
                node.send_signal(signal.SIGTERM)
                assert node.wait(LIMIT) != 0
                cluster.nodes.clear()
        cluster.finish()
    finally:
        cluster.close()
    check_samples(cluster)
    steps, each = counted(cluster), IMAGES // BATCH
    worlds = [lines[0][2] for lines in steps.values()]
    assert list(dict.fromkeys(worlds)) == [4, 2, 3]
    assert [len(lines) for lines in steps.values()] == worlds
    source = open_data(tars).split("train")
    for epoch in range(STEPS // each):
        own = range(epoch * each, (epoch + 1) * each)
        alone = epoch_order(source, 0, epoch, shuffle=True)
        for step in own:  # the batches of one process
            assert seen(cluster)[step] == sorted(alone.part(step % each, BATCH, 0, 1).indices.tolist())
        ranks = [line for step in own for line in steps[step]]
        read = [name for line in ranks for name in line[6] if "train-" in name]
        assert Counter(read) == Counter(source.where(i) for i in range(IMAGES)), epoch
        if len(world := {line[2] for line in ranks}) == 1:  # no stop in this epoch
            readers = defaultdict(set)
            for line in ranks:
                for index in line[3]:
                    readers[index // 15].add(line[1])
            shared = sum(len(r) > 1 for r in readers.values())
            assert shared == 0 if world != {3} else shared <= 2, "3 ranks share the 8 shards at two borders"


# --- a network that loses every packet, without a word ---------------------------------------------

PORT = 29411
SERVER = (
    f"import time, torch.distributed as d; s = d.TCPStore('0.0.0.0', {PORT}, is_master=True, wait_for_workers=False)"
)
SIDES = {"a": "10.213.7.1", "b": "10.213.7.2"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def inside(side: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", f"vitkit-{side}")


@pytest.fixture
def two_machines() -> Iterator[None]:
    """Two network namespaces, joined by one cable."""
    try:
        for side in SIDES:
            ip("netns", "add", f"vitkit-{side}")
        ip(
            "link",
            "add",
            "vitkit0",
            "netns",
            "vitkit-a",
            "type",
            "veth",
            "peer",
            "name",
            "vitkit0",
            "netns",
            "vitkit-b",
        )
        for side, address in SIDES.items():
            ip("-n", f"vitkit-{side}", "addr", "add", f"{address}/24", "dev", "vitkit0")
            for device in ("lo", "vitkit0"):
                ip("-n", f"vitkit-{side}", "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as e:
        remove()
        pytest.skip(f"network namespaces are not permitted here: {getattr(e, 'stderr', e)}")
    yield
    remove()


def remove() -> None:
    for side in SIDES:
        subprocess.run(["ip", "netns", "del", f"vitkit-{side}"], capture_output=True, check=False)


def cut() -> None:
    """Packets go to a machine that does not exist, and nobody is told."""
    for side, other in ("ab", "ba"):
        away = ("lladdr", "02:00:00:00:00:99", "dev", "vitkit0", "nud", "permanent")
        ip("-n", f"vitkit-{side}", "neigh", "replace", SIDES[other], *away)


def mend() -> None:
    """Each asks again where the other one is."""
    for side, other in ("ab", "ba"):
        ip("-n", f"vitkit-{side}", "neigh", "del", SIDES[other], "dev", "vitkit0")


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_network_between_two_nodes_is_lost(
    two_machines: None, data: str, peace: Cluster, tmp_path: Path, comes_back: bool
) -> None:
    """Both wait, neither fails: the watchdogs end it, and one node goes on alone. When the network is there again
    the other one joins by itself, if its torchrun had more patience (`read_timeout`) than the network was away.
    """
    server = subprocess.Popen([*inside("a"), sys.executable, "-c", f"{SERVER}; time.sleep(1e6)"])
    cluster = Cluster(tmp_path, data, f"{SIDES['a']}:{PORT}", read_timeout=200 if comes_back else 10)

    def add(side: str) -> subprocess.Popen:
        where = {"prefix": inside(side), "at": SIDES[side], "GLOO_SOCKET_IFNAME": "vitkit0"}
        return cluster.add(1, "--hang-limit", "8", **where)  # type: ignore[arg-type]

    try:
        cluster.pace(2 if comes_back else 1)  # it takes a while until a lost packet is sent again
        add("a")
        lost = add("b")
        cluster.until_world(2, starts=1)
        cut()
        cluster.until_world(1, starts=2)
        if comes_back:
            mend()
            cluster.until_world(2, starts=3)
        else:
            lost.kill()  # whatever manages machines would start another one
            lost.wait()
            cluster.nodes.remove(lost)
        cluster.finish()
    finally:
        cluster.close()
        server.kill()
        server.wait()
    assert {p.name for p in (cluster.out / "stacks").iterdir()} == {"rank-0.txt", "rank-1.txt"}
    worlds = [line["processes"] for line in attempts.read(cluster.out) if "step" in line]
    assert worlds == ([2, 1, 2] if comes_back else [2, 1])
    check_samples(cluster)
    assert seen(cluster) == seen(peace)
    assert losses(cluster.out) == pytest.approx(losses(peace.out), abs=1e-4)
