"""Private arguments that peers read where they are: the bits of virtual devices; and what is told when a read fails."""

from __future__ import annotations

import re
import signal
import time

import pytest

from funccoll.job import doctor
from tests.support.cases import direct_read_cases, process_cases
from tests.support.ranks.ranks import PRELUDE, Ranks, launch, left_behind

pytestmark = pytest.mark.covers("direct-reads")

SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("collectives", 2),
        ("staged", 3),
        ("staged in one segment", 2),
        ("programs", 3),
        ("forced", 4),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("collectives", 3), ("staged", 2), ("staged", 4))),
    ],
)
def test_what_is_read_directly_has_the_bits_of_virtual_devices(name, count, tmp_path, monkeypatch):
    process_cases.record(name, count, tmp_path / "record")
    monkeypatch.setenv("FUNCCOLL_CHECK", "")
    launch(direct_read_cases.compare, count, name, tmp_path / "record")


@pytest.mark.parametrize(("count", "examples"), [(2, 24), pytest.param(2, 300, marks=SLOW), pytest.param(4, 150, marks=SLOW)])
def test_blocks_in_any_memory(count, examples, tmp_path, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_CHECK", "")
    found = launch(direct_read_cases.fuzz, count, tmp_path, examples)
    assert len(set(found)) == 1 and found[0] > examples // 5


def test_a_refusal_at_the_beginning_is_staging():
    (why, other) = launch(direct_read_cases.refused_at_first, 2)
    assert why == other == "rank 1: refused (EPERM): by a seccomp filter, a namespace, or between users"


def test_a_number_that_is_another_process_is_staging():
    (why, other) = launch(direct_read_cases.another_process, 2)
    assert why == other and why.startswith("rank 0: ") and "(ESTALE)" in why, why


def test_a_rank_can_switch_it_off(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_DIRECT_READS", "0")
    with Ranks(PRELUDE + "from tests.support.cases.direct_read_cases import access; say(access().refusal)", range(2)) as ranks:
        assert set(ranks.lines().values()) == {"FUNCCOLL_DIRECT_READS=0 on rank 0"}
        ranks.end_well()


def test_the_choice_is_told_in_words():
    (said, _) = launch(direct_read_cases.told, 2)
    assert said == [
        f"NumPy, one operation after the other, and native collectives; of NumPy arguments {how} staged"
        for how in (
            "peers read those of all_to_all, permute, scatter from 64 KiB on directly, others are",
            "peers read those of all_to_all, permute, scatter from 64 KiB on and of all_reduce, reduce_scatter from 1 MiB on "
            "directly, others are",
            "they are",
        )
    ]


def test_the_doctor_tries_it(monkeypatch):
    (found,) = (finding for finding in doctor.examine() if finding.name == "direct reads")
    assert (found.state, found.advice) == ("ok", "") and found.value.startswith("work: peers")
    monkeypatch.setenv("FUNCCOLL_DIRECT_READS", "0")
    (found,) = (finding for finding in doctor.examine() if finding.name == "direct reads")
    assert (found.state, found.value) == ("absent", "switched off: FUNCCOLL_DIRECT_READS=0")


def test_memory_that_the_system_does_not_read_is_copied():
    if not all(launch(direct_read_cases.secret_memory, 2)):
        pytest.skip("this kernel has no memfd_secret")


def failing(what: str) -> Ranks:
    script = PRELUDE + f"from tests.support.cases import direct_read_cases; direct_read_cases.failing({what!r})"
    return Ranks(script, range(2), imports=["tests.support.cases.direct_read_cases"])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("refuse", r"\(EPERM\). Something forbids .* FUNCCOLL_DIRECT_READS=0 on all ranks"),
        ("cookie", r"\(ESTALE\). Another process has its number now, or its memory was overwritten"),
        ("other process", r"\((ESTALE|EFAULT)\)"),
        ("child", r"\(ESTALE\)"),
        ("truncate", r"\(EFAULT\). The array has no memory there any more"),
    ],
)
def test_a_read_that_fails_is_an_error_on_all_ranks(what, words):
    with failing(what) as ranks:
        run, told = ranks.run, {}
        for rank in range(2):
            code, lines, err = ranks.end(rank)
            assert (code, err) == (0, "")
            assert lines.pop(0) == "begins"
            told[rank] = "\n".join(lines)
            assert "done" not in lines and "again: " in lines[-1], lines
    assert re.search(words, told[0]), told
    assert re.search(r"FunccollError: permute among ranks \[0, 1\] .*an argument of rank [01] cannot be read", told[0]), told
    assert re.match("PeerFailure: rank 0 raised|FunccollError", told[1]), told
    assert not left_behind(run)


@pytest.mark.parametrize("after", [0.0, *(pytest.param(0.008 * i, marks=SLOW) for i in range(1, 5))])
def test_a_peer_dies_while_it_is_read(after):
    with failing("kill") as ranks:
        assert set(ranks.lines().values()) == {"begins"}
        time.sleep(0.1 + after)
        ranks.kill(1)
        code, lines, err = ranks.end(0)
        assert (code, err) == (0, "")
        assert "PeerFailure: rank 1 died without a word" in lines[0] and "again: " in lines[-1], lines
        run = ranks.run
    assert not left_behind(run)


def test_a_peer_is_stopped_while_it_is_read():
    with failing("stop") as ranks:
        assert set(ranks.lines().values()) == {"begins"}
        time.sleep(0.1)
        ranks.kill(1, signal.SIGSTOP)
        assert "CollectiveTimeout" in ranks.line(0)
        ranks.kill(1)
        assert ranks.end(0)[0] == 0
