"""Collectives on GPUs among groups of ranks that are not those of mesh axes: the values of their definitions, or an error."""

from __future__ import annotations

import re

import pytest

from funccoll.core.mesh import Mesh
from funccoll.transports.cuda.virtual_devices import VirtualGpuTransport
from tests.support.cases import axis_group_cases
from tests.support.cases import replica_group_cases as cases
from tests.support.fakes.cuda_simulation import SimulatedGpu
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("cuda-kernel")

JOBS = {
    "peer_simulation": "mesh = peer_simulation.peer_mesh(cases.AXES, peer_simulation.PeerSimulatedGpu(fc.rank()))",
    "nccl_cases": "mesh = nccl_cases.make_mesh(cases.AXES)",
}
SCRIPT = """
import funccoll as fc
from tests.support.cases import nccl_cases, replica_group_cases as cases
from tests.support.fakes import peer_simulation
{}
print(cases.run(mesh, {!r}, (6, 300)), cases.left_out(mesh).partition(" in ")[0])
fc.finalize()
"""


ALONG_AN_AXIS = """
import funccoll as fc
from tests.support.cases import axis_group_cases, nccl_cases
from tests.support.fakes import peer_simulation
{}
for groups in ([[0, 3], [2, 1]], [[2], [3, 0, 1]]):
    axis_group_cases.check({{}}, "d", groups, 4, again=2, mesh=mesh)
fc.finalize()
"""


@pytest.mark.parametrize("kinds", [cases.FEW, pytest.param(tuple(cases.KINDS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_virtual_devices(kinds):
    mesh = Mesh(cases.AXES, range(4), transport=VirtualGpuTransport(SimulatedGpu(1)))
    assert cases.run(mesh, sizes=(6, 60), kinds=kinds) == "well"
    assert re.match(r"device 0 is in none of the groups \(\(1, 2\),\) over 'd'", cases.left_out(mesh))


@pytest.mark.parametrize(
    "groups", [[[2], [3, 0, 1]], pytest.param([[0, 3], [2, 1]], marks=pytest.mark.slow)], ids=["sizes", "one size"]
)
def test_groups_along_an_axis(groups):
    mesh = Mesh({"d": 4}, range(4), transport=VirtualGpuTransport(SimulatedGpu(1)))
    assert axis_group_cases.check({}, "d", groups, 2, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_groups_along_an_axis_of_processes(name):
    with Ranks(ALONG_AN_AXIS.format(JOBS[name].replace("cases.AXES", "{'d': 4}")), range(4), FUNCCOLL_CHECK="") as ranks:
        ended = [ranks.end(rank) for rank in range(4)]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 4, ended


@pytest.mark.slow
@pytest.mark.parametrize(("name", "native"), [("peer_simulation", ""), ("nccl_cases", ""), ("nccl_cases", "nccl")])
def test_processes(name, native):
    with Ranks(SCRIPT.format(JOBS[name], native), range(4), FUNCCOLL_CHECK="") as ranks:
        ended = [ranks.end(rank) for rank in range(4)]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 4, ended
    assert [printed[0] for _, printed, _ in ended] == ["well device 0 is", "well ", "well ", "well device 3 is"]
