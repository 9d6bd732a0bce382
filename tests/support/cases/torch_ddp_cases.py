"""Cases of `test_torch_ddp.py`, run by every rank of a job: each returns what the test looks at, or raises."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from typing import Any

import torch

import funccoll as fc
from funccoll.torch import DistributedDataParallel, module_state
from tests.support.cases.torch_gradient_cases import CASES, case, gradients_are_means
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, same_on_all_ranks, told
from tests.support.cases.torch_overlap_cases import overlapping

__all__ = ["CASES", "begin", "overlapping"]


def begin() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def rank_seed(seed: int = 0) -> int:
    """A seed of this rank's own."""
    return 100 * seed + fc.rank()


# ---------------------------------------------------------------- construction


@case
def state_of_rank_0() -> None:
    """Parameters and buffers become rank 0's, whatever their layout and dtype; what is ignored stays."""
    torch.manual_seed(rank_seed())
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    module = module.to(memory_format=torch.channels_last)
    module[1].running_mean.fill_(fc.rank())
    module.register_buffer("step", torch.tensor(fc.rank()))
    module.register_buffer("own", torch.tensor(fc.rank()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own", "2.bias"])
    bias = module[2].bias.detach().clone()
    DistributedDataParallel(module)
    torch.manual_seed(rank_seed() - fc.rank())
    first = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    for (name, p), q in zip(module.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(p, bias if name == "2.bias" else q), name
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[1].running_mean.eq(0).all() and module.step == 0 and module.own == fc.rank()


@case
def state_in_parts() -> None:
    """State is broadcast some tensors at a time, one that is too large for a part by itself."""
    before = module_state._STATE_BYTES
    module_state._STATE_BYTES = 200
    try:
        torch.manual_seed(rank_seed())
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(9, 9), torch.nn.Linear(2, 2))
        DistributedDataParallel(module)
        same_on_all_ranks([p.detach() for p in module.parameters()])
    finally:
        module_state._STATE_BYTES = before


@case
def limits_of_buckets() -> list[Any]:
    """Of 1 MiB for the first one and bucket_cap_mb (25) for others, from the last parameter back; MiB are 1024 * 1024 bytes."""
    kib = lambda sizes: torch.nn.ParameterList(torch.zeros(256 * k) for k in sizes)
    found = []
    for sizes, options in [
        ([512, 513, 511, 512], {}),
        ([512, 1024, 1], {}),
        ([30 * 1024, 25 * 1024, 1024], {}),
        ([100, 200, 300, 400], {"bucket_cap_mb": 0.3}),
        ([512, 512, 512, 512], {"bucket_cap_mb_list": [0.5, 1.5]}),
    ]:
        module = DistributedDataParallel(kib(sizes), **options)
        found.append([[int(module._reducer.slots[i].name) for i in bucket] for bucket in module._reducer.assignment.buckets])
    return found


@case
def init_sync_can_be_left_out() -> None:
    """Then each rank keeps its own state."""
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, fc.rank())
    DistributedDataParallel(module, init_sync=False)
    assert module.weight.eq(fc.rank()).all()


@case
def refusals() -> list[str]:
    """Errors of the constructor, before anything is sent."""
    linear = lambda: torch.nn.Linear(2, 2)
    frozen = linear().requires_grad_(False)
    wrapped = DistributedDataParallel(linear())
    return [
        told(lambda: DistributedDataParallel(frozen)),
        told(lambda: DistributedDataParallel(linear(), device_ids=[0])),
        told(lambda: DistributedDataParallel(wrapped)),
        told(lambda: DistributedDataParallel(torch.nn.Sequential(wrapped, linear()))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))),
        told(lambda: DistributedDataParallel(linear(), mixed_precision=object())),
        told(lambda: DistributedDataParallel(linear(), process_group=fc.abstract_mesh({"d": 2}))),
        told(lambda: DistributedDataParallel(linear(), process_group="gloo")),
        told(lambda: DistributedDataParallel(linear().to(torch.float8_e4m3fn))),
    ]


@case
def ranks_with_other_parameters() -> list[str]:
    """Errors on all ranks that name the first difference."""
    mine = fc.rank() == fc.world_size() - 1
    frozen = torch.nn.Linear(2, 2)
    frozen.weight.requires_grad_(not mine)
    named = torch.nn.ModuleDict({"b" if mine else "a": torch.nn.Linear(2, 2)})
    return [
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 3 if mine else 2))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, dtype=torch.float64 if mine else torch.float32))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, bias=mine))),
        told(lambda: DistributedDataParallel(frozen)),
        told(lambda: DistributedDataParallel(named)),
    ]


# ---------------------------------------------------------------- buffers, state


@case
def buffers_of_rank_0() -> None:
    """Broadcast at the start of a forward pass, but after a no_sync pass; never without broadcast_buffers."""
    for broadcast in (True, False):
        inner = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        module = DistributedDataParallel(inner, broadcast_buffers=broadcast)
        assert module.will_sync_module_buffers() is broadcast
        inner.running_mean.fill_(fc.rank())
        inner.num_batches_tracked.fill_(10 * fc.rank())
        module.eval()(data(0))
        assert inner.running_mean.eq(0 if broadcast else fc.rank()).all()
        assert inner.num_batches_tracked == (0 if broadcast else 10 * fc.rank())
        inner.running_mean.fill_(fc.rank())
        with module.no_sync():
            module(data(0)).sum().backward()
        assert not broadcast or not module.will_sync_module_buffers()
        inner.running_mean.fill_(fc.rank())
        module(data(0)).sum().backward()
        assert inner.running_mean.eq(fc.rank()).all()
        module(data(0)).sum().backward()
        assert inner.running_mean.eq(0 if broadcast else fc.rank()).all()


@case
def state_and_pickles() -> None:
    """Names begin with "module."; copies and pickles have a reducer of their own."""
    module = DistributedDataParallel(mlp(), bucket_cap_mb_list=[1e-6])
    assert next(iter(module.state_dict())) == "module.0.weight"
    other = DistributedDataParallel(mlp(seed=1))
    other.load_state_dict(module.state_dict())
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), other):
        loss = lambda m, rank: m(data(0, rank=rank)).square().mean()
        wanted = mean_gradients(module.module, loss)
        loss(again, fc.rank()).backward()
        close(gradients(again), wanted)
        assert gradients(module) == [None] * 6


@case
def logging_data() -> dict[str, Any]:
    """Torch's fields."""
    module = DistributedDataParallel(mlp(), bucket_cap_mb_list=[1e-4])
    module(data(0)).sum().backward()
    return module._get_ddp_logging_data()


# ---------------------------------------------------------------- uneven inputs


def restore(module: torch.nn.Module, buffers: list[torch.Tensor]) -> None:
    """Give a module these buffers."""
    for ours, b in zip(module.buffers(), buffers, strict=True):
        ours.copy_(b)


@case
def uneven_inputs() -> list[str]:
    """Ranks that have no inputs any more add zeros; at the end all have one model. Divided by all ranks, or by the others."""
    counts = [2, 5, 3, 0][: fc.world_size()]
    for by_all in (True, False):
        for caps in (None, [1e-6]):
            inner = torch.nn.Sequential(*mlp(depth=2), torch.nn.BatchNorm1d(4, dtype=torch.float64))
            module, alone = DistributedDataParallel(inner, bucket_cap_mb_list=caps), copy.deepcopy(inner)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with module.join(divide_by_initial_world_size=by_all):
                for step in range(counts[fc.rank()]):
                    optimizer.zero_grad()
                    module(data(step)).square().mean().backward()
                    optimizer.step()
            assert not module._uneven
            own = torch.optim.SGD(alone.parameters(), lr=0.1)
            after = [[b.clone() for b in alone.buffers()] for _ in counts]  # each rank's buffers
            for step in range(max(counts)):
                ranks = [rank for rank, count in enumerate(counts) if count > step]
                own.zero_grad()
                before = after[ranks[0]]
                for rank in ranks:
                    restore(alone, before)
                    (alone(data(step, rank=rank)).square().mean() / (len(counts) if by_all else len(ranks))).backward()
                    after[rank] = [b.clone() for b in alone.buffers()]
                restore(alone, after[ranks[0]])
                own.step()
            close(list(module.state_dict().values()), list(alone.state_dict().values()))
    module = DistributedDataParallel(mlp())
    with module.join(enable=False):
        module(data(0)).sum().backward()

    def early() -> None:
        with module.join(throw_on_early_termination=True):
            for step in range(2 + fc.rank()):
                module(data(step)).sum().backward()

    texts = [told(early)]
    module.zero_grad()
    module(data(0)).sum().backward()  # the job goes on
    same_on_all_ranks(gradients(module))
    return texts


# ---------------------------------------------------------------- misuse


@case
def no_grad_and_eval() -> None:
    """Passes without gradients communicate nothing but buffers."""
    module = DistributedDataParallel(mlp())
    with torch.no_grad():
        module(data(0))
    if fc.rank() == 0:
        module.eval()(data(0))  # one rank alone
        with module.no_sync():
            module(data(0)).sum().backward()
        module.zero_grad()
    module.train()
    loss = lambda m, rank: m(data(1, rank=rank)).sum()
    wanted = mean_gradients(module.module, loss)
    loss(module, fc.rank()).backward()
    close(gradients(module), wanted)


@case
def an_exception_in_the_backward_pass() -> None:
    """All ranks raise at one place, and go on with the next step."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("enough")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.fails = mlp(depth=2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            return self.parts[1](Fails.apply(x) if self.fails else x)

    module = DistributedDataParallel(Model(), bucket_cap_mb_list=[1e-6])
    module.module.fails = True
    assert "enough" in told(lambda: module(data(0)).sum().backward())
    module.module.fails = False
    module.zero_grad()
    with module.no_sync():
        module(data(5)).sum().backward()
    module.zero_grad()
    loss = lambda m, rank: m(data(1, rank=rank)).sum()
    wanted = mean_gradients(module.module, loss)
    loss(module, fc.rank()).backward()
    close(gradients(module), wanted)


@case
def a_worker_thread() -> None:
    """A thread of its own trains a module of its own."""
    errors: list[BaseException] = []

    def train() -> None:
        try:
            gradients_are_means()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@case
def data_loaders_that_fork() -> None:
    """Their end harms nothing."""
    module = DistributedDataParallel(mlp())
    examples = torch.utils.data.TensorDataset(data(0, rows=8), data(1, rows=8))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
            for x, y in torch.utils.data.DataLoader(examples, batch_size=4, num_workers=2):
                module.zero_grad()
                (module(x) - y).square().mean().backward()
    same_on_all_ranks(gradients(module))


class Scaled(torch.nn.Module):
    """A module of a user's own: torch.compile leaves its containers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(self.inner(x))


def compiled(backend: str) -> list[Any]:
    """Graphs and breaks of a compiled module in the wrapper, and of the compiled wrapper."""
    from torch._dynamo.utils import counters

    found = []
    for inside in (True, False):
        torch._dynamo.reset()
        counters.clear()
        module: Any = Scaled()
        plain = copy.deepcopy(module)
        module = DistributedDataParallel(torch.compile(module, backend=backend) if inside else module)
        called = module if inside else torch.compile(module, backend=backend)
        for step in range(2):
            module.zero_grad()
            wanted = mean_gradients(plain, lambda m, rank, step=step: m(data(step, rank=rank)).square().mean())
            called(data(step)).square().mean().backward()
            close(gradients(module), wanted)
        found.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
    return found


@case
def backward_in_another_thread() -> str:
    """A module that one thread has trained is refused in another, which is named."""
    module = DistributedDataParallel(mlp())
    module(data(0)).sum().backward()
    texts: list[str] = []
    loss = module(data(0)).sum()
    thread = threading.Thread(target=lambda: texts.append(told(loss.backward)), name="another")
    thread.start()
    thread.join()
    module.zero_grad()
    module(data(0)).sum().backward()  # this one goes on
    same_on_all_ranks(gradients(module))
    return texts[0]


@case
def use_after_finalize() -> list[str]:
    """The last case: the wrapper says that the job is over."""
    module = DistributedDataParallel(torch.nn.BatchNorm1d(4, dtype=torch.float64))
    loss = module(data(0)).sum()
    fc.finalize()
    return [told(loss.backward), told(lambda: module(data(0)))]
