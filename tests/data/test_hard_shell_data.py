"""Sets that are damaged, odd or made by an enemy: no image is lost without a word, nothing hangs, no traceback.

docs/security.md says which test holds which promise.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import making
import numpy as np
import pytest

from vitkit.data import cached, open_data
from vitkit.data.decode import BadImage, decode
from vitkit.data.labels import encode_labels
from vitkit.data.sources import arrays as npz
from vitkit.errors import DataError, VitkitError
from vitkit.model.config import Preprocessing

PRE = Preprocessing((8, 8))


def png(number: int) -> bytes:
    return making.encode(making.photo(number, (12, 9)), "PNG")


# --- arrays: values by the range of the set ----------------------------------------------------------


def write_npz(path: Path, images: np.ndarray, **more: np.ndarray) -> Path:
    np.savez(path, images=images, labels=np.arange(len(images)) % 2, **more)
    return path


BYTES = np.random.default_rng(0).integers(0, 255, (20, 4, 4))  # the highest is 254


@pytest.mark.parametrize("kind", ["uint16", "int16", "float16", "int32", "int64", "float32", "float64", "uint8"])
def test_bytes_of_any_type_are_the_same_images(tmp_path: Path, kind: str) -> None:
    dataset = open_data(write_npz(tmp_path / "a.npz", BYTES.astype(kind)))
    assert np.array_equal(dataset.samples.pixels[:, 0].numpy(), BYTES)
    assert (f"{kind} from 0 to 254, taken as 0..255" in " ".join(dataset.notes)) == (kind != "uint8")


@pytest.mark.parametrize(
    ("kind", "white"), [("uint16", 65535), ("int32", 65535), ("float32", 1.0), ("float64", 1.000001)]
)
def test_deep_and_fractional_values_are_scaled(tmp_path: Path, kind: str, white: float) -> None:
    values = (BYTES * (white / 255)).astype(kind)
    values[0, 0, 0] = white
    found = open_data(write_npz(tmp_path / "a.npz", values)).samples.pixels[:, 0].numpy().astype(int)
    assert abs(found - BYTES)[1:].max() <= 1  # whole 16-bit numbers are rounded down above
    assert found[0, 0, 0] == 255


def test_the_range_is_that_of_the_set_not_of_a_split(tmp_path: Path) -> None:
    bright, dark = np.full((8, 4, 4), 60000, np.uint16), np.full((8, 4, 4), 200, np.uint16)
    labels = np.arange(8) % 2
    np.savez(tmp_path / "a.npz", x_train=bright, y_train=labels, x_test=dark, y_test=labels)
    dataset = open_data(tmp_path / "a.npz")
    assert int(dataset.split("train").pixels.max()) == 233
    assert int(dataset.split("test").pixels.max()) == 1  # dark beside the others, as it is


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e30, -1.0])
def test_one_value_cannot_flatten_a_set(tmp_path: Path, bad: float) -> None:
    values = (BYTES / 255).astype(np.float32)
    values[3, 2, 1] = bad
    with pytest.raises(DataError, match=r"finite numbers; replace|scale them to 0\.\.255"):
        open_data(write_npz(tmp_path / "a.npz", values))


def test_a_tiff_with_an_infinite_value_is_refused() -> None:
    from PIL import Image

    values = np.full((8, 8), 0.5, np.float32)
    assert np.asarray(decode(making.encode(Image.fromarray(values), "TIFF"), 1)).max() == 128
    values[0, 0] = np.inf
    with pytest.raises(BadImage, match="finite"):
        decode(making.encode(Image.fromarray(values), "TIFF"), 1)


def test_a_matrix_of_labels_holds_zeros_and_ones(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=BYTES.astype(np.uint8), labels=np.full((20, 3), 256))
    with pytest.raises(DataError, match="zeros and ones"):
        open_data(tmp_path / "a.npz")


def test_an_npz_that_grows_out_of_proportion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "_HARMLESS", 1 << 20, raising=False)
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((400, 128, 128), np.uint8), labels=np.arange(400) % 2)
    with pytest.raises(DataError, match="would become 6,5"):
        open_data(tmp_path / "a.npz")
    monkeypatch.undo()
    assert len(open_data(tmp_path / "a.npz").samples) == 400  # little memory: nothing to refuse


def test_arrays_that_nobody_asks_for_are_not_read(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", BYTES.astype(np.uint8), notes=np.array([{"a": 1}], dtype=object))
    assert len(open_data(tmp_path / "a.npz").samples) == 20


# --- shards: everything that is left out is counted --------------------------------------------------

Entry = tuple[str, bytes | str]  # name and content; a text is where a link leads


def pairs(first: int, count: int) -> list[Entry]:
    return [
        e for i in range(first, first + count) for e in ((f"{i}.png", png(i)), (f"{i}.cls", b"ab"[i % 2 : i % 2 + 1]))
    ]


def write_tar(path: Path, entries: list[Entry], kind: bytes = tarfile.SYMTYPE) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = kind, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def header_at(data: bytes, name: str) -> int:
    """Where the header of an entry begins."""
    return next(at for at in range(0, len(data), 512) if data[at : at + 100].rstrip(b"\0") == name.encode())


def cut_at_a_header(data: bytes) -> bytes:
    return data[: header_at(data, "10.png")]


def cut_inside_an_image(data: bytes) -> bytes:
    return data[: header_at(data, "10.png") + 700]


def spoil_a_header(data: bytes) -> bytes:
    at = header_at(data, "10.png")
    return data[:at] + b"x" * 512 + data[at + 512 :]


def join_two(data: bytes) -> bytes:
    return data + data


@pytest.mark.parametrize("damage", [cut_at_a_header, cut_inside_an_image, spoil_a_header])
def test_half_a_shard_is_told_and_fails_the_check(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], damage: Callable[[bytes], bytes]
) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(0, 20))
    assert command("data", "check", path)[0] == 0
    path.write_bytes(damage(path.read_bytes()))
    dataset = open_data(path)
    assert len(dataset.samples) == 10
    assert "a.tar is cut short" in dataset.lost[0] or "a.tar is damaged at byte" in dataset.lost[0]
    code, out, _ = command("data", "check", path)
    assert code == 1
    assert "left out:" in out
    assert "no unreadable images" not in out
    found = json.loads(command("data", "check", path, "--json")[1])
    assert found["lost"] == list(dataset.lost)


def test_a_shard_behind_the_end_of_another_is_told(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", pairs(0, 4))
    path.write_bytes(join_two(path.read_bytes()))
    assert "joined with cat" in open_data(path).lost[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([("x.png", png(50)), ("y.png", png(51))], "2 images of .* have no label"),
        ([("3.png", png(50))], "1 images of .* repeat the name of an earlier one"),
        ([("x.png", "/etc/hostname"), ("x.cls", b"a")], "1 images of .* are links"),
        ([("x.png", png(50)), ("x.json", b"[" * 100_000)], "1 images of .* have no label"),
        ([("x.png", png(50)), ("y.cls", b"a")], "1 labels of .* have no image"),
    ],
)
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_what_a_shard_leaves_out_is_counted(tmp_path: Path, more: list[Entry], message: str, kind: bytes) -> None:
    dataset = open_data(write_tar(tmp_path / "a.tar", [*pairs(0, 6), *more], kind))
    assert len(dataset.samples) == 6
    assert any(re.search(message, line) for line in dataset.lost)
    assert set(dataset.lost) <= set(dataset.notes)  # `train` and `evaluate` tell it too


def test_other_images_of_a_sample_need_no_label(tmp_path: Path) -> None:
    dataset = open_data(write_tar(tmp_path / "a.tar", [*pairs(0, 6), ("3.mask.png", png(50))]))
    assert (len(dataset.samples), dataset.lost) == (6, ())


def test_a_header_may_claim_any_size(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.cls", b"a"), *pairs(1, 3), ("0.png", png(0))])
    data = bytearray(path.read_bytes())
    at = header_at(bytes(data), "0.png")
    info = tarfile.TarInfo("0.png")
    info.size = 1 << 45
    data[at : at + 512] = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(bytes(data))
    samples = open_data(path).samples
    claimed = next(i for i in range(len(samples)) if samples.where(i).endswith("/0"))
    with pytest.raises(BadImage, match="truncated"):
        samples.encoded(claimed)


def test_rows_of_parquet_without_a_label_fail_the_check(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [{"image": png(i), "label": None if i == 3 else f"c{i % 2}"} for i in range(12)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    code, out, _ = command("data", "check", tmp_path / "a.parquet")
    assert code == 1
    assert "1 rows have no label and are left out" in out


# --- order of classes --------------------------------------------------------------------------------


def test_numbers_that_tie_have_an_order_of_their_own() -> None:
    """Sets of strings come in another order in every process; nine equal numbers rarely come sorted by chance."""
    written = [f"{'0' * zeros}7" for zeros in range(9)]
    assert encode_labels(written[::-1])[0] == sorted(written)
    assert encode_labels(["10", "9", "-1"])[0] == ["-1", "9", "10"]
    assert encode_labels(["--1", "2"])[0] == ["--1", "2"]  # no number
    assert encode_labels(["9" * 5000, "2"])[0] == ["2", "9" * 5000]


def test_a_number_written_in_two_ways_has_one_name(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("zero\none\n")
    (tmp_path / "list.txt").write_text("a.jpg 1\nb.jpg 01\nc.jpg 0\n")
    with pytest.raises(DataError, match="in two ways"):
        open_data(tmp_path / "list.txt")


# --- the cache ---------------------------------------------------------------------------------------


def shown(path: Path, cache: Path) -> list[int]:
    source = cached(open_data(path).split("all"), PRE, folder=cache)
    return [int(source.pixels_of(i, PRE, 3).sum()) for i in range(len(source))]


@pytest.mark.parametrize("many", [False, True])
def test_a_shard_rewritten_in_place_is_cached_again(tmp_path: Path, many: bool) -> None:
    data = tmp_path / "set"
    data.mkdir()
    write_tar(data / "train-0.tar", pairs(0, 4))
    data = data if many else tmp_path / "set" / "train-0.tar"
    before = shown(data, tmp_path / "cache")
    old = (tmp_path / "set" / "train-0.tar").stat()
    swapped = [
        (f"{i}.png" if kind == "png" else f"{i}.cls", content)
        for i in range(4)
        for kind, content in (("png", png(3 - i)), ("cls", b"ab"[i % 2 : i % 2 + 1]))
    ]
    write_tar(tmp_path / "set" / "train-0.tar", swapped)
    os.utime(tmp_path / "set" / "train-0.tar", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert sorted(shown(data, tmp_path / "cache")) == sorted(before)
    assert shown(data, tmp_path / "cache") != before


def test_parquet_rewritten_in_place_is_cached_again(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "set").mkdir()
    found = []
    for first in (0, 100):
        rows = [{"image": png(first + i), "label": f"c{i % 2}"} for i in range(4)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "set" / "test-0.parquet")
        found.append(shown(tmp_path / "set", tmp_path / "cache"))
    assert found[0] != found[1]


def test_a_page_of_zeros_in_the_cache_is_noticed(tmp_path: Path) -> None:
    data = making.write_folder(tmp_path / "set", {"a": 3, "b": 3})
    shown(data, tmp_path / "cache")
    (pixels,) = (tmp_path / "cache").glob("*/pixels.bin")
    content = pixels.read_bytes()
    pixels.write_bytes(content[:200] + bytes(50) + content[250:])
    with pytest.raises(DataError, match=r"damaged \(other pixels\); remove this folder"):
        shown(data, tmp_path / "cache")


def test_a_cache_cut_short_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    """Mapped into memory it would end the process with SIGBUS."""
    data = making.write_folder(tmp_path / "set", {"a": 3, "b": 3})
    kept = cached(open_data(data).split("all"), Preprocessing((8, 8)), folder=tmp_path / "cache")
    kept.image(0)
    (pixels,) = (tmp_path / "cache").glob("*/pixels.bin")
    os.truncate(pixels, 0)
    with pytest.raises(DataError, match=r"damaged \(it ends too early\); remove this folder"):
        kept.image(0)


@pytest.mark.parametrize("file", ["pixels.bin", "index.npy", "bad.json"])
def test_a_cache_cut_short_is_built_again(tmp_path: Path, file: str) -> None:
    data = making.write_folder(tmp_path / "set", {"a": 3, "b": 3})
    before = shown(data, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob(f"*/{file}")
    kept.write_bytes(kept.read_bytes()[:-1])
    assert shown(data, tmp_path / "cache") == before


# --- things that are no files ------------------------------------------------------------------------


def write_csv(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return path


@pytest.fixture
def limits():
    """Whatever never ends is ended: a minute of CPU, and 12 GB of addresses."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_pipes_and_devices_are_listed_as_unreadable(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], limits: None
) -> None:
    making.write_folder(tmp_path, {"a": 3, "b": 3})
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "b" / "folder.jpg").mkdir()
    (tmp_path / "b" / "zero.jpg").symlink_to("/dev/zero")
    code, out, _ = command("data", "check", tmp_path, "--workers", 0)
    assert code == 1
    assert out.count("not a file") == 2
    rows = [("a/000.jpg", "a"), ("/dev/zero", "b"), (str(tmp_path / "a" / "pipe.jpg"), "b")]
    found = json.loads(command("data", "check", write_csv(tmp_path / "list.csv", rows), "--json")[1])
    assert {Path(b["path"]).name for b in found["bad"]} == {"zero", "pipe.jpg"}


def test_a_shard_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(DataError, match="not a file"):
        open_data(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["a\0b.jpg", "\ud800.jpg", "", "   "])
def test_what_no_file_can_be_called_is_named_by_its_row(tmp_path: Path, name: str) -> None:
    (tmp_path / "list.jsonl").write_text(
        json.dumps({"path": "a.jpg", "label": "a"}) + "\n" + json.dumps({"path": name, "label": "b"})
    )
    with pytest.raises(DataError, match="row 3: the column 'path' must hold a path"):
        open_data(tmp_path / "list.jsonl")
    if "\0" in name:
        (tmp_path / "list.csv").write_bytes(b"path,label\na.jpg,a\n" + name.encode() + b",b\n")
        with pytest.raises(DataError, match=r"row 3|cannot be read"):
            open_data(tmp_path / "list.csv")
        (tmp_path / "list.txt").write_bytes(b"a.jpg a\n" + name.encode() + b" b\n")
        with pytest.raises(DataError, match="line 2"):
            open_data(tmp_path / "list.txt")


# --- paths outside the folder: a local list may name them, a packed set cannot -----------------------


def test_a_local_list_may_name_images_anywhere(tmp_path: Path) -> None:
    making.write_folder(tmp_path / "set", {"a": 2, "b": 2})
    (tmp_path / "lists").mkdir()
    rows = [("../set/a/000.jpg", "a"), (str(tmp_path / "set" / "b" / "000.jpg"), "b")]
    samples = open_data(write_csv(tmp_path / "lists" / "list.csv", rows)).samples
    assert [samples.image(i).size for i in range(2)] == [(64, 48)] * 2


def test_a_packed_set_reads_no_other_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    outside = tmp_path / "secret.png"
    outside.write_bytes(png(0))
    rows = [{"image": {"bytes": png(i) if i else None, "path": str(outside)}, "label": f"c{i % 2}"} for i in range(4)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    samples = open_data(tmp_path / "a.parquet").samples
    with pytest.raises(BadImage, match="empty"):
        samples.image(0)
    links = [(f"{i}.png", str(outside)) for i in range(2)]
    entries = [*pairs(4, 4), *links, ("0.cls", b"a"), ("1.cls", b"b"), ("../../up.png", png(9)), ("../../up.cls", b"a")]
    dataset = open_data(write_tar(tmp_path / "a.tar", entries))
    assert len(dataset.samples) == 5  # ../../up is a name and nothing else: it is read in place
    assert any("links" in line for line in dataset.lost)


# --- no traceback for damaged files ------------------------------------------------------------------


def make_npz(path: Path) -> Path:
    np.savez_compressed(
        path / "a.npz", images=BYTES.astype(np.uint8), labels=np.arange(20) % 2, classes=np.array(["a", "b"])
    )
    return path / "a.npz"


def make_jsonl(path: Path) -> Path:
    lines = [json.dumps({"path": f"{i}.png", "label": ["a", "b"][i % 2], "split": "train"}) for i in range(6)]
    (path / "a.jsonl").write_text("\n".join(lines))
    return path / "a.jsonl"


def make_csv(path: Path) -> Path:
    return write_csv(path / "a.csv", [(f"{i}.png", "ab"[i % 2]) for i in range(6)])


def make_parquet(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    about = {"info": {"features": {"label": {"names": ["a", "b"]}}}}
    table = pa.Table.from_pylist([{"image": png(i), "label": i % 2} for i in range(6)])
    table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pyarrow.parquet.write_table(table, path / "a.parquet", compression="none")
    return path / "a.parquet"


def make_tar(path: Path) -> Path:
    return write_tar(path / "a.tar", pairs(0, 6))


def spoiled(data: bytes, seed: int) -> bytes:
    """Cut, overwritten, repeated or with flipped bits, always the same for one seed."""
    rng = random.Random(seed)
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(out) + 1), rng.randint(1, 40)
        how = rng.randrange(4)
        if how == 0:
            out = out[:at] or bytearray(b"\0")
        elif how == 1:
            out[at : at + length] = rng.randbytes(length)
        elif how == 2:
            out[at:at] = out[at : at + length]
        elif at < len(out):
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


@pytest.mark.parametrize("make", [make_npz, make_jsonl, make_csv, make_parquet, make_tar])
def test_damaged_sets_are_errors_in_words(tmp_path: Path, make: Callable[[Path], Path], limits: None) -> None:
    path = make(tmp_path)
    whole, refused = path.read_bytes(), 0
    for seed in range(150):
        path.write_bytes(spoiled(whole, seed))
        try:
            samples = open_data(path).samples
            for i in range(min(2, len(samples))):
                samples.image(i)
        except VitkitError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'[1, 2]\n"text"\n'),
        ("a.jsonl", b'{"path": "a.jpg", "label": "a"}\n{"label": "b"}\n'),
        ("a.jsonl", b"[" * 100_000),
        ("a.jsonl", b'{"path": "a.jpg", "labels": "[1, 2"}\n'),
        ("a.jsonl", b"\xff\xfe{}"),
        ("a.csv", b"path,label\n" + b"x" * 200_000 + b",a\n"),
        ("a.csv", b"path,label\na.jpg\n"),
        ("a.csv", b"path,label\n\xff\xfe,a\n"),
        ("a.csv", b"path,labels\na.jpg,[1\n"),
        ("a.parquet", b"PAR1" + bytes(100) + b"PAR1"),
        ("a.npz", b"PK\x03\x04" + bytes(100)),
        ("a.npz", b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }"),
        ("a.npz", b""),
        ("a.tar", b""),
    ],
)
def test_odd_files_are_errors_in_words(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError):
        open_data(tmp_path / name)


def test_odd_class_names_of_hugging_face_are_errors_in_words(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    def write(about: bytes) -> Path:
        table = pa.Table.from_pylist([{"image": png(i), "label": f"c{i % 2}"} for i in range(6)])
        pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": about}), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    for about in (b"{", b"[1]", b'{"info": 3}', b"[" * 100_000):
        assert open_data(write(about)).classes == ("c0", "c1")
    with pytest.raises(DataError, match="whole numbers"):
        open_data(write(b'{"info": {"features": {"label": {"names": ["a"]}}}}'))


def test_the_page_on_security_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "security.md").read_text()))
    written = {
        n for path in (root / "tests").rglob("test_*.py") for n in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named
    assert named <= written, sorted(named - written)
