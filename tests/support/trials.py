"""Trials of the GPU check."""

from __future__ import annotations

from tests.gpu_check.gpu_parts import Trial


def trial(name: str, *arguments: object, seconds: float = 30) -> Trial:
    return Trial(name, f"stand_ins:{name}", arguments, seconds)
