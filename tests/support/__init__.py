"""Modules that several tests share: cases, which ranks run too, fakes of devices, oracles, and ranks as processes."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]


def python_path() -> str:
    """PYTHONPATH of a process which imports `tests`: this repository, before what is there."""
    there = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(ROOT))]
    return os.pathsep.join([str(ROOT), *there])
