"""A process that `local.py` has started: `python -m vitkit.training.other`, told by a line of JSON what to train."""

from __future__ import annotations

import os
import sys
import threading

from vitkit.data.loader import end_after
from vitkit.errors import VitkitError
from vitkit.io import parse_json
from vitkit.training.config import TrainConfig
from vitkit.training.local import PEER, READY
from vitkit.training.run import train
from vitkit.training.stopping import Stopped
from vitkit.world import PeerGone


def main() -> int:
    told = parse_json(sys.stdin.readline())
    threading.Thread(target=end_after, args=(told["parent"],), daemon=True).start()
    print(READY, flush=True)
    sys.stdout = sys.stderr  # nobody reads the pipe from here on
    try:
        train(TrainConfig.from_dict(told["config"]), **told["how"])
    except PeerGone:
        return PEER
    except Stopped as e:
        return e.exit_code
    except VitkitError as e:
        print(f"process {os.environ['RANK']}: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
