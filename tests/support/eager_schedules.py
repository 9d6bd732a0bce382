"""Which schedules are simple enough to be eager."""

from __future__ import annotations

from funccoll.schedules.collective import KINDS
from tests.support.oracles.schedule_oracle import built

SIMPLE = {
    "all_reduce": "one_shot",
    "all_gather": "direct",
    "reduce_scatter": "direct",
    "all_to_all": "direct",
    "permute": "direct",
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "flat"),
    **dict.fromkeys(("inclusive_scan", "exclusive_scan"), "one_shot"),
}


def simple(kind, p, root=0):
    pairs = [(i, (i + 1) % p) for i in range(p)] if kind == "permute" else ()
    return built(kind, p, SIMPLE[kind], root=root if KINDS[kind].rooted else 0, pairs=pairs)
