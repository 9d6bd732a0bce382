"""`make gpu-check` without a GPU: how its trials end, what it leaves, and its comparisons, which can fail."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.arrays.array_layout import NO_MESH
from funccoll.core.mesh import Mesh
from funccoll.job import doctor
from funccoll.kernels import cuda_toolkit
from funccoll.kernels.cuda_compiler import compile_template
from funccoll.platforms.gpu import cublas
from funccoll.platforms.host_device import HostDevice
from funccoll.transports.cuda import virtual_devices
from funccoll.transports.cuda.cuda_transport import current_gpu
from funccoll.transports.local.local_transport import LocalTransport
from tests.support.cases.all_numpy_cases import CASES
from tests.support.fakes import fake_cuda, fake_cupy
from tests.support.fakes.fake_cublas import FakeCublas
from tests.support.ranks.ranks import Ranks, forked

ROOT = Path(__file__).parents[2]

from tests.gpu_check import (
    gpu,
    gpu_compute,
    gpu_jobs,
    gpu_kernels,
    gpu_programs,
    gpu_speed,
    gpu_steps,
    gpu_summary,
    gpu_torch,
    gpu_trial,
)
from tests.gpu_check.gpu_parts import FACTS, FIRST_SECONDS, PARTS, Part, Trial

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
without_gpu = pytest.mark.skipif(not gpu_trial.driver().startswith("no driver"), reason="this machine has a driver of GPUs")

# ---------------------------------------------------------------- the command

STAND_INS = """
    import os, signal, subprocess, sys, time
    from tests.gpu_check.gpu_trial import Skipped, found

    def fine(number):
        found("a number", f"it is {number}", figure=True)

    def skipped():
        raise Skipped("there is nothing to run it on")

    def raises():
        found("before", "this was found")
        raise ValueError("it is broken")

    def fails():
        found("one case", failed="0 in place of 1")
        found("another case", "is right")

    def hangs(file):
        found("before", "this was found")
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(file, "w") as out:
            out.write(str(left.pid))
        left.wait()

    def dies():
        print("on its way", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves(file):
        line = [sys.executable, "-c", "import time; time.sleep(600)"]
        left = [subprocess.Popen(line), subprocess.Popen(line, start_new_session=True)]  # which keep its output open
        with open(file, "w") as out:
            out.write(" ".join(str(one.pid) for one in left))

    def misuses():
        from tests.gpu_check import gpu_summary
        gpu_summary.summary(None)

    def many():
        for number in range(60):
            found(f"case {number}", failed=f"case {number} is wrong, as is all that comes after it " * 5)
"""
QUIET = {"facts": Part("", (Trial("facts", "gpu_machine:facts"),))}


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Trials that end in all ways, in a module that a trial's process imports."""
    (tmp_path / "stand_ins.py").write_text(textwrap.dedent(STAND_INS))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def is_gone(file: Path) -> bool:
    """True when the processes of these numbers have ended; each is waited for as long as a killed one may take."""

    def ends(number: str) -> bool:
        for _ in range(500):
            try:
                if Path("/proc", number, "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return True
            except (FileNotFoundError, ProcessLookupError):
                return True
            time.sleep(0.01)
        return False

    return all(map(ends, file.read_text().split()))


def trial(name: str, *arguments: object, seconds: float = 30) -> Trial:
    return Trial(name, f"stand_ins:{name}", arguments, seconds)


@pytest.mark.usefixtures("stand_ins")
def test_every_end_of_a_trial_is_told_and_the_others_go_on(tmp_path, capsys):
    out, left, pids = tmp_path / "out", tmp_path / "left", tmp_path / "hanging"
    parts = {
        "one": Part("in a row", (trial("fine", 1), trial("raises"), trial("fails"), trial("skipped"), trial("misuses"))),
        "two": Part("at once", (trial("hangs", str(pids), seconds=2), trial("dies"), trial("leaves", str(left)),
                                trial("fine", 2)), 4),
    }  # fmt: skip
    assert gpu.Check(out).run(parts) == 1
    report = json.loads((out / "gpu.json").read_text())
    ends = {name: (t["state"], t.get("why", "")) for part in parts for name, t in report[part]["trials"].items()}
    assert ends.pop("dies")[0] == "failed"
    state, why = ends.pop("hangs")  # its own line is in no file of ours
    assert state == "stopped" and re.fullmatch(r"after \d s, at tests/gpu_check/gpu_trial.py:\d+, in main", why)
    state, why = ends.pop("misuses")
    assert state == "failed" and re.search(r"^AttributeError.*items.* \(tests/gpu_check/gpu_summary.py:\d+, in summary\)$", why)
    raised = ends["raises"][1]
    assert raised.startswith("ValueError: it is broken (tests/gpu_check/gpu_trial.py:")
    assert ends == {
        "fine": ("done", ""), "raises": ("failed", raised), "fails": ("failed", "0 in place of 1"),
        "skipped": ("skipped", "there is nothing to run it on"), "leaves": ("done", ""),
    }  # fmt: skip
    trials = report["one"]["trials"] | report["two"]["trials"]
    assert trials["hangs"]["findings"][0]["says"] == trials["raises"]["findings"][0]["says"] == "this was found"
    assert "exit code -9" in trials["dies"]["why"] and "on its way" in trials["dies"]["output"]
    assert "Traceback" in trials["raises"]["output"]
    assert is_gone(pids) and is_gone(left)
    printed = capsys.readouterr().out
    assert printed.startswith("driver ")  # before all else
    assert "  fails: one case: FAILED: 0 in place of 1" in printed and "a number: it is 2" in printed
    assert "    |     raise ValueError" in printed and printed.index("    |     raise") < printed.index("  fails: one case")
    assert (out / "summary.txt").read_text() in printed
    assert {file.name for file in out.iterdir()} == {"gpu.json", "summary.txt", "log.txt"}  # at most 8


@pytest.mark.usefixtures("stand_ins")
def test_what_does_not_fit_is_not_begun_and_earlier_parts_stay(tmp_path):
    assert gpu.Check(tmp_path / "out").run({"one": Part("", (trial("fine", 1),))}) == 0
    late = gpu.Check(tmp_path / "out", total=0.5)
    assert late.run({"two": Part("", (trial("raises"),))}) == 0
    log = (tmp_path / "out" / "log.txt").read_text().splitlines()
    assert [line.partition(": ")[2] for line in log if line.startswith("=== ")] == ["one", "two"]  # appended
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert report["two"]["trials"]["raises"] == {"state": "not run", "findings": [], "why": "no time was left"}
    assert report["one"]["trials"]["fine"]["state"] == "done"
    assert gpu.main(["--join", str(tmp_path / "out" / "gpu.json"), "--out", str(tmp_path / "joined")]) == 0
    assert json.loads((tmp_path / "joined" / "gpu.json").read_text()) == report


@pytest.mark.usefixtures("stand_ins")
def test_a_run_that_is_told_to_end_leaves_a_summary(tmp_path):
    check, pids = gpu.Check(tmp_path / "out"), tmp_path / "hanging"

    def tell() -> None:
        while not pids.exists() or not pids.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=tell).start()
    assert check.run({"one": Part("", (trial("hangs", str(pids)), trial("fine", 1)))}) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert is_gone(pids)
    text = (tmp_path / "out" / "summary.txt").read_text()
    assert "one, hangs: stopped: after" in text and "one, fine: not run" in text


def test_a_process_that_cannot_be_ended_holds_up_no_other(monkeypatch):
    line = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = subprocess.Popen(line, env={**os.environ, gpu_trial.TRIAL: "one"}, start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "_TO_END", 0.0)
        patch.setattr(gpu.os, "kill", lambda *_: None)  # as of a process in a call of the driver's
        assert gpu._end(process, "one") == [process.pid]
    assert gpu._end(process, "one") == [] and process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("stand_ins")
def test_the_summary_is_one_page(tmp_path):
    parts = {f"part {n}": Part("", (trial("many"), trial("fine", n))) for n in range(3)}
    assert gpu.Check(tmp_path).run(parts) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    report |= {f"part {n}": report["part 0"] for n in range(3, 9)}
    for number in range(40):
        report["part 0"]["trials"]["fine"]["findings"].append({"what": f"figure {number}", "says": "1 µs " * 50, "figure": 1})
    report["part 1"]["trials"]["fine"]["findings"][0] |= {"goal": "≥ 80 %", "met": False}
    page = gpu_summary.summary(report).splitlines()
    assert len(page) <= gpu_summary.LINES and max(map(len, page)) <= gpu_summary.WIDTH
    assert any(line.startswith("a number [≥ 80 %: MISSED]: it is 1") for line in page)
    assert any("more lines in gpu.json" in line for line in page)


def test_the_readmes_table_is_the_recorded_run():
    from benchmarks import readme_table

    begin, end = readme_table.marks("gpu")
    assert (ROOT / "README.md").read_text().partition(begin)[2].partition(end)[0].strip() == readme_table.gpu()
    facts = {"what": "machine", "says": "a GPU", "driver": "CUDA 13.0", "nccl": 23000}
    goal = {"what": "all_reduce", "says": "7 µs", "figure": True, "goal": "≤ 10 µs", "met": False}
    part = {"about": "parts", "commit": "abc", "trials": {"facts": {"state": "done", "findings": [facts, goal]}}}
    text = readme_table.gpu_tables({"facts": part, "speed": part})
    assert "| speed | parts | 1 done |" in text and "| all_reduce | 7 µs | ≤ 10 µs: **missed** |" in text
    assert text.endswith("commit abc on a GPU; driver CUDA 13.0, NCCL 23000.")


@without_gpu
def test_without_a_gpu_all_parts_are_skipped_with_the_reason():
    for part in PARTS.values():
        for one in part.trials:
            with pytest.raises(gpu_trial.Skipped, match="no driver"):
                gpu_trial.function_of(one.function)(*json.loads(json.dumps(one.arguments)))


@without_gpu
def test_the_command_ends_well_without_a_gpu(tmp_path):
    done = subprocess.run(
        ["make", "-C", str(ROOT), "gpu-check", f"PYTHON={sys.executable}", f"OUT_DIR={tmp_path / 'out'}",
         "PARTS=nccl,memcheck", "TOTAL=60"], capture_output=True, text=True, timeout=200,
        env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "driver no driver (libcuda.so.1), nvvm" in done.stdout.splitlines()[2]  # after make's own two
    assert "nccl: 2 skipped" in done.stdout and "memcheck: 1 skipped" in done.stdout
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(found) == {"facts", "nccl", "memcheck"}


def test_the_table_of_parts():
    names = "first machine kernels compute programs graphs processes nccl digits interop torch memcheck speed"
    assert [*PARTS] == names.split()
    for part in (FACTS, *PARTS.values()):
        assert len({one.name for one in part.trials}) == len(part.trials)
        for one in part.trials:
            function = gpu_trial.function_of(one.function)
            inspect.signature(function).bind(*one.arguments)
            assert one.seconds <= gpu.LIMIT <= 480 and function.__doc__
    every = [json.dumps([one.function, one.arguments]) for part in PARTS.values() for one in part.trials]
    assert len(set(every)) == len(every)  # no minute of a GPU is spent twice
    first = (*FACTS.trials, *PARTS["first"].trials)
    assert sum(one.seconds for one in first) <= FIRST_SECONDS <= 480 and PARTS["first"].at_once == 1
    assert "probe" in PARTS["first"].trials[0].function
    assert gpu.options([]).parts == [*PARTS] and gpu.options(["--parts", "speed,rest"]).parts[0] == "speed"
    assert {*gpu.options(["--parts", "rest"]).parts} == {*PARTS} - {"first"}
    with pytest.raises(SystemExit):
        gpu.options(["--parts", "machine,no_such_part"])


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


@pytest.mark.parametrize(("returns", "words"), [
    (lambda kept: kept[-1], ""), (in_place, "what call 1 returned, after call 2: result 0 of device 0 differs"),
    (lambda kept: kept[0], "call 2: result 0"), (lambda kept: kept[-1] if len(kept) < 3 else kept[1], "call 3: result 0"),
    (lambda kept: [np.nextafter(x, np.float32(99)) for x in kept[-1]], "call 1: result 0 of device 0 differs from byte"),
])  # fmt: skip
def test_other_bits_and_results_that_change_are_found(returns, words, rehearsed):
    same = gpu_kernels.SameBits(lambda axes: Mesh(axes, range(2), transport=reusing(returns)))
    same(scaled, {"d": 2}, (np.arange(6, dtype=np.float32),), P("d"), P())
    assert [words in failure for failure in same.failures] == ([True] if words else [])
    assert [f["what"] for f in rehearsed()] == (["program 1"] if words else [])


def test_values_within_a_number_of_roundings(rehearsed):
    for factor, last, words in (
        (1 + 2**-20, 0, ""), (1 + 2**-8, 0, "call 1: result 0 is off by"), (1 + 2**-20, 2**-19, "call 3: result 0 of device"),
    ):  # fmt: skip
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


@pytest.mark.parametrize(("function", "arguments", "words"), [
    (gpu_kernels.compare, ("programs", 4), "programs on 4 devices: 3 programs, 0 failed"),
    (gpu_compute.compare, (5, 40), "8 functions, .* gradients, 0 failed"),
    (gpu_compute.exact, (), "normal numbers.*off by 0 roundings"),
    (gpu_speed.small, (6,), "the slope of 2 to 6 in one graph"),
    (gpu_speed.slots, (), "a graph with 2 arguments and 2 results"),
    (gpu_speed.behind, (), "two calls behind a stream that is busy"),
    (gpu_speed.large, (), "all_reduce, 8 devices x 0 MiB.*of the limit"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (gpu_jobs.failure, ("raise",), "rank 1 raised ValueError: rank 1 has had enough"),
        (gpu_jobs.compare, ("programs", 2), "programs in 2 processes over shm: 3 programs"),
        (gpu_programs.job_arrays, (), "2 processes: redistributed, gathered"),
    )),
    pytest.param(gpu_torch.train, (2,), "2 processes on 1 GPU.* over shm: 11 cases.*a step of a torch MLP",
                 marks=[needs_torch, pytest.mark.slow]),
])  # fmt: skip
def test_a_rehearsal_on_the_cpu(function, arguments, words, rehearsed, monkeypatch):
    monkeypatch.setattr(gpu_speed, "_sizes", lambda *sizes: [4096])
    function(*arguments)
    findings = rehearsed()
    assert not [f for f in findings if "failed" in f]
    assert re.search(words, " ".join(f"{f['what']} {f['says']}" for f in findings)), findings


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
    monkeypatch.setattr(kernels, "CupyKernels", fake_cupy.Kernels)
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


@pytest.mark.parametrize(("function", "arguments", "words"), [
    (gpu_programs.control, (0, 4), ["36 loops, branches and their gradients, 0 failed", "22 captured, 14 not captured"]),
    (gpu_programs.indices, (), ["33 wrong indices, 0 failed", "32 captured"]),
    (gpu_programs.graphs, (), ["then kernel by kernel; its CUDA graph was dropped", "3 limits of graphs, 0 failed"]),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
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


@pytest.mark.parametrize(("function", "arguments", "dtypes", "words"), [
    ("gpu_steps:ours", [[4, 6, 3], 8, 2], [], ["captured"]),
    ("gpu_kernels:bad_input", [], [], ["in host memory, and b", "17 virtual devices", "MemoryError"]),
    ("gpu_programs:arrays", [], [], ["7 uses of Arrays, 0 failed"]),
    ("gpu_programs:convolution", [], [], ["24 programs with convolution and pooling, 0 failed", "24 captured"]),
    ("gpu_kernels:compare", ["data_parallel", 2], [], ["data_parallel on 2 devices: 2 programs, 0 failed", "2 captured"]),
    ("gpu_kernels:compare", ["loops", 2], [], ["loops on 2 devices: 4 programs, 0 failed", "2 captured, 2 not captured"]),
    ("trials", [
        ["gpu_machine:smallest_kernel", [False, False]], ["gpu_machine:smallest_kernel", [True, True]],
        ["gpu_probe:barriers", [6]], ["gpu_probe:ping_pong", [4, 0, 10]], ["gpu_probe:ping_pong", [4, 0, 2]],
        ["gpu_check_simulation:early_release", []], ["gpu_kernels:one_kernel", []],
    ], [], [
        "runs: 16 blocks of 3 threads", "runs: 16 blocks of 3 threads",
        "the others at another: 16 blocks of 3 threads, 6 rounds", "late at the barrier of all: 16 blocks",
        "8 pairs, 4 rounds of 3 words", "FAILED block 0 waited in vain for its partner in round 2 of 4",
        "FAILED block 0 read 6 words that its partner had not written, as the worst of 16 of 16",
        "one kernel: compiled in",
    ]),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpu_kernels:compare", ["table", 2], ["float32"], ["table on 2 devices: 111 programs, 0 failed", "111 captured"]),
        ("gpu_kernels:compare", ["programs", 4], [], ["programs on 4 devices: 3 programs, 0 failed", "3 captured"]),
        ("gpu_speed:small", [4], [], ["the slope of 2 to 4 in one graph", "one jitted all_reduce"]),
    )],
])  # fmt: skip
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
        assert "0 bytes stack context, 0 bytes spill stores, 0 bytes spill loads" in made.log and "0 bytes lmem" in made.log
        assert len(re.findall(r"\bbar(rier)?\.", made.ptx)) >= 2
        assert probe is not probes[0] or made.ptx.count("barrier.sync 0;") >= 5  # in two places; loops may be unrolled
        assert all((words in made.ptx) == (probe is gpu_probe.PING_PONG) for words in ("ld.acquire.", "st.release."))

    assert len(gpu_kernels.combines()) == len(set(gpu_kernels.combines())) > 18
    kernel = gpu_machine.compile_smallest((9, 0))
    assert kernel.code[:4] == b"\x7fELF" and kernel.ptx.count("st.") == 1




# ---------------------------------------------------------------- funccoll doctor


@pytest.mark.parametrize(("driver", "cupy", "state", "words"), [
    (None, "", "absent", "not found"), (13000, "cupy-cuda13x", "ok", "knows CUDA 13.0"),
    (12040, "cupy-cuda13x", "warning", "knows CUDA 12.4, and cupy-cuda13x needs a newer one"),
    (12040, "cupy-cuda12x", "ok", "knows CUDA 12.4"), (0, "", "warning", "fails with error 35"),
])  # fmt: skip
def test_doctor_compares_the_driver_with_cupy(driver, cupy, state, words, monkeypatch):
    def load(name):
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(name)

        def version(place):
            place._obj.value = driver
            return 0 if driver else 35

        return SimpleNamespace(cuDriverGetVersion=version)

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    monkeypatch.setattr(doctor, "_version", lambda name: "14.2" if name == cupy else "")
    found = doctor._driver("GPUs")
    assert (found.state, words in found.value) == (state, True)
    assert ("funccoll[cuda12]" in found.advice) == ("newer one" in words)


def test_doctor_finds_libraries_of_a_toolkit(monkeypatch, tmp_path):
    def parts():
        return {finding.name: finding for finding in doctor._gpus()}

    monkeypatch.setattr(doctor, "_version", lambda name: "")
    monkeypatch.setattr(cuda_toolkit, "_USUAL", ())
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert parts()["NVVM"].value.startswith("neither in a CUDA toolkit nor installed with pip (the kernel's compiler: ")
    assert parts()["NCCL"].value.startswith("not installed with pip")
    place = tmp_path / "nvvm" / "lib64" / "libnvvm.so.4"
    place.parent.mkdir(parents=True)
    place.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert (parts()["NVVM"].state, parts()["NVVM"].value) == ("ok", f"{place} (the kernel's compiler)")
    assert parts()["nvJitLink"].state == "absent"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(cuda_toolkit, "_USUAL", (str(tmp_path),))
    assert parts()["NVVM"].state == "ok"


def test_make_names_the_toolkit(tmp_path):
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "CUDA_PATH", "CUDA_HOME")}
    usual = "/usr/local/cuda" if Path("/usr/local/cuda").exists() else ""
    for given, wanted in (({"CUDA_PATH": str(tmp_path)}, str(tmp_path)), ({"CUDA_HOME": "/home"}, "/home"), ({}, usual)):
        done = subprocess.run(
            ["make", "-s", "-C", str(ROOT), "gpu-check", "PYTHON=printenv CUDA_HOME #"], capture_output=True, text=True,
            env=clean | given,
        )  # fmt: skip
        assert done.stdout.strip() == wanted
        assert (done.returncode == 0) == bool(wanted), "an empty variable"
