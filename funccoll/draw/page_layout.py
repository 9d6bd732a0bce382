"""Layout that both renderers share: lines of words, ticks that do not overlap, sizes of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..errors import MissingPackageError
from .scene import Axis

__all__ = [
    "LABEL_SIZE",
    "LEGEND_SIZE",
    "NOTE_SIZE",
    "PANEL_TITLE_SIZE",
    "TICK_SIZE",
    "TITLE_SIZE",
    "estimated_width",
    "missing",
    "visible_ticks",
    "wrapped",
]

TITLE_SIZE, NOTE_SIZE, PANEL_TITLE_SIZE, LABEL_SIZE, TICK_SIZE, LEGEND_SIZE = 11.0, 8.5, 9.0, 9.0, 8.0, 8.5
"""Sizes of texts in points."""


def estimated_width(text: str, size: float) -> float:
    """Return the width of a text in inches, in the fonts that browsers use. It is rather too large than too small."""
    return len(text) * size * 0.62 / 72


def wrapped(text: str, width: float, measure: Callable[[str], float]) -> list[str]:
    """Return a text in lines no wider than `width`, broken between words. Longer words are broken behind a mark of theirs."""
    lines: list[str] = []
    words = text.split(" ")
    while words:
        word = words.pop(0)
        if measure(word) > width and len(word) > 1:
            at = _middle(word)
            words[:0] = [word[:at], word[at:]]
            continue
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and measure(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _middle(word: str) -> int:
    """Return where a word may be broken: behind the mark nearest to its middle, such as / or _, else in the middle."""
    middle = len(word) // 2
    marks = [i for i in range(1, len(word)) if word[i - 1] in "/_.,;:=-)]" and word[i] not in "/_.,;:=-)]"]
    return min(marks, key=lambda i: abs(i - middle), default=middle)


def visible_ticks(axis: Axis, inches: float, horizontal: bool) -> list[tuple[float, str]]:
    """Return the ticks of an axis of this length whose labels have room: every k-th of them."""
    every = _stride(axis.ticks, axis, inches, horizontal)
    return list(axis.ticks[::every])


def _stride(ticks: Sequence[tuple[float, str]], axis: Axis, inches: float, horizontal: bool) -> int:
    if len(ticks) < 2:
        return 1
    at = [math.log10(v) if axis.log else v for v, _ in ticks]
    span = math.log10(axis.upper) - math.log10(axis.lower) if axis.log else axis.upper - axis.lower
    step = min(b - a for a, b in pairwise(at)) / span * inches
    widest = max(estimated_width(text, TICK_SIZE) for _, text in ticks)
    least = widest + 0.1 if horizontal else TICK_SIZE * 1.15 / 72
    return next((k for k in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128) if k * step >= least), 256)


def missing(package: str, error: ImportError) -> Any:
    """Return the error for a package that a renderer needs."""
    return MissingPackageError(f"fc.draw needs {package} for this: pip install 'funccoll[draw]'.")
