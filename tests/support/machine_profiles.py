"""Machine profiles for tests: of this host, with any parameters and times."""

from contextlib import contextmanager

from hypothesis import strategies as st

from funccoll.core import machine_profile
from funccoll.core.host_identity import this_host
from funccoll.core.machine_profile import HostParameters, MachineProfile, MeasuredTimes

SIZES = (256, 4096, 65536)


def parameters(ranks=2, start=1e-7, alpha=1e-7, beta=1e-10, gamma=1e-10, caches=((2.0**20, 1.0),)):
    return HostParameters(ranks, start, alpha, beta, gamma, caches)


def times(kind="all_reduce", ranks=2, algorithm="two_shot", nbytes=SIZES, seconds=(1e-6, 2e-6, 8e-6)):
    return MeasuredTimes(kind, ranks, algorithm, nbytes, seconds, seconds, seconds)


def profile(*given, measured=()):
    """A profile of this host with the given parameters."""
    found = given or (parameters(),)
    return MachineProfile(this_host(), "2026-11-23T06:00:00+00:00", {"others_during": 0.0}, tuple(found), tuple(measured))


@contextmanager
def in_use(found):
    """Use a profile as if it were a job's."""
    machine_profile.adopt(None if found is None else found.to_json())
    try:
        yield
    finally:
        machine_profile.release()


seconds = st.one_of(st.just(0.0), st.floats(1e-12, 1.0))
caches = st.lists(st.tuples(st.floats(1.0, 1e15), st.floats(0.0, 1000.0)), max_size=3).map(tuple)
any_parameters = st.builds(HostParameters, st.just(2), seconds, seconds, seconds, seconds, caches)
"""Whatever a file may say, for two ranks."""


@st.composite
def profiles(draw):
    ranks = sorted(draw(st.sets(st.integers(2, 300), min_size=1, max_size=4)))
    found = [draw(any_parameters) for _ in ranks]
    measured = []
    for kind, name in draw(st.sets(st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.text("abc_", min_size=1)))):
        sizes = sorted(draw(st.sets(st.integers(1, 1 << 40), max_size=5)))
        columns = [tuple(draw(st.floats(1e-9, 1e3)) for _ in sizes) for _ in range(3)]
        measured.append(MeasuredTimes(kind, draw(st.sampled_from(ranks)), name, tuple(sizes), *columns))
    given = [HostParameters(n, *list(vars(p).values())[1:]) for n, p in zip(ranks, found, strict=True)]
    return profile(*given, measured=measured)
