"""The records of the benchmarks."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "core.json"


def recorded(name):
    """A committed record; the test is skipped where it was not measured yet."""
    path = RESULTS.parent / name
    if not path.exists():
        pytest.skip("not measured yet")
    return json.loads(path.read_text())
