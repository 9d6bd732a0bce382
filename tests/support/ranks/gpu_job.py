"""A rank of a job on GPUs by the public interface: `fc.make_mesh(axes, device="cuda")`, with a simulated GPU and fake NCCL.

`main(CASE, SEED)` runs a case of `process_cases` in every process of the job, with the bits of virtual devices.
`main("transports", SEED)` prints which transport executes what.
"""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.config import FUSE
from funccoll.job.handshake import installation
from funccoll.transports.cuda import cuda_transport, job_gpus
from tests.support.cases import process_cases
from tests.support.fakes import fake_nccl, peer_simulation

os.environ[FUSE] = "0"  # a GPU computes as NumPy does, one operation at a time
installation.cache_clear()  # ranks compare it


class JobGpu(peer_simulation.PeerSimulatedGpu):
    """A simulated GPU, which NCCL's fake uses as well."""

    def __init__(self, seed: int, bus_id: str):
        super().__init__(seed)
        self.bus_id = bus_id
        fake = fake_nccl.FakeGpu(bus_id)
        self.stream, self.record, self.wait, self.begin_watch = fake.stream, fake.record, fake.wait, fake.begin_watch


def install(seed: int, shared: bool = False) -> None:
    simulated = JobGpu(seed + fc.rank(), f"0000:{0 if shared else fc.rank():02x}:00.0")
    cuda_transport.current_gpu = lambda rank=None: simulated  # type: ignore[assignment]
    job_gpus.load_nccl = lambda: fake_nccl


class PublicInterface(peer_simulation.PeerComparing):
    def mesh(self, axes: dict[str, int]) -> Any:
        key = tuple(axes.items())
        if key not in self.meshes:
            self.meshes[key] = fc.make_mesh(axes, device="cuda")
        return self.meshes[key]


def transports() -> None:
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n}, device="cuda")

    def step(x: Any) -> Any:
        y = fc.all_reduce(x, "d", algorithm="nccl")
        z = fc.all_reduce(fc.pvary(y, "d") + x, "d", algorithm="ring")
        return fc.all_gather(z[:1] + fc.axis_index("d"), "d", algorithm="nccl") + z[0]

    run = fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(8.0 * n)
    lowered = run.lower(x)
    print([row.schedule for row in lowered.collectives()])
    compiled = lowered.compile()
    print([type(call).__name__ for call in compiled.group_calls], compiled.execution)
    print([np.asarray(run(x)).tolist() for _ in range(2)])
    print(
        [
            mesh.transport.native_algorithm("all_reduce", "sum", [np.dtype(dtype)], nbytes, n, {})
            for dtype, nbytes in (("f4", 1 << 10), ("f4", 1 << 30), ("c8", 1 << 30))
        ]
    )
    pickled = pickle.loads(pickle.dumps(mesh))
    print([np.asarray(fc.jit(step, mesh=pickled, in_specs=P("d"), out_specs=P())(x)).tolist() for _ in range(2)])
    fc.finalize()
    print("left")


def refusals() -> None:
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n}, device="cuda")
    for place, what in ((mesh, "ring"), (mesh, "nccl"), (fc.make_mesh({"d": n}), "nccl")):
        try:
            fc.jit(lambda x, a=what: fc.all_reduce(x, "d", algorithm=a), mesh=place, in_specs=P("d"))(np.ones(n))
            print("ran")
        except Exception as error:
            print(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def threads() -> None:
    """A mesh that this thread makes belongs to the thread that calls its collectives."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n}, device="cuda")
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    thread = threading.Thread(target=lambda: print(np.asarray(step(np.ones(n))).tolist()))
    thread.start()
    thread.join()


def main(case: str, seed: int) -> None:
    install(1000 * seed, shared=case == "refusals")
    if case in ("transports", "refusals", "threads"):
        globals()[case]()
    else:
        same = PublicInterface(cuda_transport.current_gpu())
        process_cases.CASES_BY_NAME[case](fc.world_size(), same)
        print(f"{same.programs} programs")
