"""Data-parallel models of tests."""

from __future__ import annotations

from typing import Any

import funccoll as fc
from tests.support.cases.parallel_model_cases import Momentum, loss


def parallel(model: Any, n: int = 4, loss_fn: Any = loss, **options: Any) -> Any:
    return fc.DataParallel(model, loss_fn, Momentum(), mesh=fc.make_mesh({"data": n}), **options)
