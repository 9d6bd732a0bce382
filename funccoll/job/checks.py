"""A line on the page of `funccoll doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Check"]


@dataclass(frozen=True)
class Check:
    """One line of the page. `advice` is a sentence about what to do, empty if there is nothing to do."""

    section: str
    name: str
    value: str
    state: Literal["ok", "absent", "warning", "wrong"] = "ok"
    advice: str = ""
