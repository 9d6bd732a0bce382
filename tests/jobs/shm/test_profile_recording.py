"""Recording of profiles: real processes, their files, and the machine code without it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.core.host_identity import boot_id
from funccoll.errors import ProfileError
from funccoll.kernels import cpu, object_cache, stream_interpreter
from funccoll.profiling import Profile, runs_of
from funccoll.profiling.rank_record import BOOKKEEPING, COMPUTE, RECORDED, WAIT
from funccoll.runtime import recorder
from funccoll.tools import cli
from tests.support import SUPPORT
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("profiles")


def script(name, directory):
    return JOIN + f"from tests.support.ranks import profile_ranks\nprofile_ranks.{name}({str(directory)!r})\n"


def run(name, n, directory, **environment):
    """Run a program of `profile_ranks.py` to its end; the lines that each rank printed behind "in"."""
    with Ranks(script(name, directory), range(n), **environment) as ranks:
        printed = {}
        for rank in range(n):
            code, lines, err = ranks.end(rank)
            assert (code, err) == (0, ""), err
            printed[rank] = lines[1:]
    return printed


def spans(profile):
    """(thread, column) of all threads."""
    return [thread for record in profile.records for thread in record.threads]


# ---------------------------------------------------------------- what is recorded


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The profile of four ranks of which one is late."""
    directory = tmp_path_factory.mktemp("chain")
    run("chain", 4, directory)
    return Profile.load(directory)


@pytest.mark.slow
def test_a_chain_of_waits_leads_to_the_late_rank(chain):
    profile = chain
    assert (profile.nranks, profile.missing, profile.notes) == (4, [], [])
    blame = profile.blame
    assert blame.named == 3, profile
    first = next(cause for cause in blame.causes if not cause.machine)
    assert first.rank == 3 and first.doing.startswith("outside of any call") and first.source.startswith("profile_ranks.py:")
    line = int(first.source.partition(":")[2].partition(" ")[0])
    assert "y = rows(x)" in (SUPPORT / "ranks/profile_ranks.py").read_text().splitlines()[line - 1]
    # Ranks 0 and 1 have nothing to do with rank 3 but through rank 2 and each other.
    assert blame.waited[0, 3] == 0 and blame.caused[0, 3] > 0.2
    assert blame.caused[2, 3] > 0.2 and blame.caused[3].sum() < 0.2
    assert np.allclose(blame.waited.sum(), blame.caused.sum() + blame.machine + blame.unknown)


@pytest.mark.usefixtures("numpy_compute")  # the lines of a group are recorded as one
def test_a_rank_that_enters_late_and_the_lines_that_compute(tmp_path):
    run("late", 2, tmp_path)
    profile = Profile.load(tmp_path)
    blame = profile.blame
    assert blame.unknown == 0 and np.allclose(blame.waited.sum(), blame.caused.sum() + blame.machine)
    (cause,) = [cause for cause in blame.causes if cause.doing.startswith("not yet in the profile, which it entered at")]
    text = (SUPPORT / "ranks/profile_ranks.py").read_text().splitlines()
    line_of = lambda source: text[int(source.partition(":")[2].partition(" ")[0]) - 1]
    assert cause.rank == 1 and "with fc.profile(directory)" in line_of(cause.source) and cause.seconds > 0
    lines = {line.source: line for line in profile.lines}
    found = {line_of(source).partition("  # the ")[2]: source for source in lines}
    assert found["first line"].endswith(" (body) in outer") and lines[found["first line"]].operations == 2
    assert found["second line"].endswith(" (body) in outer/inner") and lines[found["second line"]].operations == 2
    assert found["third line"].endswith(" (body) in outer/inner")
    assert all(line.seconds > 0 for line in profile.lines) and [*profile.scopes][:2]
    assert {"outer", "outer/inner"} <= {*profile.scopes} and profile.scopes["outer/inner"][0] > 0  # it waits there
    assert np.isclose(sum(line.seconds for line in profile.lines), sum(row[3] for row in profile.scopes.values()))
    trace = json.loads(profile.to_perfetto())["traceEvents"]
    assert {event["args"].get("scope") for event in trace if event.get("cat") == "compute"} >= {"outer", "outer/inner"}
    names = [entry.text for entry in profile.timeline().draw().scene.legend]
    assert "compute: outer" in names and "wait" in names


def test_every_instruction_is_there_with_its_line(chain):
    for record in chain.records:
        (thread,) = record.threads
        plans = {n: fields for n, fields in record.definitions.items() if fields["kind"] == "plan"}
        calls = Counter(c for c in thread.calls[:, 2].tolist() if c in plans)
        assert sorted(calls.values()) == [3, 3]
        # A call that needs a fallback binds its arguments again.
        instructions = sum(calls[n] * (len(plans[n]["pc"]) - plans[n]["opcode"].count("BIND_ARG")) for n in calls)
        labels = np.array([text.partition(":")[0] for text, _ in thread.texts])[thread.text]
        assert np.count_nonzero((thread.kind < RECORDED) & (thread.kind != COMPUTE) & (labels != "BIND_ARG")) == instructions
        assert (thread.start[1:] >= thread.end[:-1]).all() and (thread.end >= thread.start).all()
        assert np.count_nonzero(thread.kind == COMPUTE) == 6 == len(thread.programs)
        text, source = thread.texts[thread.text[thread.kind == WAIT][0]]
        assert text == "WAIT: all_to_all (direct) over 'b'" and source.startswith("profile_ranks.py:")
        assert {"COPY", "WAIT", "ENTER"} <= {text.partition(":")[0] for text, _ in thread.texts}


def test_a_wait_ends_after_the_signal_that_ends_it(chain):
    signals = {}
    for thread in spans(chain):
        for i in np.flatnonzero((thread.kind == BOOKKEEPING) & (thread.counter >= 0)):
            signals[int(thread.counter[i]), int(thread.detail[i])] = thread.rank, int(thread.start[i])
    known = 0
    for thread in spans(chain):
        for i in np.flatnonzero(thread.kind == WAIT):
            place = int(thread.counter[i]), int(thread.detail[i])
            if place in signals:  # one of before the profile is not
                known += 1
                rank, start = signals[place]
                assert rank == thread.peer[i] and start < thread.end[i]
    assert known > 40


def test_a_killed_rank_leaves_what_it_did(tmp_path):
    with Ranks(script("killed", tmp_path), range(2)) as ranks:
        assert [ranks.line(rank) for rank in (0, 1, 0, 1)] == ["in", "in", "going on", "going on"]
        ranks.wait_until_in(0, "nanosleep")  # it waits for rank 1
        ranks.kill(1)
        assert ranks.end(1)[0] == -9
        assert ranks.line(0) == "told"
        ranks.tell(0)
        assert ranks.end(0)[0] == 0
    profile = Profile.load(tmp_path)
    assert profile.notes == ["rank 1: its record has no end: the process was killed, or is still running"]
    mine, dead = profile.records
    assert dead.end_ns is None and mine.end_ns is not None
    for record, fewest in ((mine, 6), (dead, 5)):
        (plan,) = (n for n, fields in record.definitions.items() if fields["kind"] == "plan")
        assert fewest <= np.count_nonzero(record.threads[0].calls[:, 2] == plan) <= 6
    assert any("killed" in cause.doing and cause.rank == 1 for cause in profile.blame.causes)
    assert len(json.loads(profile.to_perfetto())["traceEvents"]) > 20


def test_threads_segments_forks_and_profiles_in_a_row(tmp_path):
    printed = run("everything", 2, tmp_path)
    for rank in range(2):
        nested, folder = printed[rank]
        assert "can be in one profile at a time. End that first." in nested and "profile_ranks.py:" in nested
        assert printed[0][1] == folder and folder.endswith("-2")
    first, second = runs_of(tmp_path)
    assert second.name == folder
    profile = Profile.load(first)
    assert profile.notes == []
    for record in profile.records:
        one, two = record.threads
        plans = {n: fields for n, fields in record.definitions.items() if fields["kind"] == "plan"}
        counts = Counter(n for n in one.calls[:, 2].tolist() if n in plans)
        assert sorted(counts.values()) == [1, 4]  # `repeat`, and three calls with the one after the fork; not the one behind
        assert [Counter(n for n in two.calls[:, 2].tolist() if n in plans).total(), len(two.programs)] == [2, 2]
        again = next(n for n in counts if counts[n] == 1)
        assert {plans[again]["opcode"].count(word) > 0 for word in ("STAGE", "COMBINE")} == {True}
        lasts = [text for text in one.texts if text[0].startswith("COMBINE")]
        assert lasts
        repeated = one.kind[
            (one.start >= one.calls[one.calls[:, 2] == again][0, 0]) & (one.end <= one.calls[one.calls[:, 2] == again][0, 1])
        ]
        assert len(repeated) == 3 * len(plans[again]["pc"])
    empty = Profile.load(tmp_path)
    assert len(empty.timeline()) == 0 and empty.blame.named is None and "No rank stands out" in repr(empty)


def test_a_full_disk_ends_the_profile_and_not_the_program(tmp_path):
    printed = run("full_disk", 2, tmp_path)
    (warning,) = printed[0]
    why = "File too large (`ulimit -f` limits the size of files)"
    assert warning.startswith("funccoll: the profile of rank 0 in ") and warning.endswith(f"ends here: {why}.")
    assert printed[1] == [""]
    profile = Profile.load(tmp_path)
    assert profile.notes == [f"rank 0: its record ends early: {why}"]
    few, all_of_them = (len(record.threads[0].start) for record in profile.records)
    assert 0 < few <= 1 << 15 < 60_000 < all_of_them


def test_groups_that_were_recorded_can_go(tmp_path):
    assert run("forgotten", 2, tmp_path) == {0: ["True"], 1: ["True"]}


@pytest.mark.slow
def test_many_calls_take_no_more_memory_and_are_read(tmp_path):
    times = 20_000
    code = JOIN + f"from tests.support.ranks import profile_ranks\nprofile_ranks.many({str(tmp_path)!r}, {times})\n"
    with Ranks(code, range(2)) as ranks:
        printed = [ranks.end(rank) for rank in range(2)]
    for status, lines, err in printed:
        assert (status, err) == (0, "")
        grown_kib, nbytes = map(int, lines[1].split())
        assert grown_kib < 1024 and nbytes < 1500 * times
    profile = Profile.load(tmp_path)
    assert [len(record.threads[0].calls) for record in profile.records] == [2 * times, 2 * times]
    assert np.isclose(profile.blame.waited.sum(), profile.blame.caused.sum() + profile.blame.machine + profile.blame.unknown)


# ---------------------------------------------------------------- one process


def test_virtual_devices(tmp_path, line):
    def loss(w, x):
        y = np.tanh(x @ w)
        return fc.all_reduce(np.sum(y, axis=0), "data"), fc.all_gather(y, "data")

    step = fc.jit(loss, mesh=line, in_specs=(P(), P("data")), out_specs=P())
    args = np.ones((3, 2), np.float32), np.ones((8, 3), np.float32)
    step(*args)
    with fc.profile(tmp_path):
        step(*args)
        step(*args)
    profile = Profile.load(tmp_path)
    (record,) = profile.records
    assert (profile.nranks, record.notes, len(record.threads[0].programs)) == (1, [], 2)
    found = Counter((s.activity, s.label, s.source.partition(":")[0]) for s in profile.timeline())
    assert found["reduce", "all_reduce over 'data'", "test_profile_recording.py"] == 2
    assert found["move", "all_gather over 'data'", "test_profile_recording.py"] == 2
    computing = [label for (activity, label, _) in found if activity == "compute"]
    assert computing and all(label.startswith("compute: ") for label in computing)
    assert profile.split[0, :1] == [0.0] and (profile.split[0, 1:4] > 0).all()
    step(*args)
    assert runs_of(tmp_path)[0].joinpath("rank-0.thread-0.rows").stat().st_size % 32 == 0


def test_a_clock_is_that_of_a_boot_and_a_time_namespace(tmp_path, line):
    """Of another one its zero may be another: `unshare --time --monotonic 86400` adds a day."""
    with fc.profile(tmp_path):
        pass
    (record,) = Profile.load(tmp_path).records
    assert record.head["boot"] == f"{boot_id()} {os.readlink('/proc/self/ns/time')}"


def test_an_exception_goes_through_a_profile(tmp_path, line):
    step = fc.jit(lambda x, i: fc.all_reduce(x, "data")[i], mesh=line, in_specs=(P("data"), P()), out_specs=P())
    x = np.ones(8, np.float32)
    step(x, 0)
    with pytest.raises(IndexError, match="out of bounds") as caught, fc.profile(tmp_path):
        step(x, 5)
    assert any("test_profile_recording.py" in note for note in caught.value.__notes__)
    assert len(Profile.load(tmp_path).records[0].threads[0].programs) == 1
    with fc.profile(tmp_path):  # it has ended
        step(x, 0)


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    words = "a profile cannot be written into .*: Not a directory"
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ProfileError, match=words), fc.profile(place):
            raise AssertionError("it began")
    environment = {**os.environ, "FUNCCOLL_PROFILE": str(tmp_path / "file")}
    code = "import funccoll as fc\nprint(1)\nfc.make_mesh({'d': 2})\nprint(2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and done.stdout == "1\n" and "ProfileError: a profile cannot be written into" in done.stderr


def test_the_environment_records_a_process_to_its_end(tmp_path, capsys):
    code = (
        "import numpy as np, funccoll as fc\nmesh = fc.make_mesh({'d': 2})\n"
        "f = fc.jit(lambda x: fc.all_reduce(x, 'd'), mesh=mesh, in_specs=fc.P('d'), out_specs=fc.P())\n"
        "f(np.ones(4))\nmesh = fc.make_mesh({'d': 2})\nf(np.ones(4))\n"
        "try:\n    with fc.profile('elsewhere'): pass\nexcept fc.errors.ProfileError as e: print(e)\n"
    )
    environment = {**os.environ, "FUNCCOLL_PROFILE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "as FUNCCOLL_PROFILE asks for: it can be in one profile at a time" in done.stdout
    profile = Profile.load(tmp_path)
    assert profile.notes == [] and len(runs_of(tmp_path)) == 1
    labels = Counter(span.label for span in profile.timeline())
    assert labels["all_reduce over 'd'"] == 2 and sum(n for label, n in labels.items() if label.startswith("compiling")) == 1
    (function,) = profile.compiled
    assert function.times == 1 and function.label == "compiling <lambda>"
    assert profile.split[0, 4] > 0 and np.isclose(function.seconds, profile.split[0, 4])
    assert cli.main(["profile", str(tmp_path)]) == 0
    computed, compiled = capsys.readouterr().out.split("What was compiled (all ranks together)\n")
    assert "compiling <lambda>" in compiled and "(<module>)" not in computed.partition("What computed")[2]


def test_folders_are_named_alike_for_equal_runs():
    runs = ("a1", "a-1", "a_1", "x" * 100, "x" * 101, "../..", "none-127.0.0.1-29500-0")
    names = [recorder._folder_name(run) for run in runs]
    assert len(set(names)) == len(names) and names[0] == "a1"
    assert all(name.strip("./") and "/" not in name and len(name) < 60 for name in names)


# ---------------------------------------------------------------- without a profile


def machine_code(function):
    """The code of a stream interpreter without the names of its symbols."""
    import llvmlite.binding as llvm
    from numba import types

    from funccoll.kernels import intrinsics
    from funccoll.kernels.variants import variant

    names = {name: getattr(intrinsics, name) for name in (*cpu._OPERATIONS, *cpu._CLOCKS)}
    symbol, code = object_cache._compile(variant(function, "compared", RECORDS=False, **names), types.int64(types.int64))
    sections = {s.name(): s.data() for s in llvm.ObjectFileRef.from_data(code).sections() if s.is_text()}
    assert symbol and sum(map(len, sections.values())) > 1000
    return sections


class WithoutRecording(ast.NodeTransformer):
    def visit_If(self, node):
        self.generic_visit(node)
        return None if ast.unparse(node.test) == "RECORDS" else node


@pytest.mark.slow
def test_without_a_profile_the_machine_code_has_nothing_of_it():
    source = ast.parse(inspect.getsource(stream_interpreter.interpret))
    stripped = ast.fix_missing_locations(WithoutRecording().visit(source))
    assert "ROW" in inspect.getsource(stream_interpreter.interpret) and "ROW" not in ast.unparse(stripped)
    space = dict(vars(stream_interpreter))
    exec(compile(stripped, stream_interpreter.__file__, "exec"), space)
    assert machine_code(space["interpret"]) == machine_code(stream_interpreter.interpret)
