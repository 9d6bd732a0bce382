"""Random calls with private, shared, donated, strided, kept and dropped arrays: the bits of virtual devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cases import call_fuzz
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("fast-calls")


def test_random_calls(tmp_path):
    paths = call_fuzz.record(7, 2, 60, tmp_path)
    assert launch(call_fuzz.play_drawn, 2, paths, 7, 2, 60) == [60] * 2


FEW, MANY = 1000, 3000
RUNS = [(2, 2048), (3, 0), (4, 2048), (4, 0)]
"""(ranks, bytes from which on they share results)"""


@pytest.mark.parametrize(
    ("n", "share_from", "calls"),
    [
        *(pytest.param(*run, FEW, marks=pytest.mark.slow) for run in RUNS),
        *(pytest.param(*run, MANY, marks=pytest.mark.exhaustive) for run in RUNS),
    ],
)
def test_many_random_calls_in_c_and_in_python(n, share_from, calls):
    seed = str(n + share_from)
    command = [sys.executable, "-m", call_fuzz.__name__, "--calls", str(calls), "--ranks", str(n), "--seed", seed]
    command += ["--share-from", str(share_from)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
