"""A rank fails while started calls are in flight: the others name it, and nothing is left."""

from __future__ import annotations

import pytest

from tests.jobs.failures.test_failures_ranks import ENDS, check_told
from tests.support.lazy_modules import need

pytestmark = pytest.mark.covers("failures")
SLOW = pytest.mark.slow


@pytest.mark.parametrize("deed", ["die", pytest.param("raise", marks=SLOW), pytest.param("exit", marks=SLOW)])
def test_a_rank_that_fails_is_named(deed, job):
    run = job("started", 3, culprits=[1], deed=deed)
    run.hear(1, "does")
    code, words = ENDS[deed]
    assert run.end() == [0, code, 0], run.report()
    check_told(run, [0, 2], ["PeerFailure"], [words.format(1)])


@SLOW
@pytest.mark.parametrize("deed", ["die", "raise", "exit"])
def test_a_rank_that_fails_with_buckets_in_flight_is_named(deed, job, tmp_path):
    need("torch", "torch is not installed: pip install 'funccoll[torch]'")
    run = job("buckets_in_flight", 2, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, culprits=[1], deed=deed)
    run.hear(1, "does")
    code, words = ENDS[deed]
    assert run.end() == [0, code], run.report()
    check_told(run, [0], ["PeerFailure"], [words.format(1)])
