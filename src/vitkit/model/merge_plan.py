"""How many tokens vanish in which block, and by which method: what `model.merge` and `--merge` take. No torch.

8, "tome:8", "pitome:8", "prune:8:late": method, patches per block on average, schedule. "tome:0+4+8": of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from vitkit.errors import ConfigError, check_one_of

METHODS = ["tome", "pitome", "prune"]  # rows of `merging.MERGINGS`
SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the depth -> share of all that will have vanished by then
    "constant": lambda t: t,
    "late": lambda t: t * t,  # few in the first blocks, where patches are still apart, and twice as many in the last
    "early": lambda t: 1 - (1 - t) ** 2,
}


@dataclass(frozen=True)
class MergePlan:
    per_block: int = 0  # on average
    method: str = "tome"
    schedule: str = "constant"
    by_block: tuple[int, ...] = ()  # of each block, in place of a schedule

    @classmethod
    def of(cls, spec: int | str | MergePlan) -> MergePlan:
        if isinstance(spec, MergePlan):
            return spec
        method, _, rest = str(spec).partition(":") if ":" in str(spec) else ("tome", "", str(spec))
        count, _, schedule = rest.partition(":")
        if "+" in count:
            return cls._of_each_block(spec, method, count, schedule)
        schedule = schedule or "constant"
        check_one_of(method, METHODS, f"merge={spec!r}: {method!r} is not known")
        check_one_of(schedule, SCHEDULES, f"merge={spec!r}: {schedule!r} is not known")
        try:
            per_block = int(count)
        except ValueError:
            raise ConfigError(f"merge={spec!r} is no number of patches per block; write 8 or pitome:8:late") from None
        if per_block < 0:
            raise ConfigError(f"merge={spec!r} must not be negative; 0 merges nothing")
        return cls(per_block, method, schedule) if per_block else cls()

    @classmethod
    def _of_each_block(cls, spec: int | str, method: str, counts: str, schedule: str) -> MergePlan:
        check_one_of(method, METHODS, f"merge={spec!r}: {method!r} is not known")
        parts = counts.split("+")
        if schedule or not all(part.isdecimal() for part in parts):
            raise ConfigError(f"merge={spec!r}: write the patches of each block, joined by +, such as tome:0+4+8")
        numbers = tuple(map(int, parts))
        return cls(max(1, sum(numbers) // len(numbers)), method, by_block=numbers) if any(numbers) else cls()

    @property
    def spec(self) -> int | str:
        """What a user would write: 8, or "pitome:8:late"."""
        if self.by_block:
            return f"{self.method}:{'+'.join(map(str, self.by_block))}"
        late = "" if self.schedule == "constant" else f":{self.schedule}"
        plain = self.method == "tome" and not late
        return self.per_block if plain else f"{self.method}:{self.per_block}{late}"

    def counts(self, depth: int) -> tuple[int, ...]:
        """Of each block; together `per_block` times the depth, whatever the schedule."""
        if self.by_block:
            if len(self.by_block) != depth:
                raise ConfigError(f"merge={self.spec!r} names {len(self.by_block)} blocks; the model has {depth}")
            return self.by_block
        total, until = self.per_block * depth, SCHEDULES[self.schedule]
        ends = [round(total * until(i / depth)) for i in range(depth + 1)]
        return tuple(after - before for before, after in pairwise(ends))
