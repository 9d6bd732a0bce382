"""Launches that end in the middle are an error of the host, and the end of all collectives of their GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

from funccoll.kernels.kernel_context import FAILED, WAITING, WORD
from funccoll.transports.cuda.launch_reports import LaunchedName, LaunchReports
from tests.support.fakes.cuda_statuses import told

pytestmark = pytest.mark.covers("cuda-kernel")


class HostGpu:
    """Memory of a GPU that is the host's."""

    def host_words(self, count):
        words = np.zeros(count, np.int64)
        return words, words.ctypes.data

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def address(self, array):
        return array.ctypes.data


@pytest.mark.parametrize(
    ("launch", "block", "peer", "status"),
    [
        (0, 0, 0, FAILED),
        (2, 3, 1, WAITING),
        (1, 65535, 65535, WAITING),
    ],
)
def test_a_report_is_read_as_it_was_written(launch, block, peer, status):
    reports = LaunchReports(HostGpu())
    launches = [LaunchedName(f"launch {i}", None, 1 << 16) for i in range(3)]
    words = [reports.words(each) for each in launches]
    assert {word[WORD.ended] for word in words} == {reports.ended} and reports.found() is None
    reports._word[0] = words[launch][WORD.label][block] + 256 * peer + status  # as kernels.block does
    found = reports.found()
    assert found == (launches[launch], block, status, peer) and found.waited == (status == WAITING)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("absent", "CollectiveTimeout", "block 0 of 2 waited 600 s for device 1"),
        ("word", "FunccollError", "block [01] of 2 was stopped by the failure word"),
    ],
)
def test_a_launch_that_ends_in_the_middle(case, kind, words):
    well, quiet, error, *later = told(case)
    assert (well, quiet) == ("nothing [2.0, 4.0]", "nothing")
    assert re.match(f"{kind}: all_reduce over 'd' ended on the GPU in the middle: {words}", error), error
    assert re.search(r"\n  at .*cuda_statuses\.py:\d+ in ", error), error
    assert len(later) == 2
    for said in later:
        assert said.startswith("FunccollError: an earlier failure ended all collectives on this GPU"), said
        assert "It was: all_reduce over 'd' ended" in said


def test_more_devices_than_blocks_that_run_at_the_same_time():
    (said,) = told("too many")
    assert said.startswith("MeshError: all_reduce over 'd' has 3 virtual devices, and this GPU runs 2 blocks"), said
    assert "Make a mesh of at most 2 devices" in said
