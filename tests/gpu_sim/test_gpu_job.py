"""Meshes of a job's GPUs through the public interface: real processes, each with a simulated GPU and NCCL's fake."""

from __future__ import annotations

import numpy as np
import pytest

from funccoll.platforms.gpu.array_fold import array_fold
from funccoll.platforms.gpu.cupy_library import CupyLibrary
from funccoll.primitives.combining import OPS, fold
from tests.support.cases.collective_cases import HALVES
from tests.support.fakes import fake_cupy
from tests.support.groups import in_groups
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("gpu-peers", "nccl")


def run(processes: int, case: str) -> list[list[str]]:
    """The lines of each rank."""
    name, seed = case.split()
    with Ranks(f"from tests.support.ranks import gpu_job\ngpu_job.main({name!r}, {seed})", range(processes)) as ranks:
        ended = [ranks.end(rank) for rank in range(processes)]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * processes
    return [printed for _, printed, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "case"), [(4, "programs 2"), (2, "collectives 3")])
def test_programs_have_the_bits_of_virtual_devices(processes, case):
    for lines in run(processes, case):
        assert int(lines[-1].split()[0]) > 1


def test_each_collective_goes_to_its_transport():
    for lines in run(2, "transports 1"):
        schedules, calls, values, choices, pickled, left = lines
        assert schedules == "['nccl (native: not proved)', 'ring', 'nccl (native: not proved)']"
        assert calls.startswith("['NcclCall', 'PeerLaunch', 'NcclCall'] kernel by kernel: the hosts agree")
        assert values == pickled == "[[48.0, 49.0], [48.0, 49.0]]"
        assert choices == "[None, 'nccl', None]"  # our kernel where latency counts, and what NCCL lacks
        assert left == "left"


def test_a_mesh_belongs_to_the_thread_that_calls_its_collectives():
    assert run(2, "threads 1") == [["[2.0]"]] * 2


def test_what_cannot_run_is_said_before_it_runs():
    for lines in run(2, "refusals 1"):
        ring, shared, cpu = lines
        assert ring == "ran"  # two ranks on one GPU map each other's memory
        assert shared.startswith("MeshError: ranks [0, 1] use one GPU (PCI bus id 0000:00:00.0), and NCCL takes one rank")
        assert cpu.startswith("ScheduleError: all_reduce: algorithm='nccl' is NCCL's own collective, between GPUs of a job")


@pytest.mark.parametrize("op", [*OPS])
@in_groups("name", ["float32", "float16", "bfloat16", "complex64", "int32", "bool"])
def test_the_fold_of_a_gpu_has_the_bits_of_numpy(op, name):
    dtype = next((d for d in HALVES if d.name == name), None) or np.dtype(name)
    if (op in ("and", "or", "xor")) != (dtype.kind in "ib") or (op in ("max", "min") and dtype.kind == "c"):
        if not (dtype.kind == "i" and op != "mean"):
            return
    random = np.random.default_rng(3)
    sources = [(random.standard_normal(257) * 4).astype(dtype) for _ in range(3)]
    if dtype.kind not in "ib":
        for source, places in zip(sources, ([0, 1, 5], [1, 2], [0, 3]), strict=True):
            source[places] = np.nan
            source[10:14] = np.array([0.0, -0.0, 0.0, -0.0]).astype(dtype) * (1 if source is sources[0] else -1)
    combine = array_fold(CupyLibrary(fake_cupy, None))
    for count in (1, 2, 3):
        blocks = []
        for source in sources[:count]:
            blocks.append(fake_cupy.empty(source.shape, dtype))
            blocks[-1].set(source)
        with np.errstate(all="ignore"):
            wanted = fold(sources[:count], op, 3)
        found = combine(op, blocks, 3)
        assert found.dtype == dtype and found.get().tobytes() == wanted.tobytes(), (op, dtype, count)
        for block, source in zip(blocks, sources, strict=False):
            assert block.get().tobytes() == source.tobytes()
