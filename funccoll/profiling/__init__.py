"""Measured profiles: recording them (`fc.profile`), and reading them: timelines, each rank's time, and what caused waiting.

It imports `core` and `runtime`.
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from ..core.timeline import Timeline
from .causes import Blame, Cause
from .measured_profile import SPLIT, Profile, runs_of
from .recording import profile

__all__ = ["SPLIT", "Blame", "Cause", "Profile", "Timeline", "profile", "runs_of"]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
