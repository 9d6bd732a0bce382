"""One rank of one contender of `benchmarks/calls/call_profile.py`: `python call_profile_rank.py ADDRESS MEMORY`."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import itertools
import mmap
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

import funccoll as fc
from benchmarks.calls import perf_counters
from benchmarks.calls.instruction_count import marked
from benchmarks.calls.plan_facts import plan_facts
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_ours import BODIES, D, Ours
from benchmarks.one_host.host_rank import percentiles, serve
from funccoll.kernels.intrinsics import load_acquire, pause, store_release

WARM = 50
"""Calls before those that are timed: the caches hold the other contenders' memory and code."""
AROUND = 2000
"""Iterations of the reference loop before and after calls."""
LINE = 256
"""Bytes between the words of two ranks: no processor fetches them together."""
COUNTED = {event: None for event in perf_counters.EVENTS if event not in perf_counters.unsupported()}


@njit
def ping_pong(mine: int, theirs: int, first: bool, start: int, times: int) -> None:
    """Write a word that another core waits for, and wait for its answer, so many times."""
    for i in range(start + 1, start + times + 1):
        if first:
            store_release(mine, i)
        while load_acquire(theirs) < i:
            pause()
        if not first:
            store_release(mine, i)


def reference_loop(times: int) -> float:
    """Seconds of an iteration of a loop in Python that touches nothing but a few local objects."""
    begin, total = time.perf_counter(), 0
    for i in range(times):
        total += i
    return (time.perf_counter() - begin) / times


class Player:
    """The commands, executed by one rank."""

    def __init__(self, memory: str):
        self.contender = Ours()
        descriptor = os.open(memory, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, LINE * self.contender.ranks)
        os.close(descriptor)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words = [start + LINE * rank for rank in range(self.contender.ranks)]
        self.passed = 0
        self.layers: dict[str, Callable[[], Any]] = {}
        self.native: Callable[[int], Any] = lambda times: None

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return self.contender.versions()

    def prepare(self, kind: str, nbytes: int) -> dict[str, Any]:
        """Compile a collective; return bytecode instructions of each layer, by function, and its plan."""
        body, out = BODIES[kind]
        step = fc.jit(body, mesh=self.contender.mesh, in_specs=D, out_specs=out)
        x = fc.from_local(np.ones(nbytes // 4, np.float32), self.contender.mesh, D)
        for _ in range(5):
            y = step(x)
        self.kept = y
        compiled: Any = step.lower(x).compile()
        (group,) = compiled.group_calls
        fast = compiled.fast_path([x])
        leaves, block = [x], x.local
        self.layers = {
            "step(x)": lambda: step(x),
            "without finding the program": lambda: fast(leaves),
            "without Arrays: the group": lambda: group(block),
            "an empty call": lambda: None,
        }
        self.native = lambda times: group.repeat(times, block)
        for call in self.layers.values():
            call()
        ping_pong(self.words[self._me], self.words[1 - self._me], self._me == 0, 0, 0)
        return {
            # Of several counts the least: in some, the other rank comes late, and Python waits for it.
            "bytecode": {
                name: min((bytecode_of(call) for _ in range(5)), key=lambda found: sum(found.values()))
                for name, call in self.layers.items()
            },
            "implementation": type(group).__module__ + "." + type(group).__qualname__,
            "fast_paths": f"{type(fast).__module__}.{type(fast).__qualname__}",
            "plan": plan_facts([group]),
            "code": group.plan.text().splitlines(),
            "thread": threading.get_native_id(),
            "unsupported": perf_counters.unsupported(),
        }

    def execute(self, layer: str) -> None:
        """One call at this layer, or `native` ones; on rank 0 between marks, for `instruction_count`."""
        call = self.layers.get(layer) or functools.partial(self.native, int(layer.removeprefix("native ")))
        gc.disable()
        self.contender.barrier()
        if self._me == 0:
            marked(call)
        else:
            call()
        gc.enable()

    @property
    def _me(self) -> int:
        return self.contender.rank

    def reference(self, ranks: tuple[int, ...], times: int) -> float | None:
        """Seconds of an iteration of the reference loop, where this rank is one of these; the others sleep."""
        if len(ranks) > 1:
            self.contender.barrier()
        return reference_loop(times) if self._me in ranks else None

    def latency(self, times: int) -> float:
        """Seconds in which a word that one core writes is seen by the other one."""
        mine, theirs = self.words[self._me], self.words[1 - self._me]
        self.contender.barrier()
        begin = time.perf_counter()
        ping_pong(mine, theirs, self._me == 0, self.passed, times)
        took = time.perf_counter() - begin
        self.passed += times
        return took / times / 2

    def time(self, calls: int, first: int) -> dict[str, Any]:
        """Seconds of each layer, from the `first` on in a circle, and what the kernel says of this thread meanwhile."""
        found: dict[str, Any] = dict.fromkeys(self.layers)
        usage, waited = resource.getrusage(resource.RUSAGE_THREAD), run_queue_wait()
        names = [*self.layers]
        for name in (*names[first:], *names[:first]):
            call = self.layers[name]
            self.contender.barrier()
            for _ in range(WARM):
                call()
            self.contender.barrier()
            around = reference_loop(AROUND)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            found[name] = (time.perf_counter() - begin) / calls
            if name == "step(x)":
                found["reference, around the calls"] = (around + reference_loop(AROUND)) / 2
        self.contender.barrier()
        begin = time.perf_counter()
        self.native(calls)
        found["native"] = (time.perf_counter() - begin) / calls
        after = resource.getrusage(resource.RUSAGE_THREAD)
        found["switches, voluntary"] = after.ru_nvcsw - usage.ru_nvcsw
        found["switches, involuntary"] = after.ru_nivcsw - usage.ru_nivcsw
        found["minor faults"] = after.ru_minflt - usage.ru_minflt
        found["waited for a core"] = run_queue_wait() - waited
        return found

    def single(self, calls: int) -> Turn:
        """Median and 99th percentile of single calls of the step."""
        step, stamps = self.layers["step(x)"], [0.0] * (calls + 1)
        self.contender.barrier()
        stamps[0] = begin = time.perf_counter()
        for i in range(calls):
            step()
            stamps[i + 1] = time.perf_counter()
        durations = [after - before for before, after in itertools.pairwise(stamps)]
        return Turn((stamps[-1] - begin) / calls, 0.0, *percentiles(durations))

    def count(self, calls: int) -> dict[str, float]:
        """Events of one call of the step, where the kernel counts them."""
        step = self.layers["step(x)"]
        self.contender.barrier()
        with perf_counters.counted(COUNTED) as found:
            for _ in range(calls):
                step()
        return {event: number / calls for event, number in found.items()}


def bytecode_of(call: Callable[[], Any]) -> dict[str, int]:
    """The bytecode instructions that one call executes, by function; without those of `call` itself, which is a lambda."""
    found: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_code is not getattr(call, "__code__", None):
            code = frame.f_code
            found[f"{Path(code.co_filename).name}: {code.co_qualname}"] += 1
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return dict(found)


def run_queue_wait() -> float:
    """Seconds for which this thread could run, and had no processor, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    serve(sys.argv[1], Player(sys.argv[2]))
