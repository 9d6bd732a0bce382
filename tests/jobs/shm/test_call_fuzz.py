"""Random calls with private, shared, donated, strided, kept and dropped arrays: the bits of virtual devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cases import call_fuzz
from tests.support.ranks.ranks import launch


def test_random_calls(tmp_path):
    paths = call_fuzz.record(7, 2, 60, tmp_path)
    assert launch(call_fuzz.play_drawn, 2, paths, 7, 2, 60) == [60] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("n", "share_from"), [(2, 2048), (3, 0), (4, 2048), (4, 0)])
def test_many_random_calls_in_c_and_in_python(n, share_from):
    command = [sys.executable, "-m", call_fuzz.__name__, "--calls", "3000", "--ranks", str(n), "--seed", str(n)]
    command += ["--share-from", str(share_from)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
