"""Programs of ranks whose profiles `test_profile_recording.py` reads."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
import warnings
import weakref
from itertools import count

import numpy as np

import funccoll as fc
from funccoll import P

DELAY = 0.3


def hear():
    return sys.stdin.readline().strip()


def say(*words):
    print(*words, flush=True)


def step(mesh, axis, kind="all_reduce", **options):
    """A jitted function that computes and communicates."""
    collective = getattr(fc, kind)
    out = P() if kind in ("all_reduce", "all_gather", "broadcast") and axis == mesh.axis_names else P(mesh.axis_names)

    def body(x):
        return collective(np.tanh(x) * 2, axis, **options)

    return fc.jit(body, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out)


def meet(folder):
    """Return when all ranks are here, without a collective: one that enters the profile later is a cause of waiting."""
    (folder / f"here-{fc.rank()}").touch()
    end = time.monotonic() + 100
    while len([*folder.glob("here-*")]) < fc.world_size() and time.monotonic() < end:
        time.sleep(0.001)


def chain(directory):
    """Rank 3 is late for one collective; rank 2 waits for it, and ranks 0 and 1 for rank 2: over the other axis."""
    mesh = fc.make_mesh({"a": 2, "b": 2})
    rows, columns = (step(mesh, axis, "all_to_all", split_dim=0, concat_dim=0) for axis in ("b", "a"))
    x = np.ones((4 * 256, 8), np.float32)  # too large for a mailbox
    for _ in range(2):
        rows(x), columns(x)
    with fc.profile(directory) as folder:
        meet(folder)
        for i in range(3):
            if fc.rank() == 3 and i == 1:
                time.sleep(DELAY)  # the line that is late
            y = rows(x)
            columns(y)
    say(folder)


def late(directory):
    """Rank 1 enters the profile when rank 0 waits for it; what it computes then is in two lines, and a scope."""
    mesh = fc.make_mesh({"d": 2})

    def body(x):
        with fc.named_scope("outer"):
            y = np.tanh(x) * 2  # the first line
            with fc.named_scope("inner"):
                z = np.exp(y) + y  # the second line
                return fc.all_reduce(np.sum(z), "d") + np.sum(x, axis=0)  # the third line

    f = fc.jit(body, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = np.ones((1 << 12, 8), np.float32)
    f(x)
    if fc.rank() == 0:
        with fc.profile(directory):
            f(x)
        return
    wait_graph = mesh.transport.job.communicators
    (communicator,) = [mine for mine, _ in wait_graph._known.values()]
    end = time.monotonic() + 100
    while wait_graph.counter(communicator, 0) <= wait_graph.counter(communicator, 1) and time.monotonic() < end:
        time.sleep(0.001)  # until rank 0 is in the collective
    with fc.profile(directory):
        f(x)


def killed(directory):
    """Rank 1 is killed between two collectives, and told to be in the middle of its profile."""
    mesh = fc.make_mesh({"d": 2})
    f = step(mesh, ("d",))
    x = np.ones(1 << 12, np.float32)
    with fc.profile(directory):
        try:
            for i in count():
                if i == 5:
                    time.sleep(0.3)  # rows are written four times a second
                f(x)
                if i == 5:
                    say("going on")
                    if fc.rank() == 1:
                        hear()
        except fc.errors.PeerFailure:
            say("told")
            hear()


def everything(directory):
    """What else happens around a profile in a job of two."""
    mesh, other = fc.make_mesh({"d": 2}), fc.make_mesh({"d": 2})
    f = step(mesh, ("d",))
    x = np.ones(1 << 20, np.float32)  # private arguments that are staged in segments
    f(x)
    executable = f.lower(x).compile().group_calls[0]
    with fc.profile(directory):
        try:
            with fc.profile(directory):
                pass
        except fc.errors.ProfileError as error:
            say(str(error).partition("\n")[0])
        executable.repeat(3, x[: 1 << 19])
        thread = threading.Thread(target=lambda: [step(other, ("d",))(x) for _ in range(2)])
        thread.start()
        for _ in range(3):
            f(x)
        thread.join()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        f(x)
    f(x)
    with fc.profile(directory) as folder:
        pass
    say(folder.name)


def full_disk(directory):
    """A file may not grow any more: the profile ends, and the program goes on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    mesh = fc.make_mesh({"d": 2})
    x = np.ones(1 << 12, np.float32)
    executable = step(mesh, ("d",)).lower(x).compile().group_calls[0]
    if fc.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught, fc.profile(directory):
        warnings.simplefilter("always")
        (y,) = executable.repeat(5000, x[: 1 << 11])
    say(*{str(w.message) for w in caught})
    assert np.array_equal(y, np.full(1 << 11, 2, np.float32))


def forgotten(directory):
    """A group that a profile has recorded goes, with its memory, when nothing refers to it any more."""
    mesh = fc.make_mesh({"d": 2})
    with fc.profile(directory):
        compiled = step(mesh, ("d",)).lower(np.ones(128, np.float32)).compile()
        compiled(np.ones(128, np.float32))
        executable = weakref.ref(compiled.group_calls[0])
        assert executable() is not None
        del compiled
        gc.collect()
        say(executable() is None)


def many(directory, times):
    """Many calls; the peak of this process's memory, and the bytes that it has written."""
    mesh = fc.make_mesh({"d": 2})
    f = step(mesh, ("d",))
    x = fc.from_local(np.ones(64, np.float32), mesh, P("d"))
    before = 0
    with fc.profile(directory) as folder:
        for i in range(times):
            f(x)
            if i == times // 10:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    say(grown, sum(path.stat().st_size for path in folder.glob(f"rank-{fc.rank()}*")))
