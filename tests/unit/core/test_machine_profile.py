"""The machine profile: its file, which profiles are refused, and what costs and choices take from it."""

import json
import math
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, schedules
from funccoll.config import MACHINE_PROFILE
from funccoll.core import host_identity, machine_profile
from funccoll.core.machine_profile import MOST_BYTES, MachineProfile, current, default_path, load, save
from funccoll.schedules import Topology, build, explain, select
from funccoll.schedules.collective import KINDS
from funccoll.schedules.model.select import candidates
from tests.support.example_counts import examples
from tests.support.machine_profiles import any_parameters, in_use, parameters, profile, profiles, times

pytestmark = pytest.mark.covers("tune")

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
DEFAULTS = Topology("one_host", 1, 2, *[schedules.Link("shared memory", 0.2e-6, 1e-10, shared=True)] * 2, 1e-10)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache directory of the user's, which the environment does not override."""
    monkeypatch.delenv(MACHINE_PROFILE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_profile._own.cache_clear()
    yield tmp_path
    machine_profile._own.cache_clear()


def kept(**changes):
    """Write a profile's file with these values in place of its own; its path."""
    path = default_path()
    save(profile(), path)
    path.write_text(json.dumps(profile().to_json() | changes))
    return path


# ---------------------------------------------------------------- the file


@given(profiles())
def test_a_profile_survives_its_file(found):
    text = json.dumps(found.to_json(), ensure_ascii=False)
    assert MachineProfile.from_json(json.loads(text)) == found


def test_the_file_is_this_users_alone_and_written_at_once(cache, monkeypatch):
    path = default_path()
    save(profile(), path)
    assert load(path) == profile()
    assert path.parent == cache / "funccoll" and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match="No space left"):
        save(profile(parameters(alpha=5.0)), path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]  # nothing half written is left


def test_a_profile_that_a_message_cannot_hold_is_not_written(cache):
    many = [times(algorithm=f"a{i}", nbytes=tuple(range(1, 100)), seconds=(1e-6,) * 99) for i in range(40)]
    with pytest.raises(ValueError, match="more than 65,536 bytes: measure fewer"):
        save(profile(measured=many), default_path())
    assert not default_path().exists()


HOST = host_identity.this_host()


WRONG = [
    ({"funccoll": "9.9"}, r"it was made by funccoll 9.9 \(format 2\), and this is funccoll"),
    ({"format": 1}, "format 1"),
    ({"host": HOST | {"cpu": "another"}}, "it was measured on another host: cpu another (here"),
    ({"host": HOST | {"name": "far", "cores": 999}}, "measured on another host: name far"),
    ({"host": []}, "its host is not a JSON object"),
    ({"parameters": []}, "ascending numbers of ranks"),
    ({"parameters": [vars(parameters(4)), vars(parameters(2))]}, "ascending numbers of ranks"),
    ({"parameters": [vars(parameters(alpha=-1.0))]}, "its alpha is not a number in the range"),
    ({"parameters": [vars(parameters(beta=math.inf))]}, "its beta is not a number"),
    ({"parameters": [vars(parameters(gamma=math.nan))]}, "its gamma is not a number"),
    ({"parameters": [vars(parameters()) | {"start": True}]}, "its start is not a number"),
    ({"parameters": [vars(parameters()) | {"start": 10**400}]}, "its start is not a number"),
    ({"parameters": [vars(parameters(caches=((1.0, -0.5),)))]}, "its caches is not a number"),
    ({"parameters": [vars(parameters(caches=((1.0, 1.0),) * 5))]}, "its caches are not at most four pairs"),
    ({"parameters": [vars(parameters(caches=(3.0,)))]}, "its caches are not at most four pairs"),
    ({"direct_reads": {"copied": 1}}, "its direct reads' bytes combined is not a whole number"),
    ({"direct_reads": {"copied": -1, "combined": 0}}, "its direct reads' bytes copied is not a number in the range"),
    ({"direct_reads": 3}, "its entry on direct reads is not a JSON object"),
    ({"parameters": [vars(parameters()) | {"ranks": 2.5}]}, "its ranks is not a whole number"),
    ({"parameters": {}}, "its parameters are not a list"),
    ({"parameters": [7]}, "an entry of its parameters is not a JSON object"),
    ({"measured": [{"collective": "all_reduce"}]}, "its bytes are not a list"),
    ({"measured": [times(nbytes=(4, 4, 8))]}, "its sizes do not ascend"),
    ({"measured": [times(nbytes=(4, 8))]}, "not of one length"),
    ({"measured": [times(seconds=(1.0, 0.0, 1.0))]}, "its seconds is not a number"),
    ({"measured": [times(algorithm="\x1b[2J" * 20)]}, "its algorithm is not a short text"),
    ({"date": "x" * 1000}, "its date is not a short text"),
    ({"load": {"a": "b"}}, "its load is not a number"),
]


@pytest.mark.parametrize(("change", "words"), WRONG)
def test_wrong_content_is_named_and_ignored(cache, change, words):
    if "measured" in change:
        change = {
            "measured": [
                profile(measured=[m]).to_json()["measured"][0] if not isinstance(m, dict) else m for m in change["measured"]
            ]
        }
    path = kept(**change)
    with pytest.warns(RuntimeWarning) as caught:
        assert current() is None
    (text,) = [str(w.message) for w in caught]
    assert text.startswith(f"funccoll: the machine profile {path} is ignored: ") and words.replace("\\", "") in text
    assert text.endswith("Measure this host with `funccoll tune`, or remove the file with `funccoll tune --delete`.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current() is None  # said once
    assert Topology.one_host(2) == DEFAULTS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 50_000,
        b"1" * 5000,
        b'"\\ud800"',
        b"{}",
        b" " * (MOST_BYTES + 1),
    ],
)
def test_what_is_no_profile_is_ignored(cache, content):
    kept().write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is ignored: "):
        assert current() is None


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 60))
def test_damaged_bytes_never_raise_anything_but_a_reason(noise, at, length):
    text = json.dumps(profile(measured=[times()]).to_json()).encode()
    damaged = text[:at] + noise + text[at + length :]
    try:
        found = json.loads(damaged)
    except (ValueError, RecursionError):
        return
    with suppress(ValueError):
        assert MachineProfile.from_json(found).parameters


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o666), "users other than its owner can write .*mode 666"),
        (lambda path: path.parent.chmod(0o770), "users other than its owner can write .*funccoll .mode 770"),
        (lambda path: (path.rename(path.parent / "there"), path.symlink_to(path.parent / "there")), "is a symbolic link"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file"),
        pytest.param(lambda path: os.chown(path, 12345, -1), "belongs to user 12345", marks=ROOT),
    ],
)
def test_files_of_others_are_not_read(cache, spoil, words):
    spoil(kept())
    with pytest.warns(RuntimeWarning, match=words):
        assert current() is None


def test_the_environment_names_another_file_or_none(cache, tmp_path, monkeypatch):
    save(profile(parameters(alpha=1.0)), default_path())
    other = tmp_path / "other.json"
    save(profile(parameters(alpha=2.0)), other)
    assert Topology.one_host(2).host.alpha == 1.0
    monkeypatch.setenv(MACHINE_PROFILE, str(other))
    assert Topology.one_host(2).host.alpha == 2.0
    monkeypatch.setenv(MACHINE_PROFILE, "none")
    assert Topology.one_host(2) == DEFAULTS
    monkeypatch.setenv(MACHINE_PROFILE, str(tmp_path / "absent"))
    with pytest.warns(RuntimeWarning, match=f"absent is ignored: it does not exist. .* or unset {MACHINE_PROFILE}."):
        assert Topology.one_host(2) == DEFAULTS


def test_without_a_file_nothing_is_said(cache, monkeypatch):
    assert current() is None and not default_path().parent.exists()
    monkeypatch.setattr(machine_profile.private_files, "user_cache", lambda: None)
    machine_profile._own.cache_clear()
    assert current() is None and default_path() is None


def test_the_file_is_read_once_and_not_at_import(cache):
    path = kept()
    code = (
        "import os, sys, funccoll as fc, numpy as np\nfrom funccoll import P, schedules\nopened = []\n"
        "def hook(event, args):\n    if event == 'open' and 'machine-profile' in str(args[0]): opened.append(args[0])\n"
        "sys.addaudithook(hook)\n"
        "mesh = fc.make_mesh({'d': 2})\nassert not opened\n"
        "step = fc.jit(lambda x: fc.all_reduce(x, 'd'), mesh=mesh, in_specs=P('d'), out_specs=P())\n"
        "for n in (2, 8, 32): step(np.ones(n))\nschedules.explain('all_reduce', 2, 64)\nprint(*opened)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [str(path)] and done.stderr == ""


# ---------------------------------------------------------------- costs and choices


def test_one_host_takes_the_parameters_of_the_ranks():
    few, more = parameters(2, alpha=1e-6), parameters(4, alpha=5e-6, start=7e-6, gamma=3e-10)
    with in_use(profile(few, more)):
        found = [Topology.one_host(p).host.alpha for p in (2, 3, 4, 5, 64)]
        assert found == [1e-6, 5e-6, 5e-6, 5e-6, 5e-6]
        four = Topology.one_host(4)
        assert (four.name, four.nranks, four.start, four.gamma, four.host.shared) == ("one_host", 4, 7e-6, 3e-10, True)
        assert Topology.one_host(1).start == 0
    assert Topology.one_host(2) == DEFAULTS


@given(
    any_parameters,
    st.sampled_from(["two_shot", "ring", "rabenseifner", "one_shot"]),
    st.integers(2, 6),
    st.integers(1, 1 << 30),
)
def test_start_and_caches_in_the_cost(found, name, p, n):
    schedule = build("all_reduce", p, name)
    factor = 1 + sum(excess * (1 - held / (2 * n)) for held, excess in found.caches if 2 * n > held)
    for memory in (False, True):
        plain = Topology.uniform(p, found.alpha, found.beta * factor, found.gamma * factor)
        here = replace(plain, hosts=1, ranks_per_host=p, memory=memory)
        found_seconds = schedule.cost(
            replace(here, start=found.start, host=replace(here.host, beta=found.beta), gamma=found.gamma, caches=found.caches),
            n,
        ).seconds
        assert found_seconds == pytest.approx(found.start + schedule.cost(here, n).seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "name", "waits", "traffic", "reduced"),
    [
        ("all_reduce", "two_shot", lambda p: 0, lambda p: 2, lambda p: (p - 1) / p),
        ("all_reduce", "one_shot", lambda p: 0, lambda p: p + 1, lambda p: p - 1),
        # Each round of the first half reads two chunks and writes one, of the second half one and one; the first one
        # reads inputs.
        ("all_reduce", "ring", lambda p: 2 * (p - 1) - 1, lambda p: 5 * (p - 1) / p, lambda p: (p - 1) / p),
        ("all_gather", "direct", lambda p: 0, lambda p: 2, lambda p: 0),
        ("reduce_scatter", "direct", lambda p: 0, lambda p: (p + 1) / p, lambda p: (p - 1) / p),
        ("all_to_all", "direct", lambda p: 0, lambda p: 2, lambda p: 0),
    ],
)
def test_the_closed_forms_of_shared_memory(kind, name, waits, traffic, reduced):
    for p in (2, 3, 4, 8):
        schedule, n = build(kind, p, name), 64 * p
        for alpha, beta, gamma in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (3.0, 0.5, 0.25)):
            topology = Topology.measured_host(p, parameters(p, 7.0, alpha, beta, gamma, ()))
            wanted = 7.0 + waits(p) * alpha + traffic(p) * n * beta + reduced(p) * n * gamma
            assert schedule.cost(topology, n).seconds == pytest.approx(wanted), p
            found = schedule.simulate(topology, n)
            assert found.seconds == pytest.approx(wanted) and found.start.min() == 7.0, p


@given(
    any_parameters,
    st.sampled_from([(k, a) for k in KINDS if k != "permute" for a in schedules.algorithms(k)]),
    st.integers(2, 6),
    st.integers(1, 1 << 24),
)
@examples(60)
def test_a_simulation_in_shared_memory_is_not_longer_than_its_cost(found, kind_and_name, p, n):
    """Ranks that run ahead of each other gain; and each rank's own work is the least that it takes."""
    kind, name = kind_and_name
    if name not in schedules.algorithms(kind, p):
        return
    schedule, topology = build(kind, p, name), Topology.measured_host(p, found)
    simulated, costed = schedule.simulate(topology, n).seconds, schedule.cost(topology, n).seconds
    assert topology.start <= simulated <= costed * (1 + 1e-9) + 1e-18


def test_slow_ranks_and_links_in_shared_memory():
    schedule, p, n = build("all_gather", 4, "direct"), 4, 4096
    topology = Topology.measured_host(p, parameters(p, 0.0, 0.0, 1.0, 0.0, ()))
    assert schedule.simulate(topology, n).finish.tolist() == [2 * n] * p
    # Rank 3 reads from every rank, and writes, at half its speed; the others read a quarter from it.
    assert schedule.simulate(topology, n, slow_ranks={3: 2.0}).seconds == 2 * 2 * n
    slower = schedule.simulate(topology, n, slow_links={(0, 1): 3.0})
    assert slower.seconds == 2 * n + 2 * n / 4


def test_one_rank_costs_nothing_in_shared_memory():
    topology = Topology.measured_host(1, parameters(start=1.0, beta=0.0))
    one = build("all_reduce", 1, "ring")
    assert one.simulate(topology, 64).seconds == one.cost(topology, 64).seconds == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": -1.0}, "start=-1.0 must be"),
        ({"caches": ((0, 1.0),)}, "caches=((0, 1.0),) must be pairs"),
        ({"caches": ((1, math.nan),)}, "caches="),
        ({"placement": (0, 1)}, "placement=(0, 1) is 2 hosts"),
    ],
)
def test_parameters_that_cannot_be(change, words):
    with pytest.raises(fc.errors.ScheduleError) as caught:
        replace(Topology.one_host(2), **change)
    assert words in str(caught.value)


def test_the_choice_follows_the_profile():
    assert select("all_reduce", 2, 64).algorithm == "one_shot"  # one message less
    with in_use(profile()):
        assert select("all_reduce", 2, 64).algorithm == "two_shot"  # the same wait, and less to read
    with in_use(profile(parameters(beta=0.0, gamma=0.0))):
        assert explain("all_reduce", 2, 1 << 30).rows[1].reason == "costs the same, registered later"


@given(
    any_parameters,
    st.sampled_from([k for k in KINDS if KINDS[k].combines]),
    st.integers(2, 6),
    st.integers(1, 1 << 32),
    st.sampled_from([None, np.float32, np.float16]),
)
@examples(60)
def test_no_profile_changes_the_default_bits(found, kind, p, n, dtype):
    with in_use(profile(found)):
        chosen = select(kind, p, n, dtype=dtype)
        rounds = dtype == np.float16  # then a scan's partial results would change bits

        def has_default_bits(proof: Any) -> bool:
            return (proof.left_fold and not proof.partial_sums) or (proof.sequential and not rounds)

        assert has_default_bits(chosen.prove())
        found = [c for c in candidates(kind, p, n, dtype=dtype) if c.schedule and not has_default_bits(c.schedule.prove())]
        assert all(c.objection for c in found)


def test_no_profile_changes_the_bits_of_a_program(line):
    x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    results = []
    for found in (None, profile(parameters(4))):
        fc.clear_caches()
        with in_use(found):
            step = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=line, in_specs=P("data"), out_specs=P())
            results.append((step.lower(x).collectives().rows[0].schedule, np.asarray(step(x)).tobytes()))
    assert [name for name, _ in results] == ["one_shot", "two_shot"] and len({bits for _, bits in results}) == 1
