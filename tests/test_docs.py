"""The README and the docs cannot drift: their code blocks run, their commands exist, the pages are in step.

A ```python block is run; the blocks of one page share their names. In a ```console block each line after
`$ ` is a command: `vitkit ...` is run in this process, `make ...` must be a target, `pip install` must name
an extra we have. Everything runs in an empty folder that holds the images and checkpoints of `stage`.
A block that must not run (a GPU, a download, minutes of work) is marked ```console no-run; its commands
and options must still exist.
"""

import pkgutil
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/zh/*.md"))]
RESULTS = [*sorted(ROOT.glob("docs/studies/*.md")), *sorted(ROOT.glob("docs/zh/studies/*.md"))]  # made from tables
CHINESE = {ROOT / "README.zh-CN.md": ROOT / "README.md"}  # page -> the English one whose code it has
CHINESE |= {page: ROOT / "docs" / page.name for page in sorted(ROOT.glob("docs/zh/*.md"))}
LONG = ("tutorial-", "cookbook", "from-")  # pages that train several times


def to_run() -> list:
    pages = [page for page in PAGES if page not in CHINESE]
    return [pytest.param(p, marks=pytest.mark.slow) if p.name.startswith(LONG) else p for p in pages]


ELSEWHERE = (
    "conda",
    "docker",
    "export",
    "kubectl",
    "pipx",
    "ray",
    "sbatch",
    "sky",
    "trtexec",
)  # named in the docs, never run
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(kind, flags.strip(), code) for kind, flags, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


def stage(folder: Path) -> None:
    """What the pages assume: an image, a folder of images by class, a trained model."""
    import numpy as np
    import torch
    from PIL import Image

    import vitkit
    from peers import randomize

    random = np.random.default_rng(0)
    for split in ("cats", "dogs"):
        (folder / "photos" / split).mkdir(parents=True)
        for i in range(6):
            pixels = random.integers(0, 255, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / split / f"{i}.jpg")
    Image.fromarray(random.integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(folder / "photo.jpg")
    torch.manual_seed(0)
    model = randomize(vitkit.create("mu", classes=2))
    vitkit.save(model, folder / "model.safetensors", class_names=("cats", "dogs"))


def bring_peers() -> None:
    """Pages about moving here import other libraries, and torchvision cannot be imported beside every torch."""
    import peers

    peers.import_torchvision()


def vitkit_command(words: list[str], run: bool) -> None:
    from typer.main import get_command

    from vitkit.cli.main import app

    command = get_command(app)
    if not run:  # the command and each of its options must exist
        depth = 0
        while hasattr(command, "commands"):
            assert words[depth] in command.commands, f"vitkit has no command {words[depth]!r}"
            command, depth = command.commands[words[depth]], depth + 1
        known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        options = {w.split("=")[0] for w in words[depth:] if w.startswith("--")}
        assert options <= known, f"vitkit {' '.join(words[:depth])} has no option {options - known}"
        if words[0] in ("train", "sweep"):  # and each setting
            check_settings([value for word, value in pairwise(words) if word == "--set"])
        return
    code = command(words, standalone_mode=False)
    assert not code, f"vitkit {' '.join(words)} ended with code {code}"


def check_settings(settings: list[str]) -> None:
    from vitkit.training.config import TrainConfig, assign

    assign(TrainConfig(), [setting.split(",")[0] for setting in settings])  # of several values the first


def check_command(line: str, run: bool) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "vitkit":
        vitkit_command(words[1:], run)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets, f"make has no target {words[1]!r}"
    elif words[:2] == ["pip", "install"]:
        extras = re.search(r"vitkit\[([\w,]+)\]", line)
        known = (ROOT / "pyproject.toml").read_text()
        for extra in extras.group(1).split(",") if extras else ():
            assert re.search(rf"^{extra} = ", known, re.M), f"no extra {extra!r}"
    else:
        assert words[0] in ("git", "cd", "python", "ls") or (words[0] in ELSEWHERE and not run), (
            f"unknown command in the docs: {line}"
        )


@pytest.mark.parametrize("page", to_run(), ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [b for b in blocks(page) if b[0] in ("python", "console")]
    if not found:
        return
    stage(tmp_path)
    bring_peers()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["vitkit"])
    names: dict = {"__name__": "__docs__"}
    for kind, flags, code in found:
        run = "no-run" not in flags
        if kind == "python":
            if run:
                exec(compile(code, page.name, "exec"), names)
            continue
        joined = re.sub(r"\\\n\s*", "", code)
        for line in re.findall(r"^\$ (.*)$", joined, re.M):
            check_command(line, run)


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_site_keeps_links_from_chinese_pages_to_what_is_above_them() -> None:
    """Figures and tables of the studies too; what is not on the site becomes words."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import conf
    finally:
        sys.path.remove(str(ROOT / "docs"))
    text = (ROOT / "docs" / "zh" / "gallery.md").read_text(encoding="utf-8")
    assert "](../studies/attention-bug.png)](studies/attention-bug.md)" in text
    assert conf.without_links_outside(text, "zh/gallery") == text
    assert conf.without_links_outside("see [the table](../CHANGELOG.md#x).", "train") == "see the table."


# --- coming from another library: left column theirs, right column ours --------------------------------

TABLE = re.compile(r"^\| ([^|\n]+) \| vitkit \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M)
ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.M)
INSTALLED = ("timm", "transformers", "torchvision", "vit-pytorch")  # a left column of theirs is run, another is not


def run_cell(cell: str, names: dict) -> bool:
    """A cell that is one piece of code is run, or checked if it is a command; other cells are words."""
    code = cell.strip("`") if re.fullmatch(r"`[^`]+`", cell) else ""
    if code.startswith(("vitkit ", "torchrun ")):
        check_command(code, run=False)
    elif code:
        exec(compile(code, code, "exec"), names)
    return bool(code)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/from-*.md")), ids=lambda p: p.stem)
def test_both_columns_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    bring_peers()
    monkeypatch.chdir(tmp_path)
    left, right = ({"torch": torch, "images": torch.randn(2, 3, 96, 96)} for _ in range(2))
    run = 0
    for library, rows in TABLE.findall(page.read_text(encoding="utf-8")):
        for theirs, ours in ROW.findall(rows):
            run += run_cell(theirs, left) if library in INSTALLED else 0
            run += run_cell(ours, right)
    assert run > 5


# --- the pages in Chinese ------------------------------------------------------------------------------


def prose(page: Path) -> str:
    return re.sub(BLOCK, "", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", CHINESE, ids=lambda p: str(p.relative_to(ROOT)))
def test_chinese_pages_are_in_step(page: Path) -> None:
    """Same headings in number, same code but for the comments."""
    english = CHINESE[page]

    def code(page: Path) -> list[tuple[str, str, str]]:
        found = [block for block in blocks(page) if block[0] in ("python", "console")]
        return [(kind, flags, re.sub(r" +#.*", "", text)) for kind, flags, text in found]

    assert code(english) == code(page)
    headings = [re.findall(r"^(#+) ", prose(p), re.M) for p in (english, page)]
    assert headings[0] == headings[1]


@pytest.mark.parametrize("page", CHINESE, ids=lambda p: str(p.relative_to(ROOT)))
def test_chinese_pages_are_chinese(page: Path) -> None:
    """Comments in their code are Chinese, and no line ends inside a sentence: that would become a stray space."""
    for _, _, code in blocks(page):
        for comment in re.findall(r" +# (.*)", code):
            assert re.search(r"[\u4e00-\u9fff]", comment), f"{comment!r} is not Chinese"
    broken = re.findall(r"^(?![|#!<\-\[*]).*[^。：）)\s]\n(?=[^\n|#<*\-])", prose(page), re.M)
    assert not broken, f"a sentence is broken over lines: {broken}"


def test_the_page_of_public_names_is_current() -> None:
    from make_api_page import page

    import vitkit

    text = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert text == page(), "run `make commands`"
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: ")}
    assert shown >= set(vitkit.__all__) - {"__version__"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "api").glob("[!i]*.md")), ids=lambda p: p.name)
def test_pages_about_the_inside_say_so_and_name_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "may change without notice" in text
    for name in re.findall(r"^::: ([\w.]+)$", text, re.M):
        pkgutil.resolve_name(name)


def test_the_page_of_commands_is_current() -> None:
    from make_commands_page import page

    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == page(), "run `make commands`"
