"""`make gpu-check` without a GPU: how its trials end, what it leaves, and its comparisons, which can fail."""

from __future__ import annotations

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

import pytest

from funccoll.job import doctor
from funccoll.kernels import cuda_toolkit
from tests.gpu_check import gpu, gpu_summary, gpu_trial
from tests.gpu_check.gpu_parts import FACTS, FIRST_SECONDS, PARTS, Part, Trial
from tests.support.trials import trial

pytestmark = pytest.mark.covers("gpu-check")

ROOT = Path(__file__).parents[2]
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


@pytest.mark.usefixtures("stand_ins")
def test_every_end_of_a_trial_is_told_and_the_others_go_on(tmp_path, capsys):
    out, left, pids = tmp_path / "out", tmp_path / "left", tmp_path / "hanging"
    parts = {
        "one": Part("in a row", (trial("fine", 1), trial("raises"), trial("fails"), trial("skipped"), trial("misuses"))),
        "two": Part(
            "at once", (trial("hangs", str(pids), seconds=2), trial("dies"), trial("leaves", str(left)), trial("fine", 2)), 4
        ),
    }
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
        "fine": ("done", ""),
        "raises": ("failed", raised),
        "fails": ("failed", "0 in place of 1"),
        "skipped": ("skipped", "there is nothing to run it on"),
        "leaves": ("done", ""),
    }
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
    from benchmarks import result_tables

    assert result_tables.shown("gpu") == result_tables.gpu()
    facts = {"what": "machine", "says": "a GPU", "driver": "CUDA 13.0", "nccl": 23000}
    goal = {"what": "all_reduce", "says": "7 µs", "figure": True, "goal": "≤ 10 µs", "met": False}
    part = {"about": "parts", "commit": "abc", "trials": {"facts": {"state": "done", "findings": [facts, goal]}}}
    text = result_tables.gpu_tables({"facts": part, "speed": part})
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
        [
            "make",
            "-C",
            str(ROOT),
            "gpu-check",
            f"PYTHON={sys.executable}",
            f"OUT_DIR={tmp_path / 'out'}",
            "PARTS=nccl,memcheck",
            "TOTAL=60",
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "driver no driver (libcuda.so.1), nvvm" in done.stdout.splitlines()[2]  # after make's own two
    assert "nccl: 2 skipped" in done.stdout and "memcheck: 1 skipped" in done.stdout
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(found) == {"facts", "nccl", "memcheck"}


def test_the_table_of_parts():
    names = "first machine kernels compute programs fusion graphs processes nccl digits interop torch memcheck speed"
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


# ---------------------------------------------------------------- funccoll doctor


@pytest.mark.parametrize(
    ("driver", "cupy", "state", "words"),
    [
        (None, "", "absent", "not found"),
        (13000, "cupy-cuda13x", "ok", "knows CUDA 13.0"),
        (12040, "cupy-cuda13x", "warning", "knows CUDA 12.4, and cupy-cuda13x needs a newer one"),
        (12040, "cupy-cuda12x", "ok", "knows CUDA 12.4"),
        (0, "", "warning", "fails with error 35"),
    ],
)
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
            ["make", "-s", "-C", str(ROOT), "gpu-check", "PYTHON=printenv CUDA_HOME #"],
            capture_output=True,
            text=True,
            env=clean | given,
        )
        assert done.stdout.strip() == wanted
        assert (done.returncode == 0) == bool(wanted), "an empty variable"
