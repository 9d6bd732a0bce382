"""Measured times in profiles, and the profiles of jobs."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import schedules
from funccoll.config import MACHINE_PROFILE
from funccoll.core.machine_profile import current, save
from funccoll.schedules import Topology, explain
from tests.support.machine_profiles import SIZES, in_use, parameters, profile, times
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("profiles")

DEFAULTS = Topology("one_host", 1, 2, *[schedules.Link("shared memory", 0.2e-6, 1e-10, shared=True)] * 2, 1e-10)


# ---------------------------------------------------------------- measured times


@given(st.floats(1e-12, 1e-6), st.floats(-0.5, 1.5), st.integers(256, 65536))
def test_measured_times_are_interpolated_on_logarithms(scale, power, n):
    found = times(seconds=tuple(scale * size**power for size in SIZES))
    assert found.at(n) == pytest.approx(scale * n**power, rel=1e-9)


def test_measured_times_are_never_extrapolated():
    found = times()
    assert [found.at(n) for n in (1, 255, 65537, 1 << 40)] == [None] * 4
    assert [found.at(n) for n in SIZES] == list(found.seconds)
    assert times(nbytes=(), seconds=()).at(4) is None and times(nbytes=(8,), seconds=(1.0,)).at(8) == 1.0


MEASURED = profile(measured=[times(), times("all_gather", algorithm="direct"), times("broadcast", algorithm="flat")])


def test_explain_shows_measured_beside_predicted():
    with in_use(MEASURED):
        table = explain("all_reduce", 2, 4096)
        found = {row.algorithm: row.measured for row in table}
        assert found.pop("two_shot") == 2e-6 and set(found.values()) == {None}
        head, _, owner, one_shot, *_ = repr(table).splitlines()[1:]
        assert head.split() == ["algorithm", "rounds", "bytes/rank", "predicted", "measured"]
        assert owner.split()[-3:] == ["2", "µs", "chosen"] and "µs" in one_shot
        assert ">measured</th>" in table._repr_html_() and ">2 µs</td>" in table._repr_html_()


@pytest.mark.parametrize(
    ("question", "options"),
    [
        (("all_reduce", 2, 100), {}),  # smaller than was measured,
        (("all_reduce", 2, 1 << 20), {}),  # larger,
        (("all_reduce", 3, 4096), {}),  # other ranks,
        (("reduce_scatter", 2, 4096), {}),  # another collective,
        (("all_reduce", Topology.ethernet(2), 4096), {}),  # another machine,
        (("all_reduce", DEFAULTS, 4096), {}),  # and another one that has this one's name,
        (("all_reduce", 2, 4096), {"dtype": np.float64}),  # another reduction,
        (("broadcast", 2, 4096), {"root": 1}),  # another root
    ],
)
def test_what_was_not_measured_is_not_shown(question, options):
    with in_use(MEASURED):
        table = explain(*question, **options)
        assert all(row.measured is None for row in table) and "measured" not in repr(table).splitlines()[1].split()
        assert "time" in table.head


def test_moves_are_measured_whatever_their_dtype():
    with in_use(MEASURED):
        assert explain("all_gather", 2, 4096, dtype=np.float16).rows[0].measured == 2e-6
        assert explain("broadcast", 2, 4096, dtype=np.int8).rows[0].measured == 2e-6


def test_a_bucket_plan_shows_measured_times():
    dp = fc.data_parallel(lambda p, x: ((x @ p) ** 2).mean(), bucket_cap_mb=1)
    given_, mesh = np.ones((1024, 4), np.float32), fc.make_mesh({"data": 2})
    x = np.ones((4, 1024), np.float32)
    assert "measured" not in repr(dp.explain(mesh, given_, x)) and dp.explain(mesh, given_, x).rows[0].measured is None
    with in_use(MEASURED):
        plan = dp.explain(mesh, given_, x)
        assert plan.rows[0].measured == pytest.approx(times().at(16384))
        assert repr(plan).splitlines()[0].split()[-2:] == ["measured", "parameters"] and "measured" in plan._repr_html_()


# ---------------------------------------------------------------- jobs


CHOICE = f"""
import json, sys, warnings
warnings.simplefilter("default")
{JOIN}
import funccoll as fc
from funccoll import P, schedules
from funccoll.core import machine_profile
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({{"d": 2}}), in_specs=P("d"), out_specs=P())
x = np.arange(8, dtype=np.float32)
lowered, value = step.lower(x), np.asarray(step(x))
table = schedules.explain("all_reduce", 2, 4096)
say(json.dumps([lowered.collectives().rows[0].schedule, lowered.fingerprint, value.tolist(),
                schedules.select("all_reduce", 2, 64).algorithm, repr(table)]))
fc.finalize()
found = machine_profile.current()
say(json.dumps(None if found is None else found.parameters[0].alpha))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("files", "chosen", "after"),
    [
        (("two_shot", "damaged"), "two_shot", (0.0, None)),
        (("none", "two_shot"), "one_shot", (None, 0.0)),
        pytest.param(("damaged", "two_shot"), "one_shot", (None, 0.0), marks=pytest.mark.slow),
        pytest.param(("two_shot", "none"), "two_shot", (0.0, None), marks=pytest.mark.slow),
        pytest.param(("other", "two_shot"), "two_shot", (0.5, 0.0), marks=pytest.mark.slow),
    ],
)
def test_all_ranks_choose_by_the_profile_of_rank_0(tmp_path, files, chosen, after):
    """Whichever ranks have a profile, and whatever it says; afterwards each has its own again."""
    save(profile(parameters(alpha=0.0), measured=[times()]), tmp_path / "two_shot")
    save(profile(parameters(alpha=0.5)), tmp_path / "other")
    (tmp_path / "damaged").write_text('{"format": 1')
    (tmp_path / "damaged").chmod(0o600)
    with Ranks(CHOICE, [], world=2) as ranks:
        for rank, name in enumerate(files):
            ranks.start(rank, CHOICE, **{MACHINE_PROFILE: "none" if name == "none" else str(tmp_path / name)})
        assert ranks.lines() == {0: "in", 1: "in"}
        first, second = (json.loads(line) for line in ranks.lines().values())
        assert first == second and first[0] == first[3] == chosen and first[2] == [4.0, 6.0, 8.0, 10.0]
        assert ("measured" in first[4]) == (files[0] == "two_shot")
        assert tuple(json.loads(line) for line in ranks.lines().values()) == after
        for rank in (0, 1):
            code, _, err = ranks.end(rank)
            assert code == 0 and err.count("damaged is ignored: it is not JSON") == (files[rank] == "damaged"), err


def test_scripts_know_where_the_tests_profile_is():
    assert os.environ[MACHINE_PROFILE] == "none" and current() is None
    assert not Path("none").exists()
