"""The site, built by Sphinx: `make docs` writes it into site/, strictly, and without a network.

The pages are plain Markdown that also reads well in the repository. While the site is built, links to files beside
docs/ become their names, the marks that tell the tests what to do with a code block (`console no-run`) are taken off,
and a line `::: vitkit.api.train` becomes what that object says about itself. NAV is the menu; a page that is missing
in it fails the build.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING

import vitkit

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project, copyright, version = "vitkit", "the vitkit authors, Apache-2.0", vitkit.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme, html_title = "furo", "vitkit"
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # a page of --help has headings as its commands nest
nb_execution_mode = "off"  # `make tour` runs the notebook and keeps its outputs
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "code"
exclude_patterns = ["**.py"]

NAV = {
    "Start": "tutorial-practitioner tutorial-researcher tutorial-student tutorial-deployer cookbook tour",
    "Guides": "curate finetune pretrain regression checkpoints explain predict fast deploy serve map",
    "Everybody's tools": "install sklearn track hub other-loops",
    "More than one machine": "scale remote engines",
    "Coming from": "from-timm from-hugging-face from-torchvision from-vit-pytorch from-ultralytics",
    "In depth": "model data train evaluate plan studies gallery questions",
    "Reference": "commands api/index",
    "Inside (may change)": "api/model api/checkpoints api/data api/train api/evaluate api/explain",
    "Background": "security design mistakes",
    "中文": "zh/tutorial-practitioner zh/tutorial-researcher zh/tutorial-student zh/tutorial-deployer zh/studies "
    "zh/gallery zh/questions",
}
DOCS = Path(__file__).resolve().parent
UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)[^)]*\)")
FLAGS = re.compile(r"^```(\w+) no-run *$", re.M)
OBJECT = re.compile(r"^::: ([\w.]+)$", re.M)


def menu() -> str:
    parts = []
    for caption, pages in NAV.items():
        parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages.split()) + "\n```")
    return "\n\n" + "\n\n".join(parts) + "\n"


def documented(match: re.Match[str], public: bool) -> str:
    """What an object says about itself; links lead to the page of public names."""
    name = match.group(1)
    value = pkgutil.resolve_name(name)
    kind = "module" if inspect.ismodule(value) else "class" if inspect.isclass(value) else "function"
    members = "" if kind == "function" else "\n   :members:"
    members += "" if public else "\n   :no-index:"
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}{members}\n```"


def without_links_outside(text: str, page: str) -> str:
    """Links to files that are not part of the site become their words; those from zh/ to the pages above it stay."""

    def kept(match: re.Match[str]) -> str:
        target = (DOCS / page).parent.joinpath(match[2]).resolve()
        return match[0] if target.is_relative_to(DOCS) else match[1]

    return UPWARDS.sub(kept, text)


def read(app: Sphinx, page: str, source: list[str]) -> None:
    text = FLAGS.sub(r"```\1", without_links_outside(source[0], page))
    text = OBJECT.sub(lambda match: documented(match, page == "api/index"), text)
    if page.startswith(("studies/", "zh/studies/")):
        text = f"---\norphan: true\n---\n{text}"  # reached from studies.md and the gallery
    source[0] = text + (menu() if page == "index" else "")


def plain(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """The first paragraph of a docstring as text; the rest, in aligned columns, as it stands."""
    end = lines.index("") if "" in lines else len(lines)
    rest = "\n".join(lines[end:]).strip("\n").splitlines()
    lines[end:] = ["", "::", "", *(f"   {line}" for line in rest), ""] if rest else []


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", plain)
