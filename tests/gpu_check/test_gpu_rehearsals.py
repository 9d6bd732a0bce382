"""Rehearsals of `make gpu-check`: its comparisons on the CPU, and its way to a GPU over the fake of CuPy."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.arrays.array_layout import NO_MESH
from funccoll.core.mesh import Mesh
from funccoll.kernels.cuda_compiler import compile_template
from funccoll.platforms.gpu import cublas
from funccoll.platforms.host_device import HostDevice
from funccoll.transports.cuda import virtual_devices
from funccoll.transports.cuda.cuda_transport import current_gpu
from funccoll.transports.local.local_transport import LocalTransport
from tests.gpu_check import (
    gpu_compute,
    gpu_fusion,
    gpu_jobs,
    gpu_kernels,
    gpu_programs,
    gpu_speed,
    gpu_steps,
    gpu_torch,
    gpu_trial,
)
from tests.gpu_check.gpu_parts import PARTS
from tests.support.cases.all_numpy_cases import CASES
from tests.support.fakes import fake_cuda, fake_cupy, gpu_threads
from tests.support.fakes.fake_cublas import FakeCublas
from tests.support.ranks.ranks import Ranks, forked

pytestmark = pytest.mark.covers("gpu-check")

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


# ---------------------------------------------------------------- the comparisons


@pytest.fixture
def rehearsed(monkeypatch, capsys):
    """The CPU in place of a GPU; returns a function that gives the findings so far."""
    monkeypatch.setenv("FUNCCOLL_GPU_CHECK_REHEARSES", "1")
    monkeypatch.setattr(virtual_devices, "_PATIENCE_S", virtual_devices._PATIENCE_S)  # trials set it

    def findings() -> list[dict]:
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line.removeprefix(gpu_trial.MARK)) for line in lines if line.startswith(gpu_trial.MARK)]

    return findings


class Reusing(HostDevice):
    """A device that records a program's outputs, and `returns` something else from then on."""

    def __init__(self, returns):
        self.returns = returns

    def record(self, run, program):
        kept = []

        def replay(*inputs):
            kept.append(run(*inputs))
            return self.returns(kept)

        return replay


def reusing(returns):
    transport = LocalTransport()
    transport.device = Reusing(returns)
    return transport


def in_place(kept):
    """The results of a call are in the memory of the first."""
    for old, new in zip(kept[0], kept[-1], strict=True):
        old[...] = new
    return kept[0]


def scaled(x):
    return fc.all_reduce(x * 2, "d")


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        (lambda kept: kept[-1], ""),
        (in_place, "what call 1 returned, after call 2: result 0 of device 0 differs"),
        (lambda kept: kept[0], "call 2: result 0"),
        (lambda kept: kept[-1] if len(kept) < 3 else kept[1], "call 3: result 0"),
        (lambda kept: [np.nextafter(x, np.float32(99)) for x in kept[-1]], "call 1: result 0 of device 0 differs from byte"),
    ],
)
def test_other_bits_and_results_that_change_are_found(returns, words, rehearsed):
    same = gpu_kernels.SameBits(lambda axes: Mesh(axes, range(2), transport=reusing(returns)))
    same(scaled, {"d": 2}, (np.arange(6, dtype=np.float32),), P("d"), P())
    assert [words in failure for failure in same.failures] == ([True] if words else [])
    assert [f["what"] for f in rehearsed()] == (["program 1"] if words else [])


def test_values_within_a_number_of_roundings(rehearsed):
    for factor, last, words in (
        (1 + 2**-20, 0, ""),
        (1 + 2**-8, 0, "call 1: result 0 is off by"),
        (1 + 2**-20, 2**-19, "call 3: result 0 of device"),
    ):
        returns = lambda kept: tuple((x * factor + (last if len(kept) > 2 else 0)).astype(x.dtype) for x in kept[-1])
        same = gpu_kernels.SameBits(lambda axes: Mesh(axes, range(2), transport=reusing(returns)))
        same.within = 64.0
        same(scaled, {"d": 2}, (np.arange(6, dtype=np.float32),), P("d"), P())
        assert [words in failure for failure in same.failures] == ([True] if words else []), same.failures


def test_a_trial_ends_after_a_few_failures(rehearsed):
    same = gpu_kernels.SameBits(lambda axes: Mesh(axes, range(2), transport=reusing(lambda kept: kept[0])), 2)
    for _ in range(5):
        same(scaled, {"d": 2}, (np.arange(6, dtype=np.float32),), P("d"), P())
    same.report("table", 0.1)
    assert "2 programs, 2 failed (it ended there)" in rehearsed()[-2]["says"]


def test_roundings():
    one = np.array([1.0, np.nan, np.inf, -8.0], np.float32)
    assert gpu_compute.roundings(one, one) == 0
    assert gpu_compute.roundings(one + np.float32([2**-20, 0, 0, 0]), one) == 1
    for wrong in ([1, 0, np.inf, -8], [1, np.nan, -np.inf, -8], [1, np.nan, np.inf, np.inf]):
        assert gpu_compute.roundings(np.array(wrong, np.float32), one) == np.inf
    assert gpu_compute.roundings(np.array([1, 2]), np.array([1, 3])) == np.inf
    half = np.array([1.0, 2.0], fc.bfloat16)
    assert gpu_compute.roundings(half, half) == 0 and gpu_compute.roundings(-half, half) > 100
    assert gpu_compute.roundings(np.array([1 + 2j]), np.array([1 + 1j])) > 1e9
    with pytest.raises(AssertionError, match=r"float64\[4\] in place of float32\[4\]"):
        gpu_compute.roundings(one.astype(np.float64), one)


def test_wrong_values_and_gradients_are_failures(rehearsed, monkeypatch):
    monkeypatch.setattr(gpu_compute, "value_error", lambda *_: 1e3)
    monkeypatch.setattr(gpu_compute, "gradient_error", lambda *_: 1 / 0)
    functions = sorted({case.function for case in CASES}, key=lambda f: f.__name__)
    gpu_compute.compare(functions.index(np.sin), len(functions))
    first, last, _ = rehearsed()
    assert "off by 1e+03 roundings" in first["failed"] and "1 functions" in last["says"] and " 0 failed" not in last["says"]
    assert any("ZeroDivisionError" in failure for failure in first["failures"])


@needs_torch
@pytest.mark.slow
def test_torch_without_cuda_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(gpu_torch, "device", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for trial in PARTS["torch"].trials:
        with pytest.raises(gpu_trial.Skipped, match=r"torch 2\..* of this Python has no CUDA here: install one that is built"):
            getattr(gpu_torch, trial.function.partition(":")[2])(*trial.arguments)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (gpu_kernels.compare, ("programs", 4), "programs on 4 devices: 3 programs, 0 failed"),
        (gpu_compute.compare, (5, 40), "8 functions, .* gradients, 0 failed"),
        (gpu_compute.exact, (), r"normal numbers.*off by 0(\.\d+)? roundings"),
        (gpu_speed.small, (6,), "the slope of 2 to 6 in one graph"),
        (gpu_speed.slots, (), "a graph with 2 arguments and 2 results"),
        (gpu_speed.behind, (), "two calls behind a stream that is busy"),
        (gpu_speed.large, (), "all_reduce, 8 devices x 0 MiB.*of the limit"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (gpu_jobs.failure, ("raise",), "rank 1 raised ValueError: rank 1 has had enough"),
                (gpu_jobs.compare, ("programs", 2), "programs in 2 processes over shm: 3 programs"),
                (gpu_programs.job_arrays, (), "2 processes: redistributed, gathered"),
            )
        ),
        pytest.param(
            gpu_torch.train,
            (2,),
            "2 processes on 1 GPU.* over shm: 11 cases.*a step of a torch MLP",
            marks=[needs_torch, pytest.mark.slow],
        ),
    ],
)
def test_a_rehearsal_on_the_cpu(function, arguments, words, rehearsed, monkeypatch):
    monkeypatch.setattr(gpu_speed, "_sizes", lambda *sizes: [4096])
    function(*arguments)
    findings = rehearsed()
    assert not [f for f in findings if "failed" in f]
    assert re.search(words, " ".join(f"{f['what']} {f['says']}" for f in findings)), findings


def some_groups(*names):
    """The groups of the table with these words in their names."""
    return [group for group in gpu_fusion.table() if any(name in group.name for name in names)]


def test_a_rehearsal_of_fused_groups(rehearsed, monkeypatch):
    some = some_groups("Adam", "sums")
    monkeypatch.setattr(gpu_fusion, "table", lambda: some)
    gpu_fusion.first()
    table, gelu, softmax, norm = rehearsed()
    assert re.fullmatch(r"2 groups, 0 failed; worst .* roundings .*", table["says"])
    assert all("% of the limit" in one["says"] for one in (gelu, softmax, norm))


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        pytest.param(("999", "rows of 32", "integers"), 200, id="some"),
        pytest.param(("",), 40, id="many", marks=pytest.mark.slow),
    ],
)
def test_fused_groups_on_the_fake_of_a_gpu(words, shares, faked, monkeypatch):
    """Called, captured and replayed by the same kernels as on a GPU, thread by thread."""
    some = [group for group in some_groups(*words) if max(a.size for a in group.arguments) < 30_000]
    monkeypatch.setattr(gpu_fusion, "table", lambda: some)
    gpu_fusion.compare()
    gpu_fusion.operations(7, shares)
    table, operations = faked()
    assert f"{len(some)} groups, 0 failed" in table["says"] and table["says"].endswith("; captured"), table
    assert re.fullmatch(r"\d+ groups, 0 failed", operations["says"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpu_compute:compare", 0, 12), r"\d+ functions, \d+ cases, \d+ gradients, 0 failed"),
        (("gpu_programs:control", 0, 8), r"\d+ loops, branches and their gradients, 0 failed"),
    ],
)
def test_functions_and_loops_with_groups_on_the_fake_of_a_gpu(arguments, words, faked, monkeypatch):
    launched, group = [], fake_cupy.Kernels.group
    monkeypatch.setattr(fake_cupy.Kernels, "group", lambda *given: launched.append(0) or group(*given))
    gpu_fusion.with_groups(*arguments)
    assert re.search(words, str(faked())) and len(launched) > 10


def test_a_group_with_other_values_fails(rehearsed, monkeypatch):
    wrong = gpu_fusion.Group("wrong", lambda x: np.exp(x) * next(factors), (np.ones(4000, np.float32),))
    factors = itertools.chain([1.0], itertools.repeat(1.0001))
    monkeypatch.setattr(gpu_fusion, "table", lambda: [wrong])
    gpu_fusion.compare()
    failed, table = rehearsed()
    assert re.search(r"wrong.*off by \d+ roundings", str(failed)) and "1 groups, 1 failed" in table["says"]


def test_a_rehearsal_of_a_failure(rehearsed, monkeypatch):
    """In forks, which have imported everything; `funccoll run` starts them for the slow tests."""

    def run_job(count, function, *arguments):
        module, _, name = function.partition(":")
        script = f"from tests.gpu_check.{module} import {name}\n{name}(*{arguments})"
        with Ranks(script, range(count), FUNCCOLL_DEVICE=gpu_trial.device()) as ranks:
            lines = [line for rank in range(count) for line in ranks.end(rank)[1]]
        return SimpleNamespace(stdout="\n".join(lines))

    monkeypatch.setattr(gpu_jobs, "run_job", run_job)
    gpu_jobs.failure("raise")
    (finding,) = rehearsed()
    assert "rank 1 raised ValueError: rank 1 has had enough" in finding["says"]


def test_a_rehearsal_of_a_training_step(rehearsed, monkeypatch):
    from benchmarks import measure

    def no(name):
        raise gpu_trial.Skipped(f"without {name}")

    monkeypatch.setattr(gpu_trial, "require", no)  # both take seconds to import
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-4)
    gpu_steps.compare("tiny", [4, 6, 3], 8)
    said = [f["says"] for f in rehearsed()]
    assert said[1:3] == ["skipped: without jax", "skipped: without torch"]
    assert "funccoll on 2 virtual devices" in said[-1]


# ---------------------------------------------------------------- the path to a GPU, over CuPy's fake


@pytest.fixture
def faked(monkeypatch, rehearsed):
    """CuPy's fake with a GPU in place of the CPU; returns the findings so far."""
    monkeypatch.delenv("FUNCCOLL_GPU_CHECK_REHEARSES")
    for name, module in fake_cuda.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("cupy_gpu", "cupy_kernels"):
        monkeypatch.delitem(sys.modules, f"funccoll.platforms.gpu.{name}", raising=False)
    kernels = importlib.import_module("funccoll.platforms.gpu.cupy_kernels")
    gpu_threads.install(kernels, monkeypatch)
    monkeypatch.setattr(cublas, "find_library", lambda version: FakeCublas())
    monkeypatch.setattr(gpu_trial, "driver", lambda: "CUDA 13.0")

    def asarray(x):
        block = fake_cupy.empty(np.shape(x), x.dtype)
        block.set(np.asarray(x, order="C"))
        return block

    monkeypatch.setitem(vars(fake_cupy), "asarray", asarray)
    current_gpu.cache_clear()
    NO_MESH.on_devices = {}
    yield rehearsed
    current_gpu.cache_clear()
    NO_MESH.on_devices = {}


def test_compute_on_the_fake_of_a_gpu(faked):
    """Every 10th function, with its gradients, by kernels, captured and replayed: the whole of the part's own way."""
    gpu_compute.compare(0, 10)
    gpu_compute.exact()
    findings = faked()
    assert not [f for f in findings if "failed" in f]
    count = int(findings[-8]["says"].partition(" functions")[0])
    assert count > 25 and len(findings) == count + 2 + 6
    assert re.fullmatch(r"\d+ captured", findings[-7]["says"])


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (gpu_programs.control, (0, 4), ["36 loops, branches and their gradients, 0 failed", "22 captured, 14 not captured"]),
        (gpu_programs.indices, (), ["33 wrong indices, 0 failed", "32 captured"]),
        (gpu_programs.graphs, (), ["then kernel by kernel; its CUDA graph was dropped", "3 limits of graphs, 0 failed"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_programs_on_the_fake_of_a_gpu(function, arguments, words, faked):
    function(*arguments)
    says = [f.get("failed", f["says"]) for f in faked()]
    assert len(says) == len(words) and all(wanted in said for wanted, said in zip(words, says, strict=True)), says


def test_a_trial_of_programs_finds_other_values(rehearsed):
    """Of each case alone: values beyond the limit, a call with other bits, and an index that raised nothing."""
    cases, mesh = gpu_programs._Cases(), fc.make_mesh({"one": 1})
    calls, count = iter((1.0, 1.5, 2.0)), iter(range(9))
    wrong = lambda x: x + (0.0 if next(count) == 0 else 1e-6)  # traced for the CPU first, then for the GPU
    cases("values", lambda: gpu_programs.same_values("value", wrong, (np.ones(3),), mesh, cases.graphs, 64))
    cases("bits", lambda: gpu_kernels.check([[np.float64(next(calls)).tobytes()]], [[np.float64(2).tobytes()]], "call 2"))
    assert cases.failed == 2
    said = [f["failed"] for f in rehearsed()]
    assert "value: off by 4.5e+09 roundings" in said[0] and "call 2: result 0 of device 0 differs from byte" in said[1]


def test_graphs_of_the_fake_are_recognised(faked, monkeypatch):
    from benchmarks import measure

    monkeypatch.setattr(gpu_speed, "gpu_seconds", lambda call, times: [(call(), 1e-3)[1] for _ in range(3)])
    monkeypatch.setattr(gpu_speed, "copy_seconds", lambda nbytes: [1e-3] * 3)
    monkeypatch.setattr(gpu_speed, "_sizes", lambda *sizes: [4096])
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-4)
    gpu_speed.slots()
    gpu_steps.ours([4, 6, 3], 8, 1)
    slots, step = faked()
    assert slots["graph"] == "captured"
    assert "captured" in step["says"] and "not captured" not in step["says"]


@pytest.mark.parametrize(
    ("function", "arguments", "dtypes", "words"),
    [
        ("gpu_steps:ours", [[4, 6, 3], 8, 2], [], ["captured"]),
        ("gpu_kernels:bad_input", [], [], ["in host memory, and b", "17 virtual devices", "MemoryError"]),
        ("gpu_programs:arrays", [], [], ["7 uses of Arrays, 0 failed"]),
        ("gpu_programs:convolution", [], [], ["24 programs with convolution and pooling, 0 failed", "24 captured"]),
        ("gpu_kernels:compare", ["data_parallel", 2], [], ["data_parallel on 2 devices: 2 programs, 0 failed", "2 captured"]),
        ("gpu_kernels:compare", ["loops", 2], [], ["loops on 2 devices: 4 programs, 0 failed", "2 captured, 2 not captured"]),
        (
            "trials",
            [
                ["gpu_machine:smallest_kernel", [False, False]],
                ["gpu_machine:smallest_kernel", [True, True]],
                ["gpu_probe:barriers", [6]],
                ["gpu_probe:ping_pong", [4, 0, 10]],
                ["gpu_probe:ping_pong", [4, 0, 2]],
                ["gpu_check_simulation:early_release", []],
                ["gpu_kernels:one_kernel", []],
            ],
            [],
            [
                "runs: 16 blocks of 3 threads",
                "runs: 16 blocks of 3 threads",
                "the others at another: 16 blocks of 3 threads, 6 rounds",
                "late at the barrier of all: 16 blocks",
                "8 pairs, 4 rounds of 3 words",
                "FAILED block 0 waited in vain for its partner in round 2 of 4",
                "FAILED block 0 read 6 words that its partner had not written, as the worst of 16 of 16",
                "one kernel: compiled in",
            ],
        ),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "gpu_kernels:compare",
                    ["table", 2],
                    ["float32"],
                    ["table on 2 devices: 135 programs, 0 failed", "135 captured"],
                ),
                ("gpu_kernels:compare", ["programs", 4], [], ["programs on 4 devices: 3 programs, 0 failed", "3 captured"]),
                ("gpu_programs:ragged", [], [], ["12 random sizes of ragged collectives, 0 failed"]),
                ("gpu_speed:small", [4], [], ["the slope of 2 to 4 in one graph", "one jitted all_reduce"]),
            )
        ],
    ],
)
def test_collectives_on_the_fake_of_a_gpu(function, arguments, dtypes, words):
    """CuPy's fake, and simulated kernels: called, captured and replayed as on a GPU."""
    out = forked(f"from tests.gpu_check.gpu_check_simulation import main\nmain({function!r}, {arguments!r}, *{dtypes!r})")
    lines = [line.removeprefix(gpu_trial.MARK) for line in out.split("\n") if line.startswith(gpu_trial.MARK)]
    says = [f"{f['what']}: {f['says']}{f' FAILED {why}' if (why := f.get('failed')) else ''}" for f in map(json.loads, lines)]
    assert all(wanted in said for wanted, said in zip(words, says, strict=True)), says
    assert all((" FAILED " in said) == ("FAILED " in wanted) for wanted, said in zip(words, says, strict=True)), says
    assert int(re.search(r"(\d+) steps of the simulator", out)[1]) > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning")
def test_our_smallest_kernels_are_assembled_without_spills():
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: pip install 'funccoll[cuda13]'")
    from tests.gpu_check import gpu_machine, gpu_probe

    probes = [*gpu_probe.BARRIERS.values(), gpu_probe.PING_PONG]
    for probe, cc in zip(probes, ((8, 0), (9, 0), (10, 0)), strict=True):  # our kernels are compiled for all of them
        made = compile_template(probe.template(), probe.arguments, cc)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in made.log and "0 bytes lmem" in made.log
        assert len(re.findall(r"\bbar(rier)?\.", made.ptx)) >= 2
        assert probe is not probes[0] or made.ptx.count("barrier.sync 0;") >= 5  # in two places; loops may be unrolled
        assert all((words in made.ptx) == (probe is gpu_probe.PING_PONG) for words in ("ld.acquire.", "st.release."))

    assert len(gpu_kernels.combines()) == len(set(gpu_kernels.combines())) > 18
    kernel = gpu_machine.compile_smallest((9, 0))
    assert kernel.code[:4] == b"\x7fELF" and kernel.ptx.count("st.") == 1
