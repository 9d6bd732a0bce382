"""Measurement of this host: jobs that time collectives, and the machine profile made of their times."""

from __future__ import annotations

import datetime
import os
import random
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...core.host_identity import this_host
from ...core.machine_profile import DIRECT_READS, DirectReads, HostParameters, MachineProfile, MeasuredTimes
from ...errors import CalibrationError
from ...job.launch import launch
from .fit_parameters import Sample, fit
from .machine_load import OtherProcesses, excess
from .rank_timings import time_cases
from .timed_cases import Case

__all__ = ["four_digits", "measure", "measured_times", "profile_of", "samples_of"]

_LOOK = 0.5
"""Seconds of watching the load before the measurement."""
PASSES = 2
"""How often all cases are measured, each time in another order, so that a drift of the machine affects all of them."""


def measure(
    plan: Mapping[int, Sequence[Case]], turns: int, turn_seconds: float, told: Callable[[int], object], anyway: bool = False
) -> tuple[list[MeasuredTimes], dict[str, float]]:
    """Run a job for each number of ranks in `plan`, which times its cases. Return (times, load).

    Every case has `turns` turns of about `turn_seconds` in each of two passes. `told(ranks)` is called, in another thread,
    after each case of a pass. The load is the number of processors that other processes kept busy, before and during the
    measurement, and the share of the cases in which they disturbed every turn.

    Raise CalibrationError if that was too much, unless `anyway`.
    """
    most = max(plan)
    with OtherProcesses() as before:
        time.sleep(_LOOK)
    _check(before.rate, most, "before anything was measured", anyway)
    found: dict[int, list[list[float]]] = {ranks: [[] for _ in cases] for ranks, cases in plan.items()}
    disturbed = 0
    with OtherProcesses() as during:
        own = _own_seconds()
        for number in range(PASSES):
            for ranks, cases in plan.items():
                order = random.Random(number).sample(range(len(cases)), len(cases))
                with _progress(lambda ranks=ranks: told(ranks)) as file:
                    times, some_disturbed = launch(time_cases, ranks, [cases[i] for i in order], turns, turn_seconds, file)[0]
                disturbed += some_disturbed
                for i, some in zip(order, times, strict=True):
                    found[ranks][i] += some
        during.own = _own_seconds() - own
    _check(during.rate, most, "while it was measured", anyway)
    times = [t for ranks, cases in plan.items() for t in measured_times(ranks, cases, found[ranks])]
    counted = PASSES * sum(map(len, plan.values()))
    return times, {
        "others_before": round(before.rate, 2),
        "others_during": round(during.rate, 2),
        "disturbed_cases": round(disturbed / counted, 3),
    }


def _check(rate: float, ranks: int, when: str, anyway: bool) -> None:
    why = "" if anyway else excess(rate, ranks)
    if why:
        raise CalibrationError(
            f"this machine is too busy to be measured: {when} {why}. Measure when it is quiet, or take the times as they "
            "are with --anyway."
        )


def _own_seconds() -> float:
    """Return the processor seconds of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextmanager
def _progress(told: Callable[[], object]) -> Iterator[str]:
    """Yield the name of a file, and call `told` in a thread for each byte in it. A rank writes one after each case."""
    reader, writer = os.pipe()

    def listen() -> None:
        while count := len(os.read(reader, 4096)):
            for _ in range(count):
                told()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield f"/proc/{os.getpid()}/fd/{writer}"
    finally:  # the ranks have ended: the thread reads the rest, to the end of the file
        os.close(writer)
        thread.join()
        os.close(reader)


def measured_times(ranks: int, cases: Sequence[Case], turns: Sequence[Sequence[float]]) -> list[MeasuredTimes]:
    """Return medians and quartiles of the turns of each case, by algorithm."""
    rows: dict[tuple[str, str], list[tuple[int, float, float, float]]] = {}
    for case, seconds in zip(cases, turns, strict=True):
        low, median, high = (four_digits(x) for x in statistics.quantiles(seconds, n=4, method="inclusive"))
        rows.setdefault((case.kind, case.algorithm), []).append((case.nbytes, median, low, high))
    return [
        MeasuredTimes(kind, ranks, name, *(tuple(column) for column in zip(*sorted(found), strict=True)))
        for (kind, name), found in rows.items()
    ]


def four_digits(seconds: float) -> float:
    """Round to four digits, more than a measurement has."""
    return float(f"{seconds:.4g}")


def samples_of(times: Sequence[MeasuredTimes], ranks: int) -> list[Sample]:
    """Return the measured times of a number of ranks, one by one."""
    return [
        Sample(m.kind, m.algorithm, n, seconds)
        for m in times
        if m.ranks == ranks
        for n, seconds in zip(m.nbytes, m.seconds, strict=True)
    ]


def profile_of(
    times: Sequence[MeasuredTimes], load: dict[str, float], direct_reads: DirectReads = DIRECT_READS
) -> MachineProfile:
    """Return the profile of this host: measured times, and the parameters fitted to them for each number of ranks."""
    parameters = []
    for ranks in sorted({m.ranks for m in times}):
        found = fit(samples_of(times, ranks), ranks).parameters
        start, alpha, beta, gamma = (four_digits(t) for t in (found.start, found.alpha, found.beta, found.gamma))
        caches = tuple((float(round(held)), four_digits(excess)) for held, excess in found.caches)
        parameters.append(HostParameters(ranks, start, alpha, beta, gamma, caches))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    load = load | dict(zip(("load_1", "load_5", "load_15"), (round(x, 2) for x in os.getloadavg()), strict=True))
    return MachineProfile(this_host(), now, load, tuple(parameters), tuple(times), direct_reads=direct_reads)
