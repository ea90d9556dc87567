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
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
RUN = [page for page in PAGES if page.name != "README.zh-CN.md"]  # its code is README.md's
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
        return
    code = command(words, standalone_mode=False)
    assert not code, f"vitkit {' '.join(words)} ended with code {code}"


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
        assert words[0] in ("git", "cd", "python", "ls"), f"unknown command in the docs: {line}"


@pytest.mark.parametrize("page", RUN, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [b for b in blocks(page) if b[0] in ("python", "console")]
    if not found:
        return
    stage(tmp_path)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


CHINESE = ROOT / "README.zh-CN.md"


def test_chinese_readme_is_in_step() -> None:
    """Same headings in number, same code but for the comments."""
    english, chinese = ROOT / "README.md", CHINESE

    def code(page: Path) -> list[tuple[str, str, str]]:
        return [(kind, flags, re.sub(r" +#.*", "", text)) for kind, flags, text in blocks(page)]

    assert code(english) == code(chinese)
    headings = [
        re.findall(r"^(#+) ", re.sub(BLOCK, "", p.read_text(encoding="utf-8")), re.M) for p in (english, chinese)
    ]
    assert headings[0] == headings[1]


def test_chinese_readme_is_chinese() -> None:
    """Comments in its code are Chinese, and no line ends inside a sentence: that would become a stray space."""
    for _, _, code in blocks(CHINESE):
        for comment in re.findall(r" +# (.*)", code):
            assert re.search(r"[\u4e00-\u9fff]", comment), f"{comment!r} is not Chinese"
    text = re.sub(BLOCK, "", CHINESE.read_text(encoding="utf-8"))
    broken = re.findall(r"^(?![|#!<\-\[*]).*[^。：）)\s]\n(?=[^\n|#<*\-])", text, re.M)
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
