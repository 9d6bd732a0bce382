"""Measured profiles: recording them (`fc.profile`), and reading them: timelines, each rank's time, and what caused waiting."""

from .causes import Blame, Cause
from .measured_profile import SPLIT, Profile, runs_of
from .recording import profile

__all__ = ["SPLIT", "Blame", "Cause", "Profile", "profile", "runs_of"]
