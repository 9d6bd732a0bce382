"""Trials of jobs on one GPU: several processes over CUDA IPC, NCCL, and the demo."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu_check.gpu_machine import refusal_of_interprocess_memory
from tests.gpu_check.gpu_trial import (
    ROOT,
    Skipped,
    beside,
    device,
    ended,
    found,
    rehearses,
    require,
    require_gpu,
    seconds_left,
)

_SHARED_GPU = 23000
"""The first version of NCCL whose ranks may share a GPU: 2.30."""


def run_job(count: int, function: str, *arguments: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a function, module:name, by `funccoll run` in a number of processes, on the device of the trial."""
    module, _, name = function.partition(":")
    call = f"from tests.gpu_check.{module} import {name}; {name}(*{arguments!r})"  # an exception of a rank is its own
    command = [sys.executable, "-m", "funccoll", "run", "-n", str(count), "--", sys.executable, "-c", call]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "FUNCCOLL_DEVICE": device(), "PYTHONFAULTHANDLER": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds_left(),
        )
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        raise TimeoutError(f"the job did not end in {error.timeout:.0f} s: {text[-2500:]}") from None
    done.stdout = re.sub(r"(?m)^.*Extension modules: .*\n?", "", done.stdout)  # thousands of letters, after where it died
    return done


def require_sharing() -> None:
    """Raises: Skipped where processes cannot map each other's memory on the GPU."""
    if device() == "cuda" and (refused := refusal_of_interprocess_memory()):
        raise Skipped(f"CUDA IPC does not work here: {refused}")


# ---------------------------------------------------------------- processes


def compare(case: str, n: int) -> None:
    """A case of `process_cases` in n processes on one GPU: the bits of virtual devices on the CPU."""
    require_sharing()
    from tests.support.cases import process_cases

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record")
        process_cases.record(case, n, record)
        programs = len(pickle.loads(record.read_bytes()))
        began = time.monotonic()
        done = run_job(n, "gpu_jobs:rank", case, str(record))
    took = time.monotonic() - began
    transports = sorted(set(re.findall(r"transport of a mesh: ([\w ]+)\.", done.stdout)))
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} with {transports}: {done.stdout[-2500:]}")
    says = f"{case} in {n} processes over {', '.join(transports)}: {programs} programs, 3 calls each"
    found("programs", says, counts=True, seconds=round(took, 1), transports=transports)


def rank(case: str, record: str) -> None:
    """One process of the job."""
    import funccoll as fc
    from tests.support.cases import process_cases

    made, make = dict[tuple, Any](), fc.make_mesh

    def once(axes: dict[str, int]) -> Any:
        """One mesh for all programs of its axes: each that is made has memory of its own, which peers map."""
        key = tuple(axes.items())
        if key not in made:
            made[key] = make(axes)
        return made[key]

    fc.make_mesh = once  # type: ignore[assignment]
    transport = once({"d": fc.world_size()}).transport
    shared = " on one GPU" if getattr(transport, "shares_gpus", False) else ""
    print(f"transport of a mesh: {transport.name}{shared}.", flush=True)
    began, compare, numbers = time.monotonic(), process_cases.Comparing.__call__, itertools.count(1)

    def counted(self: Any, *program: Any) -> None:
        compare(self, *program)
        if (number := next(numbers)) % 10 == 1:  # for a job that does not end
            print(f"rank {fc.rank()}: {number} programs in {time.monotonic() - began:.1f} s", flush=True)

    process_cases.Comparing.rounds = device() == "cuda"  # cuBLAS
    process_cases.Comparing.__call__ = counted  # type: ignore[method-assign]
    process_cases.compare(case, Path(record))


def failing_rank(what: str) -> None:
    """One process of a job in which rank 1 fails, when both have the results of the calls before."""
    import numpy as np

    import funccoll as fc
    from tests.support.cases import process_cases

    host = fc.make_mesh({"d": fc.world_size()}, device="cpu")

    def settle() -> None:
        if device() == "cuda":
            require_gpu().cuda.Device().synchronize()
        fc.process_allgather(fc.from_local(np.zeros(1), host, fc.P("d")))

    process_cases.settle = settle
    process_cases.failure(what)


def killed_rank() -> None:
    """One process of a job in which rank 1 is killed when both have agreed to a collective, before it launches its part."""
    import numpy as np

    import funccoll as fc

    mesh = fc.make_mesh({"d": fc.world_size()})
    step = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="one_shot"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
    x = np.arange(4.0 * fc.world_size())
    np.asarray(step(x))
    if fc.rank() == 1:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        vars(mesh.transport.device.gpu).update(launch=kill) if device() == "cuda" else kill()
    try:
        np.asarray(step(x))
    except fc.FunccollError as error:
        print(f"{type(error).__name__}: {error}", "cause:", error.__cause__)
    try:
        np.asarray(step(x))
    except fc.FunccollError as again:
        print("again:", again)


_TOLD = {
    "launch": r"PeerFailure: .*rank 1 died",
    "kill": r"PeerFailure: .*rank 1 died",
    "mismatch": r"ProgramMismatch: .*differ in op",
    "raise": r"PeerFailure: .*rank 1 raised ValueError: rank 1 has had enough",
}


def failure(what: str) -> None:
    """Rank 1 dies ("launch": between agreement and launch), raises or runs another program.

    Rank 0 is told so, and every later call is refused.
    """
    require_sharing()
    began = time.monotonic()
    done = run_job(2, "gpu_jobs:killed_rank") if what == "launch" else run_job(2, "gpu_jobs:failing_rank", what)
    took = time.monotonic() - began
    told = re.search(_TOLD[what], done.stdout, re.DOTALL)
    if told is None or "again: an earlier failure ended all collectives" not in done.stdout:
        raise AssertionError(f"rank 0 was not told by {_TOLD[what]!r}: {done.stdout[-2500:]}")
    found("rank 0 is told", " ".join(told[0].split())[:200], seconds=round(took, 1), output=done.stdout[-3000:])


# ---------------------------------------------------------------- NCCL


def _nccl() -> Any:
    require_gpu()
    from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]

    if not nccl.available:
        raise Skipped("CuPy finds no NCCL: pip install nvidia-nccl-cu13")
    return nccl


def nccl(ranks: int) -> None:
    """CuPy's NCCL with one rank; with two that share the GPU, where NCCL allows that."""
    module = _nccl()
    version = module.get_version()
    if ranks > 1 and version < _SHARED_GPU:
        raise Skipped(f"NCCL {version}: several ranks on one GPU need 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    sharing = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if ranks > 1 else {}
    identity = pickle.dumps(module.get_unique_id()).hex()
    processes = [beside("gpu_jobs:nccl_rank", ranks, r, identity, NCCL_DEBUG="WARN", **sharing) for r in range(ranks)]
    try:
        outcomes = [ended(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for r, (code, out) in enumerate(outcomes):
        if code or "nccl is right" not in out:
            raise RuntimeError(f"rank {r} of {ranks}, NCCL {version}: exit code {code}: {out[-2000:]}")
    found("NCCL", f"{version}, {ranks} rank(s): all_reduce, send and recv, split, in a CUDA graph too", counts=True)


def nccl_rank(ranks: int, rank: int, identity: str) -> None:
    """One rank: its sums, what its neighbour has sent, and a replay of both."""
    nccl, cupy = _nccl(), require_gpu()
    import numpy as np

    whole = nccl.NcclCommunicator(ranks, pickle.loads(bytes.fromhex(identity)), rank)
    communicators = [whole]
    if hasattr(whole, "commSplit"):
        communicators.append(whole.commSplit(0, rank))
    mine = cupy.arange(1000, dtype=np.float32) + rank
    total, received = cupy.zeros_like(mine), cupy.zeros_like(mine)
    stream = cupy.cuda.Stream(non_blocking=True)

    def exchange(communicator: Any) -> None:
        communicator.allReduce(mine.data.ptr, total.data.ptr, mine.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
        nccl.groupStart()
        communicator.send(mine.data.ptr, mine.size, nccl.NCCL_FLOAT32, (rank + 1) % ranks, stream.ptr)
        communicator.recv(received.data.ptr, mine.size, nccl.NCCL_FLOAT32, (rank - 1) % ranks, stream.ptr)
        nccl.groupEnd()

    def right(when: str) -> None:
        stream.synchronize()
        base = np.arange(1000, dtype=np.float32)
        if not np.array_equal(total.get(), ranks * base + sum(range(ranks))):
            raise AssertionError(f"{when}: the sums are {total.get()[:4]}")
        if not np.array_equal(received.get(), base + (rank - 1) % ranks):
            raise AssertionError(f"{when}: what was received is {received.get()[:4]}")
        total.fill(0)
        received.fill(0)
        cupy.cuda.Device().synchronize()

    cupy.cuda.Device().synchronize()
    for number, communicator in enumerate(communicators):
        exchange(communicator)
        right(f"communicator {number}")
    stream.begin_capture()
    try:
        exchange(whole)
    finally:
        graph = stream.end_capture()
    for replay in range(2):
        graph.launch(stream)
        right(f"replay {replay}")
    print("nccl is right", flush=True)
    del graph  # before the communicators: NCCL's ncclCommDestroy waits until no graph has its kernels


def nccl_programs() -> None:
    """Programs of funccoll's with algorithm="nccl" in two processes on one GPU, where NCCL allows that."""
    version = _nccl().get_version()
    if version < _SHARED_GPU:
        raise Skipped(f"NCCL {version}: several ranks on one GPU need 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
    done = run_job(2, "gpu_jobs:nccl_program_rank", NCCL_MULTI_RANK_GPU_ENABLE="1")
    if done.returncode or done.stdout.count("native collectives are right") != 2:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2500:]}")
    found("programs", f"NCCL {version}: native all_reduce, all_gather and reduce_scatter in 2 processes", counts=True)


def nccl_program_rank(native: str | None = "nccl") -> None:
    """One process: native collectives, beside one of our own kernel, have the CPU's values in every call."""
    import numpy as np

    import funccoll as fc
    from funccoll import P
    from tests.support.cases import process_cases

    n = fc.world_size()

    def step(x: Any, native: str | None) -> Any:
        total = fc.all_reduce(x, "d", algorithm=native)
        part = fc.reduce_scatter(fc.pvary(total, "d") + x, "d", algorithm=native)
        return fc.all_gather(part * 2, "d", algorithm=native) + fc.all_reduce(x, "d", op="max", algorithm="one_shot")[0]

    x = np.arange(64.0 * n, dtype=np.float32).reshape(8 * n, 8)
    specs = {"in_specs": P("d"), "out_specs": P()}
    want = np.asarray(fc.jit(lambda x: step(x, None), mesh=process_cases.virtual({"d": n}), **specs)(x))
    run = fc.jit(lambda x: step(x, native), mesh=fc.make_mesh({"d": n}), **specs)
    for _ in range(3):
        np.testing.assert_allclose(np.asarray(run(x)), want, rtol=1e-6)
    print("native collectives are right", flush=True)


# ---------------------------------------------------------------- the demo


def digits() -> None:
    """The demo on 2 virtual devices of the GPU, beside the CPU: the same accuracy."""
    where = device()
    require("sklearn")
    import numpy as np

    outputs, trained = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cpu", where if where != "cpu" else "rehearsed"):
            kind = "cpu" if name == "rehearsed" else name
            file = Path(folder, f"{name}.npz")
            command = [sys.executable, str(ROOT / "notebooks" / "digits.py"), "--devices", "2", "--save", str(file)]
            done = subprocess.run(
                command,
                env={**os.environ, "FUNCCOLL_DEVICE": kind, "COLUMNS": "100"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds_left(),
            )
            outputs[name] = done.stdout
            if done.returncode:
                raise RuntimeError(f"the demo on {name} ended with exit code {done.returncode}: {done.stdout[-2500:]}")
            with np.load(file) as saved:
                trained[name] = {key: saved[key] for key in saved.files if key != "by"}
    first, second = (float(re.findall(r"test accuracy ([\d.]+)%", out)[0]) for out in outputs.values())
    steps = [re.findall(r"([\d.]+) ms per step", out)[0] for out in outputs.values()]
    apart = max(float(np.abs(w - g).max()) for w, g in zip(*(t.values() for t in trained.values()), strict=True))
    says = f"accuracy {second} %, on the CPU {first} %; parameters within {apart:.1e}; {steps[1]} ms a step, CPU {steps[0]}"
    data = {"failed": f"accuracy {second} %, and {first} % on the CPU"} if abs(first - second) > 0.6 else {}
    found("digits", says, figure=not rehearses(), counts=True, output=list(outputs.values())[1], **data)
