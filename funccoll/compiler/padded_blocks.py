"""Calls of programs with blocks that differ in shape: inside, all have the shape of the largest.

Only programs that redistribute or add Arrays have them. The blocks of other programs have one shape (`Sharding.check_even`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.array_layout import ArrayLayout
from ..platforms.device import Device, Run

__all__ = ["Check", "check_and_pad", "run_padded"]

Check = Callable[[list[Any], Sequence[Any]], None]
"""A check of a call's arguments: this process's blocks of them, and the arguments themselves."""


def check_and_pad(check: Check | None, layouts: Sequence[ArrayLayout], device: Device) -> Check:
    """Return the check of a call that also pads blocks to the shapes which a program takes."""

    def check_and_pad(inputs: list[Any], leaves: Sequence[Any]) -> None:
        if check is not None:
            check(inputs, leaves)
        inputs[:] = [layout.padded(copies, device.allocate) for copies, layout in zip(inputs, layouts, strict=True)]

    return check_and_pad


def run_padded(run: Run, layouts: Sequence[ArrayLayout], device: Device) -> Run:
    """Return a program on padded blocks that returns results without padding."""

    def run_padded(*inputs: Any) -> Sequence[Any]:
        return [layout.cut(copies, device.new_block) for copies, layout in zip(run(*inputs), layouts, strict=True)]

    return run_padded
