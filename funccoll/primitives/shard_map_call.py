"""The call of a program on a mesh as one operation on global values, for gradients around jitted functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..core.ir import Primitive
from ..core.types import ArrayType

__all__ = ["ShardMapCall", "shard_map_call_p"]


class ShardMapCall(Protocol):
    """The called program, with the layouts of its arguments and results. `compiler/program_calls.py` makes it."""

    @property
    def name(self) -> str:
        """The function's name."""
        ...

    @property
    def in_layouts(self) -> Sequence[Any]:
        """For each argument its global shape, dtype and sharding."""
        ...

    @property
    def out_layouts(self) -> Sequence[Any]:
        """For each result its global shape, dtype and sharding."""
        ...

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the results for concrete arguments: Arrays if they are split, NumPy arrays if they are whole."""
        ...


def _infer(*xs: ArrayType, call: ShardMapCall) -> list[ArrayType]:
    return [ArrayType(layout.shape, layout.dtype) for layout in call.out_layouts]


shard_map_call_p = Primitive("shard_map_call", _infer, lambda *values, call: call.run(values), multiple=True, kind="call")
