"""Open cases one by one, each in a child process with limits; `make fuzz MINUTES=10` goes on for ten minutes.

Findings are written to fuzz-findings/: the files of the case, and what happened.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "fuzz"), str(TESTS / "web")]

from generators import GENERATORS, Case  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from targets import MEMORY, SECONDS  # noqa: E402

from forks import Forks  # noqa: E402


def finding(forks: Forks, name: str, case: Case, function: str = "targets:attempt", seconds: float = SECONDS) -> str:
    """What is wrong with how a case ended; "" when it was opened or refused."""
    ended = forks(function, name, case, seconds=3 * seconds, memory=MEMORY)
    if ended.code == 0:
        return ""
    if ended.code is None or ended.code == -24:  # SIGXCPU
        return "it took too much time"
    return f"signal {-ended.code}" if ended.code < 0 else ended.err[-2500:]


def keep(folder: Path, name: str, case: Case, found: str) -> Path:
    """Write the files of a finding; the same last line of an error is the same finding."""
    last = found.strip().splitlines()[-1]
    kept = folder / f"{name.replace(' ', '-')}-{hashlib.sha256(last[:60].encode()).hexdigest()[:8]}"
    for path, content in case.items():
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        (kept / path).write_bytes(content)
    (kept / "finding.txt").write_text(f"{name}\n{found}\n")
    return kept


def some_cases(name: str, number: int, count: int = 20) -> list[Case]:
    """New cases of a generator, the same for the same number."""
    cases: list[Case] = []
    quiet = {"database": None, "deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

    @seed(number)
    @settings(max_examples=count, **quiet)
    @given(GENERATORS[name])
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def main(minutes: float, names: list[str]) -> int:
    forks = Forks("targets", "vitkit.runtime.onnx", "vitkit.web.app", "serving")
    end, tried, kept = time.monotonic() + 60 * minutes, 0, set[Path]()
    while time.monotonic() < end:
        name = random.choice(names)
        for case in some_cases(name, random.randrange(2**32)):
            tried += 1
            if found := finding(forks, name, case):
                kept.add(keep(Path("fuzz-findings"), name, case, found))
        print(f"\r{tried} cases, {len(kept)} findings", end="", flush=True)
    print("", *sorted(kept), sep="\n")
    forks.close()
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:] or list(GENERATORS)))
