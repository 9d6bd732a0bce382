"""Calibration: the fit recovers parameters, the load is judged, and `funccoll tune` with real processes."""

import json
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.config import MACHINE_PROFILE
from funccoll.core import host_identity, machine_profile
from funccoll.core.machine_profile import DIRECT_READS, HostParameters, load, save
from funccoll.schedules import build, select
from funccoll.tools.calibration import machine_load
from funccoll.tools.calibration.direct_read_timings import least_bytes, time_direct_reads
from funccoll.tools.calibration.fit_parameters import Sample, fit, predicted
from funccoll.tools.calibration.machine_load import OtherProcesses, excess
from funccoll.tools.calibration.timed_cases import (
    ALGORITHMS,
    QUICK_SIZES,
    SIZES,
    Case,
    cases,
    default_ranks,
    fitting_sizes,
)
from funccoll.tools.calibration.tuning import measured_times, profile_of, samples_of
from funccoll.tools.commands import tune_command
from tests.support.example_counts import examples
from tests.support.machine_profiles import any_parameters, in_use, parameters, profile
from tests.support.processes_left import VARIABLE as MARK
from tests.support.processes_left import marked
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("tune", "commands")

# ---------------------------------------------------------------- the fit


def synthetic(truth, p, noise=None, sizes=SIZES):
    found = []
    for case in cases(p, sizes):
        seconds = predicted(truth, build(case.kind, p, case.algorithm), case.nbytes)
        found.append(Sample(*case, seconds * (1 if noise is None else next(noise))))
    return found


def numbers(found):
    return [found.start, found.alpha, found.beta, found.gamma, *(x for pair in found.caches for x in pair)]


truths = st.builds(
    HostParameters,
    st.just(2),
    st.floats(1e-7, 1e-5),
    st.floats(5e-8, 5e-6),
    st.floats(2e-11, 1e-9),
    st.floats(1e-11, 1e-9),
    st.tuples(
        st.tuples(st.floats(2.0**17, 2.0**19), st.floats(0.5, 4.0)), st.tuples(st.floats(2.0**21, 2.0**23), st.floats(2.0, 8.0))
    ),
)


@given(truths, st.integers(2, 5))
@examples(8, few=1)
def test_the_fit_recovers_the_parameters(truth, p):
    truth = replace(truth, ranks=p)
    found = fit(synthetic(truth, p), p)
    assert max(abs(r - 1) for r in found.ratios) < 0.01 and found.typical_error < 0.003
    assert numbers(found.parameters) == pytest.approx(numbers(truth), rel=0.1)


@given(truths, st.integers(0, 1000))
@examples(4)
@pytest.mark.slow
def test_outliers_and_noise_do_not_carry_it_away(truth, seed):
    rng = np.random.default_rng(seed)
    # Every tenth time is five times too long.
    noise = iter(np.where(rng.random(1000) < 0.1, 5.0, np.exp(rng.normal(0, 0.03, 1000))))
    found = fit(synthetic(truth, 2, noise), 2)
    exact = [predicted(found.parameters, build(s.kind, 2, s.algorithm), s.nbytes) / s.seconds for s in synthetic(truth, 2)]
    assert np.median(np.abs(np.array(exact) - 1)) < 0.1


@pytest.mark.parametrize("absent", ["alpha", *(pytest.param(name, marks=pytest.mark.slow) for name in ("start", "gamma"))])
def test_parameters_are_never_negative(absent):
    truth = replace(parameters(2, 1e-6, 1e-6, 1e-10, 1e-10), **{absent: 0.0})
    found = fit(synthetic(truth, 2), 2)
    assert min(numbers(found.parameters)) >= 0 and getattr(found.parameters, absent) < 2e-8
    assert max(abs(r - 1) for r in found.ratios) < 0.05


@pytest.mark.slow
def test_a_machine_without_a_limit_of_caches():
    truth = parameters(2, 1e-6, 1e-6, 1e-10, 1e-10, ())
    assert max(abs(r - 1) for r in fit(synthetic(truth, 2), 2).ratios) < 0.02


def test_too_few_times_are_refused():
    with pytest.raises(ValueError, match="7 measured times cannot determine 8 parameters"):
        fit(synthetic(parameters(), 2)[:7], 2)


# ---------------------------------------------------------------- what is measured


@given(any_parameters, st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 6), st.sampled_from(SIZES))
@examples(30)
def test_what_is_chosen_was_measured(found, kind, p, n):
    with in_use(profile(found)):
        assert select(kind, p, n).algorithm in ALGORITHMS[kind]


def test_cases_have_sizes_that_ranks_can_share():
    for p in (2, 3, 4):
        assert {(c.kind, c.algorithm) for c in cases(p, SIZES)} == {(k, n) for k, names in ALGORITHMS.items() for n in names}
        for case in cases(p, SIZES):
            assert case.nbytes % (4 * p) == 0
    assert cases(2, (1, 256)) == [c for k, ns in ALGORITHMS.items() for n in ns for c in (Case(k, n, 8), Case(k, n, 256))]


def test_numbers_of_ranks_and_sizes_that_fit():
    assert [default_ranks(n) for n in (1, 2, 3, 4, 8, 12, 64)] == [
        [2],
        [2, 4],
        [2, 6],
        [2, 4, 8],
        [2, 4, 8],
        [2, 4, 8],
        [2, 4, 8, 16],
    ]
    assert fitting_sizes(SIZES, 4, 1 << 40) == SIZES and fitting_sizes(SIZES, 4, 32 << 20) == SIZES[:-2]


def test_medians_and_quartiles():
    made = [Case("all_reduce", "two_shot", 8), Case("all_reduce", "two_shot", 16), Case("broadcast", "flat", 8)]
    owner, flat = measured_times(2, made, [[3.0, 1.0, 2.0], [5.0, 5.0, 8.0], [1.00004, 1.00004]])
    assert (owner.nbytes, owner.seconds, owner.low, owner.high) == ((8, 16), (2.0, 5.0), (1.5, 5.0), (2.5, 6.5))
    assert flat.seconds == (1.0,)


def test_a_profile_of_times():
    truth = parameters(2, 1e-6, 5e-7, 1e-10, 5e-11, ((2.0**18, 1.0), (2.0**22, 3.0)))
    samples = synthetic(truth, 2)
    times = measured_times(2, [Case(*s[:3]) for s in samples], [[s.seconds] * 3 for s in samples])
    found = profile_of(times, {"others_during": 0.5})
    assert [s[:3] for s in sorted(samples_of(times, 2))] == [s[:3] for s in sorted(samples)]
    assert numbers(found.parameters_for(2)) == pytest.approx(numbers(truth), rel=0.1)
    assert found.load["others_during"] == 0.5 and found.load["load_1"] >= 0 and found.host == host_identity.this_host()


# ---------------------------------------------------------------- the load


def test_how_the_load_is_judged(monkeypatch):
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 8)
    monkeypatch.setattr(machine_load.host, "cores", lambda: 4)
    assert excess(0.0, 64) == "" and excess(6.1, 2) == "" and excess(4.3, 4) == ""
    assert excess(6.5, 2) == (
        "other processes kept 6.5 of 8 processors busy (/proc/stat). 2 are needed, and others may use 10% of them"
    )
    assert "4 are needed" in excess(4.5, 64)  # as many as this process may use


def test_own_seconds_do_not_count(monkeypatch):
    busy = iter([100.0, 107.0])
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: next(clock))
    with OtherProcesses() as others:
        others.own = 4.0
    assert others.rate == 1.5


def test_seconds_of_all_processors():
    first = machine_load._busy_seconds()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert machine_load._busy_seconds() - first >= 0.05


# ---------------------------------------------------------------- the command


TUNE = [sys.executable, "-m", "funccoll", "tune"]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.delenv(MACHINE_PROFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def tune(capsys, *words):
    """(exit code, stdout, stderr) of the command in this process."""
    try:
        code = tune_command.main(words)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.processes
@pytest.mark.slow
def test_tune_measures_and_keeps(cache, capsys, monkeypatch):
    code, out, err = tune(capsys, "--quick", "--anyway")
    assert code == 0, err
    path = machine_profile.default_path()
    found = load(path)
    assert [p.ranks for p in found.parameters] == [2] and {m.kind for m in found.measured} == set(ALGORITHMS)
    assert all(m.nbytes == QUICK_SIZES and min(m.seconds) > 1e-8 and max(m.seconds) < 10 for m in found.measured)
    assert all(low <= t <= high for m in found.measured for low, t, high in zip(m.low, m.seconds, m.high, strict=True))
    assert "Measured times, 2 ranks" in out and "one_shot" in out and f"Stored in {path}." in out.replace("\n", "")
    assert max(map(len, out.splitlines()[:-1])) <= 80

    code, shown, err = tune(capsys, "--show")
    assert (code, err) == (0, "") and shown.splitlines()[:-1] == out.splitlines()[:-1]
    code, shown, err = tune(capsys, "--show", "--json")
    assert (code, err) == (0, "") and json.loads(shown) == found.to_json()


def test_a_profile_is_shown_and_deleted(cache, capsys):
    path = machine_profile.default_path()
    save(profile(), path)
    code, shown, err = tune(capsys, "--show")
    assert (code, err) == (0, "") and shown.replace("\n", "").endswith(f"Kept in {path}.")
    code, said, err = tune(capsys, "--delete")
    assert (code, err) == (0, "") and said.startswith(f"Deleted {path}.") and list(path.parent.iterdir()) == []
    assert tune(capsys, "--delete") == (1, "", f"funccoll tune: there is no machine profile {path}.\n")
    assert tune(capsys, "--show") == (
        1,
        "",
        f"funccoll tune: there is no machine profile {path}: `funccoll tune` measures this host.\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "1"], "'1' must be numbers of ranks from 2 to 256, such as 2 or 2,4"),
        (["-n", "2,x"], "'2,x' must be numbers of ranks"),
        (["-n", "2,999"], "'2,999' must be numbers of ranks"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--show", "--delete"], "not allowed with argument"),
    ],
)
def test_options_that_do_not_exist(capsys, words, said):
    code, out, err = tune(capsys, *words)
    assert (code, out) == (2, "") and said in err and "[--quick]" in err


def test_a_busy_machine_is_refused(cache, capsys, monkeypatch):
    save(profile(), machine_profile.default_path())
    before = machine_profile.default_path().read_bytes()
    monkeypatch.setattr(machine_load, "_TOLERATED", -100.0)  # as if it were busy, however many processors are idle
    code, out, err = tune(capsys, "--quick")
    assert (code, out) == (1, "") and err.startswith(
        "funccoll tune: this machine is too busy to be measured: before anything was measured other processes kept "
    )
    assert err.endswith("Measure when it is quiet, or take the times as they are with --anyway.\n")
    assert machine_profile.default_path().read_bytes() == before


def test_a_place_that_cannot_be_written_is_named_before_anything_is_measured(cache, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_command, "measure", None)
    code, out, err = tune(capsys, "--quick", "--anyway", "--out", str(tmp_path / "no" / "profile.json"))
    assert (code, out, err) == (
        1,
        "",
        (
            f"funccoll tune: the machine profile cannot be kept: there is no folder {tmp_path}/no. Name another "
            "file with --out.\n"
        ),
    )


def test_a_file_that_is_ignored_is_shown_with_the_reason(cache, capsys):
    path = machine_profile.default_path()
    save(profile(), path)
    path.write_text("{")
    code, out, err = tune(capsys, "--show")
    assert (code, out) == (1, "") and err == (
        f"funccoll tune: the machine profile {path} is ignored: it is not JSON. `funccoll tune` measures again.\n"
    )


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_the_old_profile_and_no_processes(cache, monkeypatch, number):
    monkeypatch.setenv(MARK, mark := uuid.uuid4().hex)
    path = machine_profile.default_path()
    save(profile(), path)
    before = path.read_bytes()
    with subprocess.Popen([*TUNE, "--anyway"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tuning:
        while len(marked(mark)) < 3 and tuning.poll() is None:  # the command and its two ranks
            time.sleep(0.01)
        tuning.send_signal(number)
        out, err = tuning.communicate(timeout=120)
    assert tuning.returncode == (130 if number == signal.SIGINT else -number) and out == ""
    if number == signal.SIGINT:
        assert err.endswith("funccoll tune: interrupted: no machine profile was stored, the old one stays.\n")
    while marked(mark):  # a rank ends when its parent has
        time.sleep(0.01)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------- the benchmark


BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def check_record(data):
    """The errors are those of the cases; the fit's cases and the held-out ones have none in common."""
    for result in data["results"]:
        cases = [c for c in data["cases"] if c["ranks"] == result["ranks"]]
        for model, groups in result["errors"].items():
            held_out = [c for c in cases if c["group"] != "fit"]
            for group, said in groups.items():
                some = held_out if group == "all held out" else [c for c in cases if c["group"] == group]
                off = [abs(c["predicted"][model] / c["measured"] - 1) for c in some]
                assert said["median"] == pytest.approx(np.median(off), rel=0.01, abs=0.002), (model, group)
                assert said["worst"] == pytest.approx(max(off), rel=0.01, abs=0.002), (model, group)
        key = lambda c: (c["kind"], c["algorithm"], c["nbytes"])
        fitted = {key(c) for c in cases if c["group"] == "fit"}
        assert held_out and fitted and not fitted & {key(c) for c in held_out}
        assert {c["kind"] for c in held_out} == {"all_reduce"}
    assert data["load"].keys() == {"others_before", "others_during", "disturbed_cases"} and data["machine"]["load_before"]


def test_the_record_says_what_its_numbers_say():
    data = json.loads((BENCHMARKS / "results" / "calibration.json").read_text())
    assert [result["ranks"] for result in data["results"]] == [2, 4]
    check_record(data)


@pytest.mark.slow
@pytest.mark.processes
def test_the_model_is_compared_with_real_processes(tmp_path):
    words = [sys.executable, "-m", "benchmarks.cost_model.calibration", "--quick"]
    words += ["--ranks", "2", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks: median and worst relative error" in done.stdout
    check_record(json.loads((tmp_path / "out.json").read_text()))


# ---------------------------------------------------------------- direct reads


@pytest.mark.parametrize(
    ("gains", "least"),
    [
        ([0.5, 0.9, 1.2, 2.0], 4),
        ([0.5, 1.1, 0.99, 2.0], 2),
        ([0.9, 0.8, 0.9, 0.99], 0),
        ([2.0, 1.5, 1.0, 0.9], 1),
        ([0.5, 3.0, 0.2, 0.9], 0),
    ],
)
def test_direct_reads_begin_where_they_gain_most(gains, least):
    assert least_bytes((1, 2, 4, 8), gains) == least


@pytest.mark.processes
@pytest.mark.slow
def test_direct_reads_are_timed_alike_on_all_ranks(monkeypatch):
    first, second = launch(time_direct_reads, 2, 2)
    assert first == second and {first.copied, first.combined} <= {0, *(1 << i for i in range(14, 22))}
    monkeypatch.setenv("FUNCCOLL_DIRECT_READS", "0")
    assert launch(time_direct_reads, 2, 2) == [DIRECT_READS] * 2
