"""Collectives whose gradients are tested: the linear ones, which have transposes, and the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc

Linear = Callable[[Any, Any, int], Any]

LINEAR: dict[str, Linear] = {
    "all_reduce sum": lambda x, a, p: fc.all_reduce(x, a),
    "all_reduce mean": lambda x, a, p: fc.all_reduce(x, a, op="mean"),
    "all_gather 0": lambda x, a, p: fc.all_gather(x, a),
    "all_gather 1": lambda x, a, p: fc.all_gather(x, a, dim=1),
    "all_gather stack": lambda x, a, p: fc.all_gather(x, a, dim=1, stack=True),
    "own_slice": lambda x, a, p: fc.own_slice(x, a, dim=1),
    "reduce_scatter sum": lambda x, a, p: fc.reduce_scatter(x, a, dim=1),
    "reduce_scatter mean": lambda x, a, p: fc.reduce_scatter(x, a, op="mean"),
    "all_to_all 0->1": lambda x, a, p: fc.all_to_all(x, a, split_dim=0, concat_dim=1),
    "all_to_all 1->0": lambda x, a, p: fc.all_to_all(x, a, split_dim=1, concat_dim=0),
    "all_to_all 0->0": lambda x, a, p: fc.all_to_all(x, a, split_dim=0, concat_dim=0),
    "permute ring": lambda x, a, p: fc.permute(x, a, pairs=[(i, (i + 1) % p) for i in range(p)]),
    "permute shift": lambda x, a, p: fc.permute(x, a, pairs=[(i, i + 1) for i in range(p - 1)]),
    "broadcast": lambda x, a, p: fc.broadcast(x, a, root=p - 1),
    "reduce sum": lambda x, a, p: fc.reduce(x, a, root=1 % p),
    "reduce mean": lambda x, a, p: fc.reduce(x, a, root=p - 1, op="mean"),
    "gather": lambda x, a, p: fc.gather(x, a, root=p - 1, dim=1),
    "scatter": lambda x, a, p: fc.scatter(x, a, root=1 % p, dim=1),
    "inclusive_scan sum": lambda x, a, p: fc.inclusive_scan(x, a),
    "exclusive_scan sum": lambda x, a, p: fc.exclusive_scan(x, a, reverse=True),
    "pvary": lambda x, a, p: fc.pvary(x, a),
}
FROM_UNVARYING = {"own_slice", "pvary"}


def clipped(tree: Any) -> Any:
    return fc.tree.map(lambda y: np.clip(y, -2, 2), tree)


NONLINEAR: dict[str, Linear] = {
    f"{kind} {op}": (lambda x, a, p, kind=kind, op=op: getattr(fc, kind)(x, a, op=op))
    for kind in ("all_reduce", "reduce", "inclusive_scan")
    for op in ("max", "min", "prod")
}
NONLINEAR |= {  # without the identity, which is infinite
    f"exclusive_scan {op}": (lambda x, a, p, op=op: clipped(fc.exclusive_scan(x, a, op=op, reverse=True)))
    for op in ("max", "min", "prod")
}
