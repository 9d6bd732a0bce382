"""Ways to train on several hosts, the bound of a step's time, and the goals: of `hosts_training.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

OURS, FUNCTION, THEIRS, ALONE = "funccoll", "fc.data_parallel", "torch", "no communication"
TASKS = ("MLP 4 x 1024, batch 256", "transformer 4 x 256, batch 8")
CAPS = (1, 4, 25)
"""Values of bucket_cap_mb."""


class Way(NamedTuple):
    """A contender with buckets of some MiB, by default those that it chooses itself. `ALONE` is ours in `no_sync`."""

    contender: str
    bucket_mb: float | None = None

    def __str__(self) -> str:
        return self.contender if self.bucket_mb is None else f"{self.contender}, {self.bucket_mb:g} MiB"


DEFAULTS = (Way(OURS), Way(FUNCTION))
"""The ways that the goals judge, and that have a bound."""
WAYS = (*DEFAULTS, Way(ALONE), *(Way(contender, cap) for cap in CAPS for contender in (OURS, THEIRS)))
DECIDES = "1 Gbit/s"
"""The link that decides the goals. All others are reported."""
ABOVE_BOUND = 1.15
AGAINST_TORCH = dict(zip(TASKS, (0.97, 0.8), strict=True))
"""At most our time over torch's, over Gloo with its best size of buckets."""


class Parts(NamedTuple):
    """Median seconds of the parts of a step on this rank. The first three are times since the step began.

    - ready: of each bucket, when its last gradient is ready in a step without communication.
    - end: when the backward pass ends.
    - wire: of each bucket, the collective alone.
    - optimizer: from the end of the backward pass to the end of the step.
    """

    ready: list[float]
    end: float
    wire: list[float]
    optimizer: float


def slower(ranks: Sequence[Parts]) -> Parts:
    """The parts on the rank that takes longer for each: a bucket is ready when it is on all ranks."""
    most = lambda lists: [max(same) for same in zip(*lists, strict=True)]
    ready, wire = most([p.ready for p in ranks]), most([p.wire for p in ranks])
    return Parts(ready, max(p.end for p in ranks), wire, max(p.optimizer for p in ranks))


def bound(parts: Parts) -> float:
    """The least time of a step: a bucket travels once it is ready and the one before has arrived; then all parameters step."""
    arrived = 0.0
    for ready_k, wire_k in zip(parts.ready, parts.wire, strict=True):
        arrived = max(ready_k, arrived) + wire_k
    return max(arrived, parts.end) + parts.optimizer


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals, and what was reached on the link that decides them."""
    found = []
    for row in (row for row in rows if row["link"] == DECIDES):
        for way in map(str, DEFAULTS):
            for goal, ratio, wanted in (
                ("step / bound", row["over_bound"][way], ABOVE_BOUND),
                ("step / torch's", row["over_torch"][way], AGAINST_TORCH[row["task"]]),
            ):
                reached = ratio["median"]
                found.append(
                    {
                        "task": row["task"],
                        "way": way,
                        "goal": goal,
                        "wanted": f"≤ {wanted:g}×",
                        "reached": reached,
                        "met": reached <= wanted,
                    }
                )
    return found
