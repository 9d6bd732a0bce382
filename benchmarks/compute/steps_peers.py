"""The peers of benchmarks/compute/steps.py: torch's DistributedDataParallel, and mpi4py as its users write a stencil."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.compute.cases import gpt_model, normal
from benchmarks.compute.libraries import LIBRARIES
from benchmarks.compute.steps_cases import GRID, HEAT, StepCase
from benchmarks.one_host import peers
from benchmarks.training.ddp_torch import WAYS


class Torch(peers.Gloo):
    """A rank of DDP over Gloo."""

    def prepare(self, case: StepCase, ways: Mapping[str, None]) -> dict[str, Any]:  # type: ignore[override]
        """Return the GPT in training in each way of `ddp_torch.WAYS`."""
        return {name: _Training(self.torch, self.rank, self.ranks, *WAYS[f"DDP{name.removeprefix('torch')}"]) for name in ways}


class _Training:
    """The GPT as a module, whose parameters DDP reduces."""

    def __init__(self, torch: Any, rank: int, ranks: int, wrapped: Mapping[str, Any], options: Mapping[str, Any]):
        from torch.utils import _pytree as trees

        given, loss, text = gpt_model(LIBRARIES["torch"]())
        self.leaves, spec = trees.tree_flatten(given)
        self.torch, leaves = torch, self.leaves

        class Gpt(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.leaves = torch.nn.ParameterList([torch.tensor(leaf) for leaf in leaves])

            def forward(self, tokens: Any, labels: Any) -> Any:
                return loss(trees.tree_unflatten(list(self.leaves), spec), torch.tensor(0), tokens, labels)

        self.plain = Gpt()
        self.model = torch.nn.parallel.DistributedDataParallel(self.plain, **wrapped)
        self.options = {"lr": 1e-3, **options}
        own = slice(rank * len(text) // ranks, (rank + 1) * len(text) // ranks)
        self.data = torch.tensor(text[own, :-1]).long(), torch.tensor(text[own, 1:]).long()
        self.start()
        self.steps(3)  # DDP makes its buckets anew after the first one

    def start(self) -> None:
        """Begin with the initial parameters."""
        with self.torch.no_grad():
            for leaf, value in zip(self.plain.leaves, self.leaves, strict=True):
                leaf.copy_(self.torch.from_numpy(value))
        self.optimizer = self.torch.optim.Adam(self.plain.parameters(), **self.options)

    def steps(self, times: int) -> list[Any]:
        """Train for some steps; return their losses on this rank."""
        losses = []
        for _ in range(times):
            self.optimizer.zero_grad()
            loss = self.model(*self.data)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def check(self, times: int) -> list[float]:
        """Return the losses of the first steps."""
        self.start()
        return [float(loss) for loss in self.steps(times)]


class Mpi(peers.Mpi):
    """A rank of mpi4py."""

    def prepare(self, case: StepCase, ways: Mapping[str, None]) -> dict[str, Any]:  # type: ignore[override]
        """Return the heat equation."""
        return dict.fromkeys(ways, _Heat(self.mpi, self.world))


class _Heat:
    """The heat equation in place: rows with a halo, two messages, and NumPy's operations into memory that stays."""

    def __init__(self, mpi: Any, world: Any):
        self.world, rank, ranks = world, world.Get_rank(), world.Get_size()
        self.up = rank - 1 if rank else mpi.PROC_NULL
        self.down = rank + 1 if rank < ranks - 1 else mpi.PROC_NULL
        rows = GRID // ranks
        self.own = slice(rank * rows, (rank + 1) * rows)
        self.wide, self.sum, self.four = np.zeros((rows + 2, GRID + 2)), np.empty((rows, GRID)), np.empty((rows, GRID))
        self.start()

    def start(self) -> None:
        """Begin with the initial temperatures."""
        self.wide[...] = 0
        self.wide[1:-1, 1:-1] = normal(GRID, GRID, dtype=np.float64)[self.own]

    def steps(self, times: int) -> list[Any]:
        """Make some steps."""
        wide, total, four, world, up, down = self.wide, self.sum, self.four, self.world, self.up, self.down
        inside = wide[1:-1, 1:-1]
        for _ in range(times):
            world.Sendrecv(wide[-2], down, recvbuf=wide[0], source=up)
            world.Sendrecv(wide[1], up, recvbuf=wide[-1], source=down)
            np.add(wide[:-2, 1:-1], wide[2:, 1:-1], out=total)
            np.add(total, wide[1:-1, :-2], out=total)
            np.add(total, wide[1:-1, 2:], out=total)
            np.multiply(inside, 4, out=four)
            np.subtract(total, four, out=total)
            np.multiply(total, HEAT, out=total)
            np.add(inside, total, out=inside)
        return []

    def check(self, times: int) -> list[float]:
        """Return the sum of squares of this rank's rows."""
        self.start()
        self.steps(times)
        return [float(np.sum(np.square(self.wide[1:-1, 1:-1])))]
