"""Hostile and damaged files for every parser that meets a stranger's bytes, as Hypothesis strategies.

A case is a dictionary of relative paths and contents. Each strategy starts from files that are sound (`seeds`, made
here) and changes their structure (a field of a header, a record of a tar, a cell of a table) or their bytes.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import io
import json
import re
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

import vitkit
from vitkit.checkpoints import writing
from vitkit.checkpoints.family import Checkpoint
from vitkit.model.base import Outputs
from vitkit.training.config import TrainConfig

Case = dict[str, bytes]
SMALL = {"depth": 1, "width": 16, "heads": 2, "mlp_width": 16, "classes": 3, "image_size": 8, "patch_size": 4}

NUMBERS = st.sampled_from([0, -1, 1, 2, 7, 255, 2**31, 2**32 + 1, 2**63, 2**64, 10**30, 10**400, 0.5, -1e308, 1e999])
WORDS = st.sampled_from(
    ["", " ", "nan", "1e999", "../../x", "/dev/zero", "a\0b", "\ud800", "é" * 300, "=cmd()", "[", "0"]
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats() | WORDS | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=5
)


# --- plain damage --------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """Cut, changed, repeated or overwritten with numbers that stand for lengths."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["cut", "set", "number", "repeat", "drop", "insert"]))
        if how == "cut":
            del data[at:]
        elif how == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif how == "number":
            form = draw(st.sampled_from(["<I", ">I", "<Q", ">Q", "<H"]))
            value = draw(st.sampled_from([0, 1, 0x7FFF, 0xFFFF]))
            data[at : at + struct.calcsize(form)] = struct.pack(form, value) if form[1] == "H" else b"\xff" * 4
        elif how == "repeat":
            data[at:at] = data[at : at + 64] * draw(st.integers(1, 4))
        elif how == "drop":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = draw(st.binary(max_size=12))
    return bytes(data)


# --- JSON ----------------------------------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


@st.composite
def changed(draw: st.DrawFn, seed: Any) -> Any:
    """JSON with one to three of its parts replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(seed)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(root))
        holder, key = places[draw(st.integers(0, len(places) - 1))] if places else (root, 0)
        how = draw(st.sampled_from(["value", "value", "number", "remove", "rename", "many"]))
        if how == "remove" and holder is not root:
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = holder.pop(key)
        elif how == "many":
            holder[key] = [holder[key]] * 300
        else:
            holder[key] = draw(NUMBERS if how == "number" else VALUES)
    return root[0]


def text(value: Any) -> bytes:
    return json.dumps(value).encode(errors="surrogatepass")


@st.composite
def json_file(draw: st.DrawFn, seed: bytes) -> bytes:
    deep = b"[" * 20_000 + b"]" * 20_000
    whole = changed(json.loads(seed)).map(text)
    return draw(st.one_of(whole, whole, whole, damaged(seed), st.just(deep), VALUES.map(text)))


# --- seeds ---------------------------------------------------------------------------------------------------------


@lru_cache
def tensors() -> Checkpoint:
    torch.manual_seed(0)
    model = vitkit.create("vit-ti/16", **SMALL)
    return Checkpoint(model.config, dict(model.state_dict()), Outputs(names=("a", "b", "c")))


@lru_cache
def seeds() -> dict[str, Case]:
    """A sound checkpoint of each kind."""
    found: dict[str, Case] = {}
    names = {"native": "x.safetensors", "timm": "x.safetensors", "google": "x.npz", "big_vision": "x.npz"}
    names |= {"torchvision": "x.pth", "huggingface": "x"}
    with tempfile.TemporaryDirectory() as folder:
        for to, name in names.items():
            path = Path(folder, to, name)
            writing.write(tensors(), path, to)
            files = [p for p in path.parent.rglob("*") if p.is_file()]
            found[to] = {str(p.relative_to(path.parent)): p.read_bytes() for p in files}
    return found


@lru_cache
def image(kind: str = "PNG", size: int = 8) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)).save(out, kind)
    return out.getvalue()


# --- checkpoints ---------------------------------------------------------------------------------------------------


def split_safetensors(raw: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join_safetensors(header: Any, body: bytes) -> bytes:
    made = text(header)
    return struct.pack("<Q", len(made)) + made + body


@st.composite
def safetensors(draw: st.DrawFn) -> Case:
    """The header changed, also inside the configuration that a native file keeps in it; or the names."""
    header, body = split_safetensors(seeds()[draw(st.sampled_from(["native", "timm"]))]["x.safetensors"])
    inner = [k for k, v in header["__metadata__"].items() if v.startswith(("{", "["))]
    how = draw(st.sampled_from(["header", "inner", "names", "bytes"]))
    if how == "inner" and inner:
        key = draw(st.sampled_from(inner))
        header["__metadata__"][key] = draw(json_file(header["__metadata__"][key].encode())).decode(errors="replace")
    elif how == "names":
        header = draw(renamed(header))
    elif how == "bytes":
        return {"x.safetensors": draw(damaged(join_safetensors(header, body)))}
    else:
        header = draw(changed(header))
    return {"x.safetensors": join_safetensors(header, body)}


@st.composite
def renamed(draw: st.DrawFn, table: dict[str, Any]) -> dict[str, Any]:
    """One name of a table of tensors with another number or letter in it."""
    name = draw(st.sampled_from([k for k in table if k != "__metadata__"]))
    number = str(draw(st.sampled_from([0, 1, 7, 99, 10**6, 10**9, 10**18, "-1", "٣", "01"])))
    other = re.sub(r"\d+", number, name, count=1) if re.search(r"\d", name) else draw(st.text(max_size=9)) + name
    return {other if k == name else k: v for k, v in table.items()}


def npy(shape: str, descr: str, body: bytes) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode(errors="replace") + body


SHAPES = ["(2,)", "()", "(0,)", "(-1, 4)", "(4294967296, 4294967296)", "(1e3,)", "'x'", "(True,)", "(1,)*9", "((1,),)"]
DESCRS = [
    "'<f4'",
    "'|O'",
    "'<U9'",
    "'<M8[s]'",
    "'|V0'",
    "'<f16'",
    "[('a', '<f4')]",
    "'nonsense'",
    "None",
    "'<c16'",
    "'?'",
]


@st.composite
def npz(draw: st.DrawFn, seed: bytes, name: str = "x.npz") -> Case:
    import zipfile

    if draw(st.integers(0, 2)) == 0:
        return {name: draw(damaged(seed))}
    parts: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(seed)) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    key = draw(st.sampled_from(sorted(parts)))
    made = npy(draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DESCRS)), draw(st.binary(max_size=64)))
    parts[key] = draw(st.sampled_from([made, b"", b"\x93NUMPY\x09\x00", parts[key][:-4]]))
    parts = draw(st.one_of(st.just(parts), renamed(parts)))
    out, packing = io.BytesIO(), draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]))
    with zipfile.ZipFile(out, "w", packing) as archive:
        for part, content in parts.items():
            archive.writestr(part, content)
    return {name: out.getvalue()}


def checkpoint_npz() -> st.SearchStrategy[Case]:
    return st.sampled_from(["google", "big_vision"]).flatmap(lambda kind: npz(seeds()[kind]["x.npz"]))


@st.composite
def pth(draw: st.DrawFn) -> Case:
    """A state dict inside something odd, in PyTorch's zip or its old format; or damaged bytes of either."""
    names = {k: v.clone() for k, v in torch.load(io.BytesIO(seeds()["torchvision"]["x.pth"])).items()}
    name = draw(st.sampled_from(sorted(names)))
    odd = [torch.zeros(()), torch.zeros(0, 5), torch.zeros(2, 2).to_sparse(), torch.zeros(1, dtype=torch.complex64)]
    odd += [
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(1).expand(10**9),
        torch.full((2,), float("nan")),
        None,
        "x",
        3,
    ]
    how = draw(st.sampled_from(["odd", "name", "nest", "key", "as is"]))
    state: Any = names
    if how == "odd":
        state = {**names, name: draw(st.sampled_from(odd))}
    elif how == "name":
        state = draw(renamed(names))
    elif how == "nest":
        state = {draw(st.sampled_from(["model", "state_dict", "ema", "module", "x"])): {0: state, "epoch": 3}}
    elif how == "key":
        state = {**names, draw(st.sampled_from([1, None, b"x", (1, 2), 2.5])): torch.zeros(1)}
    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=draw(st.booleans()))
    raw = out.getvalue()
    return {"x.pth": draw(damaged(raw)) if how == "as is" else raw}


@st.composite
def huggingface(draw: st.DrawFn) -> Case:
    """config.json, preprocessor_config.json or an index of several files changed."""
    files = dict(seeds()["huggingface"])
    index = {"metadata": {"total_size": 9}, "weight_map": {"vit.x": "model.safetensors", "y": "../up.safetensors"}}
    if draw(st.booleans()):
        files["x/model.safetensors.index.json"] = text(index)
        files.pop("x/model.safetensors") if draw(st.booleans()) else None
    name = draw(st.sampled_from(sorted(n for n in files if n.endswith(".json"))))
    files[name] = draw(json_file(files[name]))
    return files


# --- data sets -----------------------------------------------------------------------------------------------------

PATHS = st.sampled_from(
    ["a.png", "b.png", "a.png", "b.png", "../a.png", "/dev/zero", "a\0.png", "", "fifo.png", "x" * 300, "."]
)
CELLS = st.sampled_from(
    ["cat", "dog", "0", "1", "01", "-1", "1.5", "", "cat|dog", '["a"', "[[1]]", "nan", "1e999", "٣", "\x1b[2J"]
)


def with_images(name: str, content: bytes) -> Case:
    return {name: content, "a.png": image(), "b.png": image(size=9)}


@st.composite
def table(draw: st.DrawFn) -> Case:
    """Comma- or tab-separated: any columns, rows of any length, quotes left open, any encoding."""
    columns = draw(
        st.lists(st.sampled_from(["path", "label", "labels", "split", "target", "value", "", "path "]), max_size=4)
    )
    cells = st.one_of(PATHS, CELLS, st.text(max_size=5))
    rows = draw(st.lists(st.lists(cells, min_size=1, max_size=5), max_size=5))
    rows += [[draw(PATHS), draw(CELLS)] for _ in range(draw(st.integers(0, 4)))]
    out = io.StringIO()
    kind = draw(st.sampled_from(["csv", "tsv"]))
    writer = csv.writer(out, delimiter="\t" if kind == "tsv" else ",")
    writer.writerows([columns or ["path", "label"], *rows])
    made = out.getvalue().encode(draw(st.sampled_from(["utf-8", "utf-16", "utf-8"])), errors="replace")
    tail = draw(st.sampled_from([b"", b"", b'"open', b"\0", b"\xff\xfe", b"x," * 70_000, b'"' + b"y" * 140_000 + b'"']))
    return with_images(f"x.{kind}", made + tail)


@st.composite
def jsonl(draw: st.DrawFn) -> Case:
    row = {"path": "a.png", "label": "cat", "split": "train"}
    lines = [text(row), text({**row, "path": "b.png", "label": "dog"})]
    for _ in range(draw(st.integers(1, 3))):
        lines.append(draw(st.one_of(changed(row).map(text), VALUES.map(text), st.binary(max_size=8))))
    first = [lines.pop()] if draw(st.booleans()) else []
    return with_images("x.jsonl", b"\n".join([*first, *lines]))


@st.composite
def pairs(draw: st.DrawFn) -> Case:
    """Lines of "path label"."""
    line = st.builds(lambda p, s, c: f"{p}{s}{c}", PATHS, st.sampled_from([" ", "\t", ",", "  ", ""]), CELLS)
    lines = draw(st.lists(st.one_of(line, line, st.text(max_size=9)), max_size=6))
    made = "\n".join(["a.png cat", "b.png dog", *lines]).encode(errors="replace")
    case = with_images("x.txt", draw(st.one_of(st.just(made), damaged(made))))
    if draw(st.booleans()):
        case["classes.txt"] = draw(st.one_of(st.just(b"one\ntwo"), st.binary(max_size=9)))
    return case


@st.composite
def arrays(draw: st.DrawFn) -> Case:
    """Images and labels of any number of axes, dtype and name, or damaged ones."""
    out = io.BytesIO()
    shape = draw(
        st.sampled_from(
            [(4, 8, 8), (4, 8, 8, 3), (4, 3, 8, 8), (4,), (), (0, 8, 8), (4, 8), (3, 8, 8), (4, 1, 1, 1, 1)]
        )
    )
    dtype = draw(st.sampled_from(["u1", "i2", "f4", "f8", "?", "c8", "U3", "M8[s]", "f2", "i8"]))
    labels = draw(
        st.sampled_from(
            [[0, 1, 0, 1], [0, 1], [[0], [1], [0], [1]], [-1, 0, 0, 0], [9**9] * 4, ["a"] * 4, 0, [0.5] * 4, []]
        )
    )
    made = {draw(st.sampled_from(["images", "x", "x_train", "train_images", "foo"])): np.zeros(shape, dtype)}
    made[draw(st.sampled_from(["labels", "y", "y_train", "train_labels", "bar"]))] = np.array(labels)
    if draw(st.booleans()):
        made["classes"] = np.array(draw(st.sampled_from([["a"], ["a", "b"], [], 3, [["a"]], [b"\xff"]])))
    np.savez(out, **made)
    return draw(st.one_of(st.just({"x.npz": out.getvalue()}), npz(out.getvalue())))


@st.composite
def shard(draw: st.DrawFn) -> Case:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i in range(draw(st.integers(0, 4))):
            key = draw(st.sampled_from([f"{i}", "same", "../up", "d/é", "x" * 200, "\udcff"]))
            label = draw(
                st.one_of(CELLS.map(lambda c: c.encode(errors="replace")), VALUES.map(text), st.binary(max_size=5))
            )
            suffix = draw(st.sampled_from(["cls", "json", "txt", "xyz"]))
            for name, content in ((f"{key}.png", image()), (f"{key}.{suffix}", label)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                info.type = draw(
                    st.sampled_from([tarfile.REGTYPE] * 8 + [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
                )
                info.linkname = "/etc/passwd" if info.type == tarfile.SYMTYPE else ""
                tar.addfile(info, io.BytesIO(content) if info.type == tarfile.REGTYPE else None)
    return {"x.tar": draw(st.one_of(st.just(out.getvalue()), damaged(out.getvalue())))}


@st.composite
def parquet(draw: st.DrawFn) -> Case:
    import pyarrow as pa
    from pyarrow import parquet as pq

    count = draw(st.integers(0, 4))
    images = [
        [image()],
        [None],
        [b""],
        [{"bytes": image(), "path": None}],
        [{"path": "a.png"}],
        ["a.png"],
        [3],
        [[1]],
    ]
    labels = [[0, 1], ["a", "b"], [None, 1], [[0, 1], []], [1.5, 2.5], [{"a": 1}], [b"x"], [2**62], [[None], [[]]]]
    columns: dict[str, Any] = {}
    for name, pool in (("image", images), (draw(st.sampled_from(["label", "labels", "x"])), labels)):
        cells = draw(st.sampled_from(pool))
        columns[draw(st.sampled_from([name, name, name, "path"]))] = [cells[i % len(cells)] for i in range(count)]
    made = pa.table(columns)
    feature = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    note = draw(st.one_of(st.none(), json_file(text(feature))))
    out = io.BytesIO()
    pq.write_table(made if note is None else made.replace_schema_metadata({"huggingface": note}), out)
    return with_images("x.parquet", draw(st.one_of(st.just(out.getvalue()), damaged(out.getvalue()))))


@st.composite
def picture(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]))
    return {"set/a/1.png": draw(damaged(image(kind, 16))), "set/b/2.png": image()}


# --- what runs and tuning leave ------------------------------------------------------------------------------------


@lru_cache
def run_seed() -> Case:
    """A run of two steps."""
    with tempfile.TemporaryDirectory() as folder:
        labels = np.arange(32) % 2
        np.savez(
            f"{folder}/set.npz",
            images=np.zeros((32, 8, 8, 1), np.uint8) + 100 * labels[:, None, None, None].astype(np.uint8),
            labels=labels,
        )
        vitkit.save(
            vitkit.create("vit-8px/2", **{**SMALL, "patch_size": 2, "channels": 1, "classes": 2}),
            f"{folder}/m.safetensors",
        )
        vitkit.train(f"{folder}/set.npz", init=f"{folder}/m.safetensors", out=f"{folder}/run", steps=2, batch_size=8)
        files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        config = json.loads(files["run/config.json"])
        config["train"]["data"] = "set.npz"
        config["train"]["init"] = "m.safetensors"
        return {**files, "run/config.json": text(config)}


@st.composite
def run_directory(draw: st.DrawFn) -> Case:
    files = dict(run_seed())
    name = draw(
        st.sampled_from(sorted(n for n in files if n.startswith("run/") and not n.endswith((".png", ".vitkit"))))
    )
    strategy = json_file(files[name]) if name.endswith(".json") else damaged(files[name])
    if name.endswith(".jsonl"):
        strategy = st.lists(
            st.one_of(changed({"step": 1, "loss": 2.0, "val_top1": 0.5}).map(text), VALUES.map(text))
        ).map(b"\n".join)
    files[name] = draw(strategy)
    return files


@lru_cache
def tuned_seed() -> Case:
    from vitkit.runtime.tune import tune
    from vitkit.runtime.tuned import store
    from vitkit.runtime.verify import images_of

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        writing.write(tensors(), path, "native")
        model = vitkit.load(path)
        store(path, model, tune(model, images_of(model, None, 8), 0.5, kinds=["onnx"], seconds=0.0), None)
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


@st.composite
def tuned(draw: st.DrawFn) -> Case:
    files = dict(tuned_seed())
    name = draw(st.sampled_from(sorted(n for n in files if ".tuned/" in n)))
    files[name] = draw(json_file(files[name]) if name.endswith(".json") else damaged(files[name]))
    return files


@st.composite
def exported(draw: st.DrawFn) -> Case:
    return {"x.onnx": draw(damaged(next(v for k, v in tuned_seed().items() if k.endswith(".onnx"))))}


# --- what curation and configurations read ---------------------------------------------------------------------------


@lru_cache
def index_seed() -> Case:
    """A set of six images and its index."""
    from vitkit.curation import build_index

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number in range(6):
            path = Path("set", "ab"[number % 2], f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image("PNG", 8 + number))
        build_index("set", out="i").looks()
        return {str(p): p.read_bytes() for p in Path().rglob("*") if p.is_file()}


@st.composite
def index_folder(draw: st.DrawFn) -> Case:
    """A stranger can write digests that fit what was changed."""
    files = dict(index_seed())
    name = draw(st.sampled_from(sorted(n for n in files if n.startswith("i/"))))
    if name.endswith(".jsonl"):
        rows = [json.loads(line) for line in files[name].splitlines()]
        files[name] = b"\n".join(text(row) for row in draw(changed(rows).filter(lambda v: isinstance(v, list))))
    else:
        files[name] = draw(json_file(files[name]) if name.endswith(".json") else damaged(files[name]))
    if name != "i/about.json" and draw(st.integers(0, 3)):
        about = json.loads(files["i/about.json"])
        for key in about["files"]:
            content = files[f"i/{key}"]
            about["files"][key] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files["i/about.json"] = text(about)
    return files


@st.composite
def issues(draw: st.DrawFn) -> Case:
    """issues.csv as a person or a stranger may have left it, beside the clean.json that says whose they are."""
    files = {name: content for name, content in index_seed().items() if name.startswith("set/")}
    kinds = st.sampled_from(["label", "leak", "junk", "outlier", "exact-duplicate", "drift", "x", ""])
    paths = st.sampled_from([*files, *files, "../x.png", "/dev/zero", "'=cmd", "fifo.png"])
    cells = st.one_of(paths, kinds, WORDS, st.sampled_from(["drop", "a", "b", "accept", "reject"]), st.text(max_size=5))
    rows = [["path", "issue", "split", "label", "suggestion", "score", "group"]]
    if draw(st.booleans()):
        rows[0].append("action")
    if draw(st.integers(0, 4)) == 0:
        rows[0] = draw(st.lists(cells, max_size=9))
    for _ in range(draw(st.integers(0, 4))):
        sound = [draw(paths), draw(kinds), "", "a", draw(st.sampled_from(["drop", "a", "b", ""])), "1", "", "accept"]
        rows.append(draw(st.lists(cells, max_size=9)) if draw(st.integers(0, 3)) == 0 else sound)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    content = out.getvalue().encode(errors="surrogatepass")
    about = text({"data": "set", "index": "i", "images": 6, "classes_from": "auto"})
    files["cl/issues.csv"] = draw(st.one_of(st.just(content), st.just(content), damaged(content)))
    files["cl/clean.json"] = draw(st.one_of(st.just(about), st.just(about), json_file(about)))
    return files


SETTINGS = {"data": "digits", "steps": 3, "lr": 1e-3, "augment": {"flip": True}, "budget": "5m", "image_size": [8, 8]}


@st.composite
def config_file(draw: st.DrawFn) -> Case:
    if draw(st.booleans()):
        whole = {"train": SETTINGS, "model": {}} if draw(st.booleans()) else SETTINGS
        return {"x.json": draw(json_file(text(whole)))}
    sound = 'data = "digits"\nsteps = 3\nlr = 1e-3\nbudget = "5m"\nimage_size = [8, 8]\n[augment]\nflip = true\n'
    odd = st.sampled_from(["1979-05-27", "07:32:00", "nan", "-inf", "0x7f", "{a = 1}", "[" * 3000, "9" * 5000, '"""'])
    keys = st.sampled_from([*TrainConfig.__dataclass_fields__, "train", "x"])
    values = odd | SCALARS.map(json.dumps)
    lines = draw(st.lists(st.tuples(keys, values), max_size=3))
    made = "".join(f"{key} = {value}\n" for key, value in lines).encode(errors="surrogatepass")
    return {"x.toml": draw(st.one_of(st.just(made), st.just(made), damaged(sound.encode())))}


@st.composite
def sweep_folder(draw: st.DrawFn) -> Case:
    """Two runs of a sweep, one finished and one stopped."""
    files = {name.replace("run/", "sw/001/", 1): c for name, c in run_seed().items() if name.endswith((".json", "l"))}
    files |= {name.replace("/001/", "/002/"): content for name, content in files.items() if "result" not in name}
    files["sw/sweep.json"] = text({"searched": ["lr=1e-3,2e-3"], "draws": 0, "base": {}})
    files["sw/002/stopped.json"] = text({"reason": "x", "score": 0.5})
    name = draw(st.sampled_from(sorted(n for n in files if n.startswith("sw/"))))
    files[name] = draw(json_file(files[name]) if name.endswith(".json") else damaged(files[name]))
    return files


# --- HTTP ----------------------------------------------------------------------------------------------------------


@st.composite
def request(draw: st.DrawFn) -> Case:
    """A method, a path with its query, headers and a body, as the lines of `request`."""
    paths = [
        "/api/predict",
        "/api/explain",
        "/api/models",
        "/v2/models/small/infer",
        "/v2/models/small",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/",
        "/static/app.js",
    ]
    path = draw(st.sampled_from([*paths, "/api/../x", "/static/..%2f..%2fx", "/%00", "/api/predict/x"]))
    keys = st.sampled_from(["model", "method", "class", "query", "top", "layer", "head", "format", "x"])
    query = draw(st.lists(st.tuples(keys, st.one_of(WORDS, NUMBERS.map(str), st.text(max_size=5))), max_size=3))
    kinds = [
        "image/png",
        "application/json",
        "multipart/form-data; boundary=X",
        "multipart/form-data",
        "text/plain",
        "",
        "x/y; charset=é",
    ]
    files = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + image() + b"\r\n--X--\r\n"
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 4 + len(image())}}
    head = text({"inputs": [tensor]})
    tensors = head + len(image()).to_bytes(4, "little") + image()  # of the Open Inference Protocol
    bodies = st.one_of(
        st.just(tensors),
        damaged(tensors),
        damaged(image("PNG", 16)),
        st.just(image()),
        damaged(files),
        VALUES.map(text),
        st.binary(max_size=20),
    )
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS"]))
    about = {"method": method, "path": path, "query": query, "type": draw(st.sampled_from(kinds))}
    about["length"] = draw(st.sampled_from(["", str(len(head)), str(len(head)), "0", "-1", "9" * 12, "x"]))
    return {"request": text(about), "body": draw(bodies)}


@st.composite
def shard_index(draw: st.DrawFn) -> Case:
    """An index whose checksums are right and whose content may be anything, beside the shard it speaks of."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        for i in range(3):
            for name, content in ((f"{i}.png", image()), (f"{i}.cls", b"ab"[i % 2 : i % 2 + 1])):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
    numbers = st.sampled_from([0, 1, 2, 3, 512, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
    columns = [np.array([draw(numbers) for _ in range(3)], np.uint64) for _ in range(5)]
    if draw(st.booleans()):
        columns[-1] = np.array([1, 2, 3], np.uint64)
    codes = np.array([draw(st.sampled_from([0, 1, -1, 2, -2, 1 << 30])) for _ in range(3)], np.int32)
    parts = [*(c.tobytes() for c in (*columns[:2], codes, *columns[3:])), b"012"]
    row = {"name": "x.tar", "stamp": [0, 0, 0], "count": 3, "key_bytes": 3, "sums": [zlib.crc32(p) for p in parts]}
    row |= {"damage": "", "left_out": [0, 0, 0, 0]}
    head = {
        "shards": [row],
        "labels": draw(st.sampled_from([["a", "b"], [["a"], []], [{"x": 0.5}, {"y": 1.0}], ["a"]])),
    }
    if draw(st.booleans()):
        place = draw(st.sampled_from([row, head]))
        place[draw(st.sampled_from([*place]))] = draw(VALUES)
    written = text(head)
    start = b"vitkit shards 1\n" + struct.pack("<QII", len(written), zlib.crc32(written), 0)
    whole = b"".join([start, written, *parts])
    return {"x.tar": tar.getvalue(), "shards.index": draw(st.one_of(st.just(whole), damaged(whole)))}


GENERATORS: dict[str, st.SearchStrategy[Case]] = {
    "checkpoint safetensors": safetensors(),
    "checkpoint npz": st.deferred(checkpoint_npz),
    "checkpoint pth": pth(),
    "checkpoint huggingface": huggingface(),
    "data table": table(),
    "data jsonl": jsonl(),
    "data pairs": pairs(),
    "data arrays": arrays(),
    "data shard": shard(),
    "shards with an index": shard_index(),
    "data parquet": parquet(),
    "data images": picture(),
    "run": run_directory(),
    "tuned": tuned(),
    "exported": exported(),
    "index": index_folder(),
    "issues": issues(),
    "config": config_file(),
    "sweep": sweep_folder(),
    "http": request(),
}
