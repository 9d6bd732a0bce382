"""Profiles that are read back: merging, blame on made-up records against a slow oracle, damaged files, the command."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import ProfileError
from funccoll.profiling import SPLIT, Profile, runs_of
from funccoll.profiling.causes import blame_of
from funccoll.profiling.rank_record import (
    BOOKKEEPING,
    COMPILE,
    COMPUTE,
    MOVE,
    RECORDED,
    REDUCE,
    WAIT,
    RankRecord,
    ThreadRecord,
    read_rank,
)
from funccoll.runtime.recorder import CALL
from funccoll.runtime.row_file import RECORDING, SAMPLE, RowFile
from funccoll.tools import cli
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("profiles", "commands")

MS = 1_000_000


def made(rank, spans, nranks=2, programs=(), samples=((0, 0),), end=None, lines=()):
    """A record of a rank from (start, end, kind, peer, counter, detail) in ms; `lines` are (start, end) of calls."""
    columns = [np.array(c, np.int64) for c in zip(*spans, strict=True)] or [np.zeros(0, np.int64)] * 6
    start, stop, kind, peer, counter, detail = columns
    calls = np.array([(a * MS, b * MS, 1, 100 + i) for i, (a, b) in enumerate(lines)], np.int64).reshape(-1, 4)
    thread = ThreadRecord(
        rank,
        0,
        start * MS,
        stop * MS,
        kind.astype(np.int8),
        peer.astype(np.int32),
        counter,
        detail,
        np.zeros(len(start), np.int32),
        [("COPY: all_reduce (ring) over 'd'", "t.py:1 (f)")],
        np.array(programs, np.int64).reshape(-1, 2) * MS,
        calls,
        np.array([(*s, 0) for s in samples], np.int64).reshape(-1, 3) * MS,
    )
    head = {"rank": rank, "ranks": nranks, "monotonic_ns": 0, "time_ns": 0, "host": "h", "boot": "b"}
    definitions = {100 + i: {"kind": "line", "source": f"t.py:{10 + i} (f)"} for i in range(len(lines))}
    return RankRecord(rank, head, definitions, [thread], end * MS if end is not None else None)


def signal(at, counter, value):
    return at, at, BOOKKEEPING, -1, counter, value


def wait(begin, end, peer, counter, value):
    return begin, end, WAIT, peer, counter, value


# ---------------------------------------------------------------- blame


def test_waiting_is_of_what_the_peer_did_until_its_signal():
    records = [
        made(0, [wait(0, 100, 1, 8, 1)], end=100),
        made(1, [(20, 50, MOVE, -1, -1, 0), (50, 60, REDUCE, -1, -1, 0), signal(90, 8, 1)], lines=[(15, 90)], end=100),
    ]
    blame = blame_of(records, 2)
    assert blame.waited.tolist() == [[0, 0.1], [0, 0]] and blame.named == 1
    found = {(cause.doing, cause.source, cause.machine): round(cause.seconds, 6) for cause in blame.causes}
    assert found == {
        ("moving data", "t.py:1 (f)", False): 0.03,
        ("reducing", "t.py:1 (f)", False): 0.01,
        ("outside of any call, before", "t.py:10 (f)", False): 0.02,
        ("outside of any call, after", "t.py:10 (f)", False): 0.03,  # nothing is known of between 60 and 90
        ("stopped in a wait", "t.py:1 (f)", False): 0.01,
    }


def test_a_wait_of_the_peer_leads_on_and_a_ring_of_waits_ends():
    records = [
        made(0, [wait(0, 90, 1, 8, 1), signal(90, 0, 1)], 3, end=100),
        made(1, [wait(0, 80, 2, 16, 1), signal(80, 8, 1), wait(80, 91, 0, 0, 1)], 3, end=100),
        made(2, [(0, 70, COMPUTE, -1, -1, 0), signal(70, 16, 1), wait(70, 90, 0, 0, 1)], 3, end=100),
    ]
    blame = blame_of(records, 3)
    # Rank 2 computes for 70 ms; for 10 more each is late to notice, because it is stopped; from 80 on rank 0 is.
    assert np.allclose(blame.caused[0], [0.01, 0.01, 0.07]) and np.allclose(blame.caused[1], [0.01, 0.01, 0.07], atol=0.002)
    assert blame.ranking[0] == 2 and blame.named == 2


def test_time_without_a_processor_is_the_machines():
    for delay, machine in ((0, 0.0), (40, 0.04), (500, 0.08)):
        records = [
            made(0, [wait(0, 80, 1, 8, 1)], end=100),
            made(1, [signal(80, 8, 1)], samples=[(0, 7), (80, 7 + delay)], lines=[(80, 81)], end=100),
        ]
        blame = blame_of(records, 2)
        assert np.isclose(blame.machine, machine) and np.isclose(blame.caused[0, 1], 0.08 - machine)
    # A copy that took long had no processor for 60 of 80 ms, of which the thread waited 20 for one: it was stopped for 40.
    spans = [(0, 80, MOVE, -1, -1, 60 * MS), signal(80, 8, 1)]
    records[1] = made(1, spans, samples=[(0, 0), (81, 20)], end=100)
    assert np.isclose(blame_of(records, 2).machine, 0.02)


def test_a_record_written_during_a_computation_counts_once():
    spans = [(0, 70, COMPUTE, -1, -1, 0), (10, 60, RECORDED, -1, -1, 0), signal(80, 8, 1)]
    blame = blame_of([made(0, [wait(0, 80, 1, 8, 1)], end=100), made(1, spans, end=100)], 2)
    assert np.isclose(blame.caused[0, 1] + blame.machine, 0.08) and np.isclose(blame.waited[0, 1], 0.08)


def test_a_rank_is_named_by_what_it_caused_and_not_narrowly():
    records = [made(0, [wait(0, 49, 1, 8, 1)], end=100), made(1, [signal(49, 8, 1)], end=100)]
    assert blame_of(records, 2).named is None and blame_of(records, 2).ranking == [1, 0]
    two = [
        made(0, [wait(0, 90, 1, 8, 1), signal(130, 0, 1)], end=200),
        made(1, [signal(90, 8, 1), wait(100, 130, 0, 0, 1)], end=200),
    ]
    assert blame_of(two, 2).named == 1  # 90 ms and 30
    two[1] = made(1, [signal(90, 8, 1), wait(99, 130, 0, 0, 1)], end=200)
    assert blame_of(two, 2).named is None  # 90 ms and 31
    assert blame_of([], 2).named is None


def test_a_missing_rank_and_one_whose_record_ends():
    records = [
        made(0, [wait(0, 100, 1, 8, 1), wait(100, 200, 2, 16, 1)], 3, end=200),
        made(1, [(0, 30, MOVE, -1, -1, 0)], 3),
    ]
    blame = blame_of(records, 3)
    assert np.isclose(blame.unknown, 0.1) and np.isclose(blame.caused[0, 1], 0.1)
    assert {cause.doing for cause in blame.causes} == {
        "moving data",
        "behind the end of its record: it was killed, after",
    }


@pytest.mark.parametrize(
    ("line", "doing"),
    [
        ("t.py:5 (f)", "not yet in the profile, which it entered at"),
        ("", "not yet in the profile, which it entered later"),
    ],
)
def test_a_rank_that_enters_late_causes_the_waiting_until_then(line, doing):
    records = [
        made(0, [wait(0, 200, 1, 8, 1)], end=200),
        made(1, [(150, 180, MOVE, -1, -1, 0), signal(200, 8, 1)], samples=[(120, 0), (121, 0)], lines=[(150, 200)], end=200),
    ]
    records[1].head["begun_at"] = line
    blame = blame_of(records, 2)
    assert blame.unknown == 0 and np.isclose(blame.caused[0, 1], 0.2) and blame.named == 1
    found = {(cause.doing, cause.source): round(cause.seconds, 6) for cause in blame.causes}
    assert found[doing, line] == 0.12 and found["moving data", "t.py:1 (f)"] == 0.03


@st.composite
def executions(draw):
    """Ranks that compute and wait for each other in an order that could happen, as records."""
    n = draw(st.integers(2, 4))
    now, spans, values = [0] * n, [[] for _ in range(n)], [0] * n
    sent = {}
    for _ in range(draw(st.integers(1, 15))):
        rank = draw(st.integers(0, n - 1))
        if draw(st.booleans()):
            length = draw(st.integers(1, 30))
            spans[rank].append((now[rank], now[rank] + length, draw(st.sampled_from([MOVE, REDUCE, COMPUTE])), -1, -1, 0))
            now[rank] += length
            values[rank] += 1
            spans[rank].append(signal(now[rank], 8 * rank, values[rank]))
            sent[rank, values[rank]] = now[rank]
        elif known := [key for key in sent if key[0] != rank]:
            peer, value = draw(st.sampled_from(known))
            end = max(now[rank], sent[peer, value])
            spans[rank].append(wait(now[rank], end, peer, 8 * peer, value))
            now[rank] = end
    return [made(rank, spans[rank], n, end=max(now) + 1) for rank in range(n)], sent


def cause_at(records, sent, rank, i, moment):
    """The rank that causes a wait at a moment: one step at a time."""
    thread = records[rank].threads[0]
    peer = int(thread.peer[i])
    theirs = records[peer].threads[0]
    assert moment < sent[peer, int(thread.detail[i])] * MS
    for j in range(len(theirs.start)):
        if theirs.kind[j] == WAIT and theirs.start[j] <= moment < theirs.end[j]:
            return cause_at(records, sent, peer, j, moment)
    return peer


@given(executions())
def test_blame_is_what_following_the_waits_at_each_moment_finds(execution):
    records, sent = execution
    n = len(records)
    expected = np.zeros((n, n))
    for record in records:
        thread = record.threads[0]
        for i in np.flatnonzero(thread.kind == WAIT).tolist():
            for moment in range(int(thread.start[i]), int(thread.end[i]), MS):
                expected[record.rank, cause_at(records, sent, record.rank, i, moment + MS // 2)] += 0.001
    blame = blame_of(records, n)
    assert np.allclose(blame.caused, expected) and blame.unknown == 0
    assert np.isclose(blame.waited.sum(), expected.sum()) and np.isclose(sum(c.seconds for c in blame.causes), expected.sum())


# ---------------------------------------------------------------- merging


def test_other_hosts_are_shifted_to_the_first_ranks_clock():
    records = [made(0, [(0, 10, MOVE, -1, -1, 0)], end=20), made(1, [(5, 10, MOVE, -1, -1, 0)], end=20)]
    records[1].head = {**records[1].head, "boot": "other", "monotonic_ns": 0, "time_ns": 3 * MS}
    starts = {span.rank: span.start for span in Profile(records).timeline()}
    assert starts == {0: 0.0, 1: 0.008}


def test_ranks_of_different_jobs_do_not_mix():
    with pytest.raises(ProfileError, match="mixes ranks of different jobs"):
        Profile([made(0, [], 2), made(1, [], 3)])
    with pytest.raises(ProfileError, match="mixes ranks"):
        Profile([made(0, [], 2), made(0, [], 2)])


def test_the_parts_of_the_time():
    spans = [
        (0, 5, COMPUTE, -1, -1, 0),
        (10, 20, MOVE, -1, -1, 0),
        wait(20, 40, 1, 8, 1),
        (40, 43, REDUCE, -1, -1, 0),
        (60, 61, MOVE, -1, -1, 0),
    ]
    profile = Profile([made(0, spans, programs=[(0, 50)], end=100)])
    assert dict(zip(SPLIT, np.round(profile.split[0] * 1000).astype(int).tolist(), strict=True)) == {
        "waiting": 20,
        "moving": 11,
        "reducing": 3,
        "computing": 17,
        "compiling": 0,
        "outside": 10,
    }
    assert profile.missing == [1] and "rank 1: it has no record here" in profile.notes


def test_compiling_is_a_part_of_its_own_and_a_cause_of_waiting():
    spans = [(0, 60, COMPILE, -1, -1, 0), (60, 70, COMPUTE, -1, -1, 0), signal(70, 8, 1)]
    records = [made(0, [wait(0, 70, 1, 8, 1)], end=70), made(1, spans, end=70)]
    records[1].threads[0].texts[0] = "compiling step", "t.py:1 (f)"
    records[1].threads[0].texts.append(("compute: 1 operation", "t.py:2 (f)"))
    records[1].threads[0].text[1] = 1
    profile = Profile(records)
    parts = dict(zip(SPLIT, np.round(profile.split[1] * 1000).astype(int).tolist(), strict=True))
    assert (parts["computing"], parts["compiling"], parts["outside"]) == (10, 60, 0)
    assert [(function.times, function.label) for function in profile.compiled] == [(1, "compiling step")]
    assert round(sum(line.seconds for line in profile.lines), 6) == 0.01 == round(profile.scopes[""][3], 6)
    cause = profile.blame.causes[0]
    assert profile.blame.named == 1 and (cause.doing, round(cause.seconds, 6)) == ("compiling step", 0.06)
    assert sorted((s.activity, round(s.end - s.start, 6)) for s in profile.timeline()) == [
        ("compute", 0.01),
        ("compute", 0.06),
        ("wait", 0.07),
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A directory with one profile of two ranks."""
    directory = tmp_path_factory.mktemp("recorded")
    code = JOIN + f"from tests.support.ranks import profile_ranks\nprofile_ranks.everything({str(directory)!r})\n"
    with Ranks(code, range(2)) as ranks:
        for rank in range(2):
            assert ranks.end(rank)[0] == 0
    shutil.rmtree(runs_of(directory)[1])
    return directory


@pytest.fixture
def copied(recorded, tmp_path):
    """A copy that a test may damage: the folder of the run."""
    return shutil.copytree(runs_of(recorded)[0], tmp_path / "copy" / "run")


def test_a_file_that_is_cut_off_anywhere_is_read_up_to_there(copied):
    rows, definitions = copied / "rank-1.thread-0.rows", copied / "rank-1.jsonl"
    whole, text = rows.read_bytes(), definitions.read_bytes()
    spans = len(Profile.load(copied).timeline(every_instruction=True))
    for length in (0, 1, 31, 32, 33, 1000, len(whole) - 1):
        rows.write_bytes(whole[:length])
        profile = Profile.load(copied)
        found = len(profile.timeline(every_instruction=True))
        assert found < spans or (length == len(whole) - 1 and found == spans)  # the last row is of a whole program
        assert profile.blame.waited[0, 1] > 0
    rows.write_bytes(whole)
    head = text.index(b"\n") + 1
    for length in (head, head + 1, len(text) // 2, len(text) - 1):
        definitions.write_bytes(text[:length])
        profile = Profile.load(copied)
        assert any("its record has no end" in note for note in profile.notes)
        json.loads(profile.to_perfetto())
    rows.unlink()
    (copied / "rank-1.thread-1.rows").unlink()
    assert any("the files with its rows are missing" in note for note in Profile.load(copied).notes)
    definitions.unlink()
    profile = Profile.load(copied)
    assert profile.missing == [1] and profile.blame.unknown > 0 and "rank 1: it has no record here" in repr(profile)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]\n", b"\xff\xfe", b'{"format": "funccoll profile"}\n', b"null\n"])
def test_a_head_that_is_none(copied, damage):
    (copied / "rank-0.jsonl").write_bytes(damage)
    with pytest.raises(ProfileError, match=r"rank-0.jsonl is not a rank's part of a profile"):
        Profile.load(copied)
    assert runs_of(copied.parent) == [copied]


def test_definitions_that_are_none(copied):
    path = copied / "rank-0.jsonl"
    head = path.read_bytes().partition(b"\n")[0]
    columns = {"pc": [0], "opcode": ["END"], "collective": [0], "peer": [-1], "counter": [-1], "nbytes": [0]}
    plan = {"number": 1, "kind": "plan", "collectives": [], **columns}
    for line in (
        b"[]",
        b"{",
        b'{"number": 1}',
        b'{"number": 1, "kind": "spoon"}',
        b'{"kind": "end"}',
        b'{"number": 1, "kind": "program"}',
        json.dumps(plan).encode(),
        json.dumps({**plan, "pc": [-1]}).encode(),
        json.dumps({**plan, "pc": [1 << 40]}).encode(),
        json.dumps({**plan, "pc": []}).encode(),
        json.dumps({**plan, "pc": "x"}).encode(),
    ):
        path.write_bytes(head + b"\n" + line + b"\n")
        with pytest.raises(ProfileError, match=r"rank-0.jsonl:2 is damaged"):
            Profile.load(copied)
    path.write_bytes(head.replace(b'"version": 1', b'"version": 2') + b"\n")
    with pytest.raises(ProfileError, match="is of version 2 of this format, and this funccoll reads 1"):
        Profile.load(copied)


PLACES = st.sampled_from([SAMPLE, RECORDING, 1 << 32, 1 << 32 | CALL, 5 << 32 | 3])
ROWS = st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 4) | st.tuples(PLACES, *[st.integers(0, 1 << 50)] * 3)


@given(st.lists(ROWS, max_size=20))
def test_rows_of_anything_are_read(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    head = {
        "format": "funccoll profile",
        "version": 1,
        "rank": 0,
        "ranks": 1,
        "monotonic_ns": 1,
        "time_ns": 1,
        "host": "",
        "boot": "",
    }
    (folder / "rank-0.jsonl").write_text(json.dumps(head) + '\n{"number": 1, "kind": "segment", "label": "x"}\n')
    np.array(rows, np.int64).reshape(-1, 4).tofile(folder / "rank-0.thread-0.rows")
    profile = Profile([read_rank(folder / "rank-0.jsonl")])
    assert (profile.timeline().end >= profile.timeline().start).all() and profile.blame.named is None
    repr(profile), profile._repr_html_()


def test_a_row_file_has_all_rows_of_many_buffers(tmp_path):
    file, count = RowFile(tmp_path / "rows"), 3 * (1 << 13) + 5
    for i in range(1, count + 1):
        file.add(10 * i, i, i, 0)
    file.close()
    places = np.fromfile(tmp_path / "rows", np.int64).reshape(-1, 4)[:, 0]
    assert places[(places > 0) & (places % 10 == 0)].tolist() == list(range(10, 10 * count + 10, 10))


# ---------------------------------------------------------------- the command


def command(capsys, *words):
    code = cli.main(["profile", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_tables_and_writes_a_trace(recorded, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = command(capsys, recorded)
    assert (code, err) == (0, "")
    for words in (
        "rank  waiting",
        "computing",
        "How long each rank waited for each",
        "What caused waiting",
        "profile_ranks.py:",
        "perfetto.json",
    ):
        assert words in out, out
    events = json.loads((runs_of(recorded)[0] / "perfetto.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and {event["ph"] for event in events} == {"M", "X"}
    code, out, _ = command(capsys, recorded, "--json", "--perfetto", tmp_path / "out.json", "--every-instruction")
    told = json.loads(out)
    assert code == 0 and told["ranks"] == 2 and len(told["split"]) == 2 and told["perfetto"] == str(tmp_path / "out.json")
    assert len(json.loads((tmp_path / "out.json").read_text())["traceEvents"]) > len(events)
    name = runs_of(recorded)[0].name
    assert command(capsys, recorded, "--list") == (0, f"{name}\n", "")
    assert command(capsys, recorded, "--run", name, "--json")[0] == 0


def test_the_command_says_what_is_wrong(recorded, capsys, tmp_path):
    name = runs_of(recorded)[0].name
    for words, told in (
        ((tmp_path / "nothing",), "is not a directory: give that of FUNCCOLL_PROFILE or fc.profile(directory)."),
        ((tmp_path,), "no profile was recorded into"),
        ((recorded, "--run", "other"), f"has no run 'other'. It has {name}."),
        ((recorded, "--perfetto", tmp_path / "no" / "a.json"), "cannot write"),
    ):
        code, out, err = command(capsys, *words)
        assert (code, out) == (1, "") and err.startswith("funccoll profile: ") and told in err and err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        command(capsys, recorded, "--colour", "red")
    assert ended.value.code == 2 and "unrecognized arguments: --colour red" in capsys.readouterr().err


def test_runs_are_listed_by_when_they_began(tmp_path):
    mesh = fc.make_mesh({"d": 2})
    f = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    folders = []
    for _ in range(3):
        with fc.profile(tmp_path) as folder:
            f(np.ones(2))
        folders.append(folder)
    assert runs_of(tmp_path) == folders
    assert Profile.load(tmp_path).name == str(folders[-1]) and Profile.load(tmp_path, folders[0].name).name == str(folders[0])
