"""Plain against fused attention on this machine, by tokens, batch and heads.

The model uses the fused kernel wherever nobody looks at the weights, because this table finds it as fast as the
plain path or faster. The whole module is timed (qkv and output map included) as a model calls it.

    python benchmarks/attention.py            # about four minutes
    python benchmarks/attention.py --quick    # a smoke run of half a minute
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import arguments, interleaved, machine, save, table
from vitkit.model.attention import Attention

TOKENS = (17, 50, 65, 101, 145, 197, 257, 401, 577)
CASES = ((1, 3, 64), (8, 3, 64), (8, 4, 32), (64, 4, 32), (1, 12, 64), (8, 12, 64))  # batch, heads, head width


def attention_call(fused: bool, gradients: bool, tokens: int, batch: int, heads: int, head: int) -> Callable[[], Any]:
    module = Attention(heads * head, heads)
    x = torch.randn(batch, tokens, heads * head, requires_grad=gradients)
    look = None if fused else lambda weights: None  # a callback forms the weights

    def call() -> None:
        with torch.inference_mode(not gradients):
            y = module(x, on_weights=look)
        if gradients:
            y.sum().backward()

    return call


def main() -> None:
    assert __doc__
    parser = arguments(__doc__, (), ())
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokens_tried, cases = (TOKENS[:2], CASES[:1]) if args.quick else (TOKENS, CASES)
    about, rows = machine(), []
    for gradients in (False, True):
        for batch, heads, head in cases:
            found: list[dict[str, Any]] = []
            for tokens in tokens_tried:
                shape = (tokens, batch, heads, head)
                calls = {
                    name: attention_call(fused, gradients, *shape)
                    for name, fused in (("plain", False), ("fused", True))
                }
                times = interleaved(calls, 0.2 if args.quick else args.seconds / 10, 3)
                plain, fused = (1e3 * min(times[name]) for name in ("plain", "fused"))
                row: dict[str, Any] = {"pass": "forward+backward" if gradients else "forward", "batch": batch}
                row |= {"heads": heads, "head_width": head, "tokens": tokens, "plain_ms": round(plain, 3)}
                found.append(row | {"fused_ms": round(fused, 3), "plain_is_faster_by": round(fused / plain, 2)})
            print(table(found), flush=True)
            rows += found
    save("attention", args.save, about, rows, args.quick)


if __name__ == "__main__":
    main()
