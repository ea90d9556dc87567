"""What MkDocs asks while it builds the site: pages written for the repository, fit for the site.

Links to files beside docs/ (ARCHITECTURE.md, benchmarks/) become their names; the marks that tell the tests
what to do with a code block (`console no-run`) are taken off.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
FLAGS = re.compile(r"^```(\w+) no-run *$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return FLAGS.sub(r"```\1", OUTSIDE.sub(r"\1", markdown))
