"""Cases of `test_torch_interface.py`, run by every rank of a job: each returns what the test looks at, or raises."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from funccoll.torch.torch_interface import INHERITED
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, told

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def begin() -> None:
    """Let torch's wrapper work beside ours."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["TORCH_STORE"], fc.world_size())
    dist.init_process_group("gloo", store=store, rank=fc.rank(), world_size=fc.world_size())


def end() -> None:
    """Leave torch's group."""
    dist.destroy_process_group()


def both(**options: Any) -> tuple[Any, Any]:
    """A module in our wrapper, and one in torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(mlp(), **options), TorchDDP(mlp(), **options)


@case
def every_argument_of_torch() -> None:
    """The constructor takes what the installed torch's takes, in its order."""
    ours, theirs = (list(inspect.signature(cls.__init__).parameters) for cls in (DistributedDataParallel, TorchDDP))
    assert ours[: len(theirs)] == theirs, (ours, theirs)


@case
def every_attribute_of_torch() -> list[str]:
    """Each method and attribute of torch's class and of its objects is ours, is inherited by name, or has a clear error."""
    ours, theirs = both()
    mine, module = vars(DistributedDataParallel), set(dir(torch.nn.Module))
    refused = []
    for name, value in vars(TorchDDP).items():
        if name in INHERITED or name in module or name.startswith("__") or name == "_abc_impl":
            continue
        assert name in mine, f"{name} is torch's own, {value}"
        if getattr(mine[name], "__module__", "") == "funccoll.torch.torch_interface":
            text = told(lambda name=name: getattr(ours, name)())
            assert text.startswith(f"ModuleError: DistributedDataParallel.{name} belongs to torch's reducer"), text
            refused.append(name)
    missing = [name for name in vars(theirs) if not hasattr(ours, name) and name not in module]
    for name in missing:
        text = told(lambda name=name: getattr(ours, name))
        assert text == f"AttributeError: 'DistributedDataParallel' object has no attribute {name!r}", text
    assert "AttributeError" in told(lambda: ours.reducer._run_comm_hook)
    shared = (
        "device",
        "device_type",
        "device_ids",
        "output_device",
        "dim",
        "process_group",
        "find_unused_parameters",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "gradient_as_bucket_view",
        "static_graph",
        "parameters_to_ignore",
        "forward_sync_buffers",
        "broadcast_buffers",
        "bucket_bytes_cap_list",
        "batched_grad_copy",
        "bucket_bytes_cap",
        "skip_all_reduce_unused_params",
        "join_device",
        "join_process_group",
        "_distributed_rank",
    )
    for name in shared:
        assert getattr(ours, name) == getattr(theirs, name), (name, getattr(ours, name), getattr(theirs, name))
    assert repr(ours.broadcast_buffers) == "True"
    return [*refused, "missing:", *missing]


@case
def libraries_recognize_the_class() -> None:
    """isinstance, state dicts without a prefix, and pipelining's and dynamo's branches on the class."""
    ours, _ = both()
    assert isinstance(ours, TorchDDP)
    assert list(get_model_state_dict(ours)) == [name for name, _ in ours.module.named_parameters()]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    ours(data()).sum().backward()
    optimizer.step()
    assert "0.weight" in get_optimizer_state_dict(ours, optimizer)["state"]
    wanted = {name: torch.zeros_like(p) for name, p in ours.module.named_parameters()}
    set_model_state_dict(ours, wanted)
    assert all(p.eq(0).all() for p in ours.parameters())
    assert list(TorchDDP._get_data_parallel_params(ours)) == list(ours.parameters())
    TorchDDP._set_params_and_buffers_to_ignore_for_model(ours.module, ["0.bias"])
    assert len(list(TorchDDP._get_data_parallel_params(ours))) == 5

    from torch._dynamo.guards import GuardsStatePickler

    unpickle: Any = GuardsStatePickler._unpickle_ddp_module
    made = unpickle(ours.__getstate__())  # what it does to every DistributedDataParallel
    assert isinstance(made, TorchDDP)
    assert made.module is ours.module


@case
def pipelining() -> None:
    """A stage of torch's pipelining, which reduces gradients with the last micro-batch."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [dist.new_group([rank]) for rank in range(fc.world_size())]
    x, found = data(rows=6), []
    for wrapper in both():
        stage = PipelineStage(wrapper, 0, 1, torch.device("cpu"), group=groups[fc.rank()])
        loss = lambda output, target: (output - target).square().sum()
        ScheduleGPipe(stage, n_microbatches=3, loss_fn=loss, scale_grads=False).step(x, target=torch.zeros_like(x))
        found.append(gradients(wrapper.module))
    close(*found)


@case
def reductions_begun_by_hand() -> None:
    """Forward passes in no_sync and one backward pass prepared by hand: Accelerate, Lightning and torch's pipelines."""
    for caps in (None, [1e-6]):
        ours = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
        wanted = mean_gradients(ours.module, lambda m, rank: m(data(0, rank=rank)).sum() + m(data(1, rank=rank)).square().sum())
        with ours.no_sync():
            first, second = ours(data(0)), ours(data(1))
            first.sum().backward()
        ours.reducer.prepare_for_forward()
        assert not ours.reducer._rebuild_buckets()
        ours.reducer.prepare_for_backward([second])
        second.square().sum().backward()
        close(gradients(ours.module), wanted)
        ours._check_reducer_finalized()
        with ours.no_sync():  # nothing of it stays
            ours.zero_grad()
            ours(data(2)).sum().backward()
        own = torch.autograd.grad(ours.module(data(2)).sum(), [*ours.module.parameters()])
        close(gradients(ours.module), list(own))


class Manual(torch.nn.Module):
    """A module whose forward pass is a step with a backward pass in it, as in Lightning's manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.wrapper = mlp(), []

    def forward(self, x: torch.Tensor) -> None:
        loss = self.layers(x).square().sum()
        wrapper = self.wrapper[0]
        wrapper.require_forward_param_sync = True
        wrapper.reducer._rebuild_buckets()
        wrapper.reducer.prepare_for_backward([])
        loss.backward()
        wrapper.require_backward_grad_sync = False


@case
def a_backward_pass_within_the_module() -> None:
    """Lightning's manual optimization."""
    ours = DistributedDataParallel(Manual())
    ours.module.wrapper.append(ours)
    for step in range(3):
        ours.zero_grad()
        wanted = mean_gradients(ours.module.layers, lambda m, rank, step=step: m(data(step, rank=rank)).square().sum())
        assert ours(data(step)) is None
        ours.require_backward_grad_sync = True
        close(gradients(ours.module.layers), wanted)


class Normed(torch.nn.Module):
    """A module with a buffer of this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("seen", torch.full((1 + fc.rank() if self.uneven else 1,), float(fc.rank())))

    uneven = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Uneven(Normed):
    """A module with a buffer of another size on each rank."""

    uneven = True


@case
def buffers_are_broadcast_where_torch_does() -> None:
    """Arguments about buffers, the attribute that is also a function, and turning them off and on later."""
    x = data()
    for options, first in [
        ({}, 0),
        ({"broadcast_buffers": False}, fc.rank()),
        ({"forward_sync_buffers": False}, 0),
        ({"forward_sync_buffers": True, "broadcast_buffers": False}, 0),
    ]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            theirs = TorchDDP(Normed(), **options)
        ours = DistributedDataParallel(Normed(), **options)
        for wrapper in (ours, theirs):
            assert wrapper.module.seen == first, (wrapper, options)
            wrapper(x)
            wrapper.module.seen.fill_(5 + fc.rank())
            wrapper(x)
            assert wrapper.module.seen == (5 if options.get("forward_sync_buffers", options == {}) else 5 + fc.rank()), options
        ours.module.seen.fill_(5 + fc.rank())
        ours.broadcast_buffers()
        assert ours.module.seen == 5
        ours.broadcast_buffers = not ours.broadcast_buffers
        ours.module.seen.fill_(6 + fc.rank())
        ours(x)
        assert ours.module.seen == (6 if ours.broadcast_buffers else 6 + fc.rank())
    own = DistributedDataParallel(Uneven(), broadcast_buffers=False)  # of another shape on each rank
    own(x).sum().backward()
    assert own.module.seen.shape == (1 + fc.rank(),)


@case
def groups_and_meshes_of_torch() -> list[str]:
    """A device mesh of all processes, and the errors of others."""
    from torch.distributed.device_mesh import init_device_mesh

    world = fc.world_size()
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1))
    ours = DistributedDataParallel(mlp(), device_mesh=line)
    ours(data()).sum().backward()
    wanted = mean_gradients(mlp(), lambda m, rank: m(data(rank=rank)).sum())
    close(gradients(ours.module), wanted)
    return [
        told(lambda: DistributedDataParallel(mlp(), device_mesh=square)),
        told(lambda: DistributedDataParallel(mlp(), device_mesh=line, process_group=dist.group.WORLD)),
    ]


@case
def hooks_of_torch_by_their_private_names() -> None:
    """Built-in hooks, and an optimizer that steps when a bucket is reduced."""
    ours, _ = both()
    wanted = mean_gradients(ours.module, lambda m, rank: m(data(rank=rank)).sum())
    ours._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    ours(data()).sum().backward()
    close(gradients(ours.module), wanted)
    ours._set_ddp_runtime_logging_sample_rate(3)
    ours._set_ddp_sink_clone(False)
    half, _ = both()
    half._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    half(data()).sum().backward()
    for found, exact in zip(gradients(half.module), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-2)
    trained = []
    for wrapper in both():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's functional optimizers are TorchScript
            wrapper._register_fused_optim(torch.optim.SGD, 0.1)
        for step in range(3):
            wrapper(data(step)).square().sum().backward()
        trained.append([p.detach() for p in wrapper.parameters()])
    close(*trained)


@case
def ranks_evaluate_on_other_numbers_of_batches() -> None:
    """Buffers are broadcast in the first pass without gradients, and then by the second pass of training, as in torch."""
    found = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        model = wrapper(torch.nn.Sequential(torch.nn.BatchNorm1d(4, dtype=torch.float64), mlp()))
        for step in range(3):
            model.train()
            model(data(2 * step)).sum().backward()
            model(data(2 * step + 1)).sum().backward()
            with torch.no_grad():
                model.eval()
                for batch in range(1 + fc.rank()):
                    model(data(batch))
            found.append([model.module[0].running_mean.clone(), model.module[0].running_var.clone()])
    close([b for buffers in found[:3] for b in buffers], [b for buffers in found[3:] for b in buffers])
