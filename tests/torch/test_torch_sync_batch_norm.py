"""SyncBatchNorm of torch modules: the values and gradients of BatchNorm over all processes' rows."""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import pytest

import funccoll as fc
from funccoll.errors import MeshError, ShapeError
from tests.support.groups import in_groups
from tests.support.lazy_modules import lazily, need
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-collectives")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")
torch, ft = lazily("torch"), lazily("funccoll.torch")

BODY = (
    JOIN
    + """
import json
import torch
torch.set_num_threads(1)
import funccoll as fc
from tests.support.cases.torch_batch_norm_cases import check_all
failures, equal = check_all(fc.world_size())
say(json.dumps(failures))
say(equal)
"""
)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_batch_norm_of_all_rows(count):
    with Ranks(BODY, range(count), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        for rank in range(count):
            failures = json.loads(ranks.line(rank))
            assert not failures, f"{len(failures)} failures on rank {rank}:\n" + "\n".join(failures[:5])
        (statistics,) = set(ranks.lines().values())  # the same bits on all ranks
        assert len(json.loads(statistics)) == 12
        ranks.end_well()


# ---------------------------------------------------------------- one process


OPTIONS = {}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"bias": False}


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2), (2, 4, 3, 2, 2)])
@in_groups("options", OPTIONS)
def test_one_process_has_plain_batch_norm(shape, options):
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}[len(shape)]
    if unknown := options.keys() - inspect.signature(kind).parameters.keys():
        pytest.skip(f"this torch has no {unknown} of BatchNorm")
    theirs = kind(4, dtype=torch.float64, **options)
    ours = ft.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(theirs), fc.make_mesh({"data": 1}))
    for training in (True, True, False):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        a, b = theirs.train(training)(x), ours.train(training)(y)
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
        ct = torch.randn(shape, dtype=torch.float64)
        wanted = torch.autograd.grad(a, [x, *theirs.parameters()], ct)
        found = torch.autograd.grad(b, [y, *ours.parameters()], ct)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)
    assert ft.SyncBatchNorm(4, **options).state_dict().keys() == theirs.state_dict().keys()


def test_an_arbitrary_number_of_dimensions():
    x = torch.randn(3, 2, 2, 1, 2, 1, 2)
    out = ft.SyncBatchNorm(2, affine=False)(x)
    torch.testing.assert_close(out.transpose(0, 1).flatten(1).mean(1), torch.zeros(2), rtol=0, atol=1e-6)


def test_second_derivatives():
    module = ft.SyncBatchNorm(2, dtype=torch.float64)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    call = lambda x, weight, bias: torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))
    operands = (x, module.weight.detach().requires_grad_(), module.bias.detach().requires_grad_())
    assert torch.autograd.gradcheck(call, operands)
    assert torch.autograd.gradgradcheck(call, operands)


def test_convert():
    """Parameters, statistics, modes and shared modules stay what they are; other modules are left alone."""
    shared = torch.nn.BatchNorm1d(3, eps=0.5, momentum=None)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), shared, torch.nn.Sequential(shared), torch.nn.InstanceNorm1d(3))
    net.register_module("none", None)
    net[0].a = net[0].b = torch.nn.BatchNorm2d(2, affine=False)
    shared.weight.requires_grad_(False)
    shared.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    weight, running = shared.weight, shared.running_mean
    found = ft.SyncBatchNorm.convert_sync_batchnorm(net)
    assert found is net and type(net[1]) is ft.SyncBatchNorm and net[2][0] is net[1]
    assert type(net[0].a) is ft.SyncBatchNorm and net[0].a is net[0].b and net[0].a.weight is None
    assert (net[1].eps, net[1].momentum, net[1].training, net[0].a.training) == (0.5, None, False, True)
    assert net[1].weight is weight and not net[1].weight.requires_grad and net[1].running_mean is running
    assert type(net[3]) is torch.nn.InstanceNorm1d
    torch.testing.assert_close(dict(net.state_dict()), before)
    mesh = fc.make_mesh({"data": 1})
    again = ft.SyncBatchNorm.convert_sync_batchnorm(net, mesh)
    assert again[1].process_group is mesh
    assert type(ft.SyncBatchNorm.convert_sync_batchnorm(torch.nn.SyncBatchNorm(3))) is ft.SyncBatchNorm


def test_it_can_be_copied_and_pickled():
    module = ft.SyncBatchNorm(3, process_group=fc.make_mesh({"data": 1}))
    x = torch.randn(5, 3)
    wanted = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), wanted)


def test_refusals():
    with pytest.raises(ShapeError, match="more than one value per channel, and all 1 processes together have 1"):
        ft.SyncBatchNorm(3)(torch.ones(1, 3))
    with pytest.raises(ShapeError, match="does not know its number of channels yet"):
        ft.SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
    with pytest.raises(MeshError, match="process_group is 'world'"):
        ft.SyncBatchNorm(3, process_group="world")(torch.ones(4, 3))  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="no process for each of its 2 devices"):
        ft.SyncBatchNorm(3, process_group=fc.make_mesh({"data": 2}))(torch.ones(4, 3))
