"""Jobs whose processes torch.multiprocessing starts, each with a torch.distributed group: what funccoll makes of it.

    python torch_group_jobs.py FOLDER CASE...

prints a line for each case. Every process of a case runs the same function, with its rank and a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # wrappers import it when they are first used: each forked process would
import torch.distributed as dist
import torch.multiprocessing as mp

import funccoll as fc
from funccoll.errors import FunccollError
from funccoll.job import torch_group
from funccoll.torch import DistributedDataParallel


def begin(url: str, rank: int, world: int = 2) -> None:
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def gradient(rank: int, process_group: object = None) -> float:
    """Of a weight, whose gradient on each rank is its number and one."""
    module = torch.nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(module, process_group=process_group)
    wrapped(torch.full((1, 1), rank + 1.0)).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad.item()


def summed(mesh: fc.Mesh, n: int) -> float:
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
    return np.asarray(step(np.arange(float(n)))).item()


def refusal(function: object, *arguments: object, **options: object) -> str:
    try:
        function(*arguments, **options)  # type: ignore[operator]
    except FunccollError as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "nothing"


# ---------------------------------------------------------------- cases: functions of (rank, folder)


def averages(rank: int, folder: str) -> None:
    """The case of a script of torch.multiprocessing, through several jobs and groups of one process."""
    assert (fc.rank(), fc.world_size()) == (0, 1)  # nothing says otherwise yet
    early, alone = fc.make_mesh({"d": 2}), DistributedDataParallel(torch.nn.Linear(1, 1))
    assert summed(early, 2) == 1.0
    assert alone(torch.ones(1, 1)).shape == (1, 1)
    begin(f"file://{folder}/first", rank)
    assert (fc.rank(), fc.world_size()) == (rank, 2)
    words = [
        refusal(summed, early, 2),
        refusal(fc.device_put, np.ones(2), early, fc.P("d")),
        refusal(alone, torch.ones(1, 1)),
        refusal(DistributedDataParallel, torch.nn.Linear(1, 1), process_group=early),
    ]
    for text in words:
        assert "has only virtual devices of this process: it was made at" in text and "torch_group_jobs.py:" in text, text
        assert f"This is rank {rank} of 2 by now: make the mesh after that." in text, text
    assert gradient(rank) == 1.5
    runs = [fc.job.job_context.current_job().run]
    assert summed(fc.make_mesh({"d": 2}), 2) == 1.0
    fc.finalize()
    assert (fc.rank(), fc.world_size()) == (rank, 2)
    fc.init()
    runs.append(fc.job.job_context.current_job().run)
    assert len(set(runs)) == 2
    found: list[object] = [None, None]
    dist.all_gather_object(found, runs)
    assert found[0] == found[1]
    dist.destroy_process_group()  # the job goes on
    assert (fc.rank(), fc.world_size()) == (rank, 2) and gradient(rank) == 1.5
    begin(f"file://{folder}/of-one-{rank}", 0, 1)
    text = refusal(fc.make_mesh, {"d": 2})
    assert "group says that this is rank 0 of 1, and this process has joined a job as rank" in text, text
    assert "Call fc.finalize() before" in text
    fc.finalize()
    assert fc.init() is None and fc.world_size() == 1  # as this group says
    dist.destroy_process_group()
    begin(f"file://{folder}/second", 1 - rank)
    assert gradient(rank) == 1.5 and fc.rank() == 1 - rank


def other_backends(rank: int, folder: str) -> None:
    """A fake group, and processes that cannot find each other's sockets."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    text = refusal(fc.make_mesh, {"d": 2})
    assert f"this is rank {rank} of 2, and its backend 'fake' has no store" in text, text
    dist.destroy_process_group()
    begin(f"file://{folder}/group", rank)
    if rank:
        torch_group._place = lambda: "another host"
    text = refusal(fc.init)
    assert "2 processes, 1 of them on this host, needs MPI, and torch.distributed started this job" in text, text
    assert "`mpirun -n 2 python SCRIPT`" in text


def a_rank_that_does_not_come(rank: int, folder: str) -> None:
    begin(f"file://{folder}/group", rank, 3)
    if rank != 1:
        text = refusal(fc.init, rendezvous_timeout=0.3 if rank == 0 else 100)
        assert "rank 1 of 3 did not come within 0.3 s (run" in text, text
        assert "because torch.distributed's group has 3 processes)" in text, text
    dist.barrier()
    assert gradient(rank) == 2.0  # the rank that was late comes to the others' next attempt


def starts_a_program(rank: int, folder: str) -> None:
    """What a rank starts has its place, and cannot join in its stead; it may be alone, or a job of its own."""
    os.environ.update({"WORLD_SIZE": "1", "RANK": "0"})
    begin(f"file://{folder}/group", rank)
    fc.init()
    says = "import funccoll as fc; print(fc.rank(), fc.world_size()); "
    child = subprocess.run([sys.executable, "-c", says + "fc.init()"], capture_output=True, text=True)
    assert child.stdout == f"{rank} 2\n" and f"started by rank {rank} and is not a rank of its own" in child.stderr, child
    assert [*fc.launch(fc.world_size, 1), *fc.launch(fc.rank, 2)] == [1, 0, 1]
    fc.finalize()
    assert subprocess.run([sys.executable, "-c", says], capture_output=True, text=True).stdout == "0 1\n"


def half_set(rank: int, folder: str) -> None:
    """Variables which are half set, or of a pod or a launcher of one process."""
    os.environ.update({"WORLD_SIZE": "2"})
    assert "RANK is not set" in refusal(fc.rank)
    begin(f"file://{folder}/half", rank)
    assert gradient(rank) == 1.5
    fc.finalize()
    os.environ.update({"RANK": str(1 - rank)})
    text = refusal(fc.init)
    assert text.startswith(f"MeshError: torch.distributed's group says that this is rank {rank} of 2, and the environment says")
    assert f"WORLD_SIZE=2 and RANK={1 - rank} (torchrun)" in text and "unset these variables" in text
    os.environ.update({"RANK": str(rank)})  # now they say the same
    assert gradient(rank) == 1.5


def of_a_group_of_one(rank: int, folder: str) -> None:
    """Processes of a launcher's job that each have a group of their own."""
    os.environ.update({"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    begin(f"file://{folder}/{rank}", 0, 1)
    text = refusal(DistributedDataParallel, torch.nn.Linear(1, 1))
    assert f"this is rank 0 of 1, and the environment says WORLD_SIZE=2 and RANK={rank} (torchrun)" in text, text


def inherited(rank: int, folder: str) -> None:
    """Processes that a rank of torchrun has started, which have its variables."""
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    begin(f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank)
    assert (fc.rank(), gradient(rank)) == (rank, 1.5)


CASES = {
    "averages": (averages, 2),
    "other backends": (other_backends, 2),
    "half set": (half_set, 2),
    "a group of one": (of_a_group_of_one, 2),
    "a rank that does not come": (a_rank_that_does_not_come, 3),
    "inherited": (inherited, 2),
    "starts a program": (starts_a_program, 2),
}


def case(rank: int, function: object, folder: str) -> None:
    function(rank, folder)  # type: ignore[operator]
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        function, world = CASES[name]
        place = folder / str(number)
        place.mkdir()
        mp.start_processes(case, (function, str(place)), nprocs=world, start_method="fork")
        print(name, "is fine", flush=True)


if __name__ == "__main__":
    os.environ.update(GLOO_SOCKET_IFNAME="lo", FUNCCOLL_RENDEZVOUS_TIMEOUT="120")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
