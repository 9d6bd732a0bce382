"""Ragged collectives on virtual devices of a simulated GPU: the values of slices, and errors of wrong tables."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import PlannedError, ShapeError
from funccoll.transports.cuda.virtual_devices import VirtualGpuTransport
from funccoll.transports.local.local_transport import LocalTransport
from tests.support.cases import ragged_cases as cases
from tests.support.fakes.cuda_simulation import SimulatedGpu

pytestmark = pytest.mark.covers("ragged", "cuda-kernel")


def mesh_of(axes: dict[str, int]) -> Mesh:
    return Mesh(axes, range(int(np.prod([*axes.values()]))), transport=VirtualGpuTransport(SimulatedGpu(1)))


@pytest.mark.parametrize(
    ("axes", "over", "seeds"),
    [({"d": 3}, ("d",), range(1)), pytest.param({"a": 2, "b": 2}, ("b",), range(4), marks=pytest.mark.slow)],
)
def test_values(axes, over, seeds):
    for seed in seeds:
        cases.check(axes, over, seed, calls=2, most=5, mesh=mesh_of(axes))


def test_a_wrong_table_raises_and_the_next_call_is_right():
    mesh = mesh_of({"d": 2})
    send = fc.jit(lambda x, s: fc.ragged.all_to_all(x, "d", sizes=s)[0], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    x = np.arange(6)
    with pytest.raises(ShapeError, match="rank 1 sends rows 2 to 4 to rank 1, and its operand has 3 rows"):
        send(x, np.array([1, 2, 2, 2]))
    assert np.asarray(send(x, np.array([1, 2, 3, 0]))).tolist() == [0, 3, 4, 5, 0, 0, 1, 2, 0, 0, 0, 0]


def test_transports_without_ragged_collectives_say_so():
    """GPUs of several processes: the error comes when a function is compiled."""

    class Without(LocalTransport):
        has_ragged = False

    mesh = Mesh({"d": 2}, range(2), transport=Without())
    with pytest.raises(PlannedError, match=r"ragged_all_gather on .*are planned for GPUs of several processes"):
        fc.ragged.all_gather([np.ones(1), np.ones(2)], "d", mesh=mesh)
