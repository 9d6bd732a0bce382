"""Numbers of examples of Hypothesis: few in `make test`, many in `make test-slow`, which runs all of its tests again."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

FEW = 12
"""Examples of a test that names no number, in `make test`."""


def register_profiles() -> None:
    """Register `few`, which is loaded, and `many`: `pytest --hypothesis-profile=many`."""
    # The machines are shared: a slow example is not a failure.
    common: dict[str, Any] = {"deadline": None, "print_blob": True, "derandomize": True}
    settings.register_profile("few", max_examples=FEW, **common)
    settings.register_profile("many", max_examples=100, **common)
    settings.load_profile("few")


def examples(many: int, few: int | None = None, **others: Any) -> settings:
    """`many` examples in `make test-slow`, and `few`, by default an eighth of them, in `make test`; `others` are settings."""
    count = many if settings.get_current_profile_name() == "many" else max(1, many // 8) if few is None else few
    return settings(max_examples=count, **others)
