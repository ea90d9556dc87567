"""Print what CHANGELOG.md says about a version; stop when it says nothing, or when versions disagree.

python .github/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, changelog: str) -> str:
    found = re.search(rf"^## {re.escape(version)} \(([^)]+)\)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section '## {version} (date)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found.group(1)):
        raise SystemExit(f"CHANGELOG.md gives {version} no date but {found.group(1)!r}; write the day of the release")
    return found.group(2).strip()


def versions() -> set[str]:
    """What pyproject.toml and the package say."""
    said = {"pyproject.toml": r'^version = "(.+)"', "src/vitkit/__init__.py": r'^__version__ = "(.+)"'}
    found = set()
    for name, pattern in said.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.M)
        found.add(match.group(1) if match else f"none in {name}")
    return found


if __name__ == "__main__":
    wanted = sys.argv[1]
    if versions() != {wanted}:
        raise SystemExit(f"the tag says {wanted}, the package {', '.join(sorted(versions()))}")
    print(notes(wanted, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
