"""Does `vitkit tune` keep its promise? Its choice, on ten parts of 200 images that it never saw.

The set is shuffled; `tune` gets its first 500 images, as the command does, and the parts are of those after them. What
is counted is on how many of the ten no more was lost of the model's own accuracy than --max-drop.

    python benchmarks/promise.py MODEL DATA --minutes 5
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import harness
import vitkit
from curves import shuffled
from vitkit.progress import Progress
from vitkit.runtime.base import Choice, build
from vitkit.runtime.confirm import confirm, hold_out
from vitkit.runtime.tune import FEWEST, tune
from vitkit.runtime.verify import outputs_of

IMAGES, PARTS, PART = 500, 10, 200


class Notes(Progress):
    def note(self, text: str) -> None:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--name", default="", help="of the model in the results")
    parser.add_argument("--max-drop", type=float, default=0.005)
    parser.add_argument("--minutes", type=float, default=5.0, help="that tune may take")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--save", type=Path, default=harness.RESULTS / "promise.json")
    args = parser.parse_args()
    about, model = harness.machine(), vitkit.load(args.model).eval()
    images = shuffled(model, args.data, IMAGES + PARTS * PART)
    choosing, held = hold_out(images[:IMAGES], FEWEST)
    how = {"latency": args.latency, "budget": 60 * args.minutes, "held": held, "progress": Notes()}
    found = tune(model, choosing, args.max_drop, **how)
    choice, others = found.winner.choice, images[IMAGES:]
    before, after = (outputs_of(build(model, one), others, model.config, 8) for one in (Choice(), choice))
    each = [slice(start, start + PART) for start in range(0, len(others), PART)]
    known = [part for rows in each if (part := confirm(model, before[rows], after[rows], others[rows])) is not None]
    whole = sum(known[1:], known[0])
    row: dict[str, Any] = {"model": args.name or Path(args.model).name, "batch": 1 if args.latency else 8}
    row |= {
        "max_drop": args.max_drop,
        "minutes": args.minutes,
        "choice": choice.name,
        "ratio_to_eager": found.winner.ratio,
    }
    row |= {"kept": sum(part.drop <= args.max_drop + 1e-9 for part in known), "parts": len(known), "part": PART}
    row |= {"lost_by_part": [part.lost - part.won for part in known], **whole.to_dict()}
    print(row)
    rows = json.loads(args.save.read_text())["rows"] if args.save.exists() else []
    kept = [one for one in rows if any(one[key] != row[key] for key in ("model", "batch", "max_drop"))]
    harness.save("promise", args.save, about, [*kept, row], quick=False)


if __name__ == "__main__":
    main()
