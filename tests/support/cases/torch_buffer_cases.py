"""Cases of `test_torch_buffers.py`, run by every rank of a job: each returns what the test looks at, or raises."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import funccoll as fc
from funccoll.torch import DistributedDataParallel, module_state
from tests.support.cases.torch_ddp_cases import begin
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, same_on_all_ranks, told

__all__ = ["CASES", "begin"]

CASES: dict[str, Callable[[], Any]] = {}
Line = tuple[torch.Tensor, torch.Tensor]


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


class Holder(torch.nn.Module):
    """A layer, and buffers that the forward pass multiplies its result with, each by its sum."""

    def __init__(self, **buffers: torch.Tensor | None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, dtype=torch.float64)
        torch.nn.init.eye_(self.layer.weight)
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for buffer in self.buffers():
            x = x * buffer.sum().abs().double()
        return x


def wrapped(**buffers: torch.Tensor | None) -> tuple[DistributedDataParallel, Holder]:
    """A wrapper and its module."""
    module = Holder(**buffers)
    return DistributedDataParallel(module), module


def mine(of_0: Any, of_others: Any) -> Any:
    """The first value on rank 0, the second one on others."""
    return of_0 if fc.rank() == 0 else of_others


def is_like_rank_0(buffer: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare a buffer with rank 0's."""
    assert buffer.dtype == wanted.dtype and buffer.shape == wanted.shape, (buffer, wanted)
    assert torch.equal(buffer, wanted), (buffer, wanted)


# ---------------------------------------------------------------- buffers that change


@case
def present_buffers_are_broadcast() -> None:
    """Buffers that grow, shrink, change their dtype, appear and disappear on all ranks have rank 0's values."""
    ddp, module = wrapped(cos=torch.zeros(1), mask=None)
    x = data()
    for step, cos in enumerate(
        (
            torch.arange(4.0),
            torch.tensor([1.5, 2.5], dtype=torch.float64),
            torch.ones(2, 0, 3),
            torch.tensor(3),
            torch.ones(5, dtype=torch.bfloat16),
            torch.ones(3, 2).t(),
        )
    ):
        module.cos = mine(cos, torch.zeros_like(cos) - 1)
        module.mask = mine(torch.tensor([True, False]), torch.tensor([True, True])) if step % 2 else None
        ddp(x).sum().backward()
        is_like_rank_0(module.cos, cos)
        if step % 2:
            is_like_rank_0(module.mask, torch.tensor([True, False]))
    del module.cos, module.mask
    ddp(x)  # none is left
    module.register_buffer("late", mine(torch.ones(3), torch.zeros(3)))
    module.layer.register_buffer("later", mine(torch.ones(2), torch.zeros(2)), persistent=False)
    module.more = torch.nn.BatchNorm1d(4, affine=False)
    module.more.running_mean.fill_(fc.rank())
    ddp(x)
    is_like_rank_0(module.late, torch.ones(3))
    is_like_rank_0(module.layer.later, torch.ones(2))
    is_like_rank_0(module.more.running_mean, torch.zeros(4))
    del module.late
    module.register_buffer("renamed", mine(torch.ones(3), torch.zeros(3)))
    module.half()
    module.layer.double()
    ddp(x)
    is_like_rank_0(module.renamed, torch.ones(3, dtype=torch.float16))


@case
def modules_without_buffers_at_first() -> None:
    """A buffer that is set, registered, or comes with a module that was made before."""
    ddp, module = wrapped(mask=None)
    x, norm = data(), torch.nn.BatchNorm1d(4)
    ddp(x).sum().backward()
    assert not ddp.will_sync_module_buffers() and ddp._state._program is None
    module.mask = mine(torch.ones(3), torch.zeros(3))
    ddp(x).sum().backward()
    is_like_rank_0(module.mask, torch.ones(3))
    ddp, module = wrapped()
    module.layer.register_buffer("late", mine(torch.ones(2), torch.zeros(2)))
    ddp(x).sum().backward()
    is_like_rank_0(module.layer.late, torch.ones(2))
    ddp, module = wrapped()
    ddp(x).sum().backward()
    norm.running_mean.fill_(fc.rank())
    module.layer.norm = norm.requires_grad_(False)
    ddp(x).sum().backward()
    is_like_rank_0(norm.running_mean, torch.zeros(4))


@case
def caches_of_many_lengths() -> None:
    """A cache that grows at each step, and later is cut: more programs than are kept."""
    ddp, module = wrapped(cos=torch.zeros(1))
    lengths = [*range(1, module_state._KEPT + 5), 2, 3, 2, 3, module_state._KEPT + 4]
    for step, length in enumerate(lengths):
        module.cos = torch.arange(length, dtype=torch.float64) + mine(step, -1)
        ddp.broadcast_buffers()
        is_like_rank_0(module.cos, torch.arange(length, dtype=torch.float64) + step)
    assert len(ddp._state._programs) == module_state._KEPT


@case
def resized_buffers() -> None:
    """Observers of quantisation-aware training resize their buffers, sharded training frees what it does not need."""
    ddp, module = wrapped(low=torch.tensor([]), scale=torch.ones(1), late=torch.ones(2))
    x = data()
    module.scale.fill_(mine(1.0, 2.0))
    ddp(x).sum().backward()
    module.low.resize_(4).fill_(mine(3.0, 4.0))
    module.scale.resize_(2).fill_(mine(5.0, 6.0))
    ddp(x).sum().backward()
    is_like_rank_0(module.low, torch.full((4,), 3.0))
    is_like_rank_0(module.scale, torch.full((2,), 5.0))
    module.late.untyped_storage().resize_(0)
    module.late.untyped_storage().resize_(8)
    module.late.fill_(mine(7.0, 8.0))
    ddp(x)
    is_like_rank_0(module.late, torch.full((2,), 7.0))
    weight = module.layer.weight
    size = weight.untyped_storage().size()
    weight.data.untyped_storage().resize_(0)
    weight.data.untyped_storage().resize_(size)
    torch.nn.init.eye_(weight)
    ddp(x).sum().backward()


@case
def ranks_with_other_buffers() -> list[str]:
    """Errors on all ranks; then they go on."""
    ddp, module = wrapped(cos=torch.zeros(8, 1), mask=None)
    last = fc.rank() == fc.world_size() - 1
    call = lambda: ddp(data())
    texts = []
    module.cos = torch.zeros(12 if last else 8, 1)
    texts += [told(call), told(call)]
    module.cos = torch.zeros(8, 1, dtype=torch.float64 if last else torch.float32)
    texts.append(told(call))
    module.cos = torch.zeros(8, 1)
    call()
    module.mask = torch.ones(2) if last else None
    texts.append(told(call))
    module.mask = None if last else torch.ones(2)
    texts.append(told(call))
    module.mask = None
    module.layer.register_buffer("a" if last else "b", torch.ones(1))
    texts.append(told(call))
    del module.layer._buffers["a" if last else "b"]
    for name in ("ab", "ba")[last]:
        module.register_buffer(name, torch.ones(1))
    texts.append(told(call))
    del module.a, module.b
    module.cos = torch.zeros(12 if last else 8, 1)
    texts.append(told(ddp.broadcast_buffers))
    module.cos = torch.arange(3) + mine(0, 1)
    ddp(data()).sum().backward()
    is_like_rank_0(module.cos, torch.arange(3))
    return texts


@case
def not_compared_at_first() -> str:
    """Without `init_sync`, and after copying, the first forward pass compares them; an ignored one is each rank's own."""
    module = Holder(cos=torch.zeros(3) + mine(0, 1), own=torch.zeros(fc.rank() + 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    ddp = DistributedDataParallel(module, init_sync=False)
    assert module.cos.eq(mine(0, 1)).all()
    for again in (ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        again.module.cos.fill_(mine(2, 3))
        again.module.own.fill_(fc.rank())
        again(data()).sum().backward()
        is_like_rank_0(again.module.cos, torch.full((3,), 2.0))
        assert again.module.own.eq(fc.rank()).all()
    other = DistributedDataParallel(Holder(cos=torch.zeros(fc.rank() + 1)), init_sync=False)
    return told(lambda: other(data()))


@case
def inputs_that_end_with_other_buffers() -> list[str]:
    """In `join`, ranks whose inputs have ended have the buffers of the others, or all raise."""
    texts = []
    for length in (3, 5):
        ddp, module = wrapped(cos=torch.ones(3, dtype=torch.float64))

        def train(ddp: Any = ddp, module: Any = module, length: int = length) -> None:
            with ddp.join():
                for step in range(2 + fc.rank()):
                    module.cos = torch.full((length if step > 1 else 3,), 2.0 + step, dtype=torch.float64)
                    ddp(data(step)).sum().backward()

        texts.append(told(train))
        if length == 3:
            assert module.cos.eq(2.0 + fc.world_size()).all(), module.cos
    return texts


# ---------------------------------------------------------------- graphs, and who else sees a buffer


@case
def two_forwards_one_backward() -> None:
    """A GAN's discriminator: the second pass's broadcast writes into nothing that the first one's gradient needs."""
    inner = torch.nn.Sequential(*mlp(depth=1), torch.nn.BatchNorm1d(4, dtype=torch.float64), *mlp(depth=1, seed=1))
    ddp = DistributedDataParallel(inner)
    mean = inner[1].running_mean
    for step in range(3):
        ddp.zero_grad()
        loss = lambda m, rank, step=step: m(data(step, rank=rank)).sum() + m(data(10 + step, rank=rank)).square().sum()
        wanted = mean_gradients(inner, loss)
        loss(ddp, fc.rank()).backward()
        close(gradients(ddp), wanted)
        assert inner[1].running_mean is mean
    ddp.broadcast_buffers()
    same_on_all_ranks(list(inner.buffers()))


@case
def graphs_keep_the_values_of_their_pass() -> None:
    """Gradients through a buffer, or a view of it, are those of the value that its pass had; torch's own has the last one."""

    class Scaled(torch.nn.Module):
        def __init__(self, view: bool, in_place: bool) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1, bias=False)
            self.register_buffer("scale", torch.ones(2))
            self.view, self.in_place = view, in_place

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            out = self.layer(x) * (self.scale[:1] if self.view else self.scale)
            if self.in_place:
                self.scale.data.fill_(scale)  # as a kernel does: no version tells
            else:
                self.scale = torch.full((2,), scale)
            return out.sum()

    for view in (False, True):
        ddp = DistributedDataParallel(Scaled(view, in_place=False))
        held = []
        for step in range(3):  # the value of a pass is rank 0's of the pass before
            held.append(ddp(torch.ones(1, 1), mine(2.0 + step, 10.0 + step)))
        sum(held).backward()
        assert ddp.module.layer.weight.grad.item() == (1 if view else 2) * (1 + 2 + 3)
    # Where all see a pass's last value on rank 0 as well, it is at least the same on all ranks.
    ddp = DistributedDataParallel(Scaled(False, in_place=True))
    sum(ddp(torch.ones(1, 1), mine(2.0 + step, 10.0 + step)) for step in range(2)).backward()
    same_on_all_ranks([ddp.module.layer.weight.grad])


@case
def a_state_that_is_carried_on() -> None:
    """A buffer with a history, through which gradients flow: from rank 0's value to each rank's own pass."""

    class Carried(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(float(3)))
            self.register_buffer("state", torch.ones(()))

        def forward(self, x: float) -> torch.Tensor:
            self.state = torch.sigmoid(self.weight * self.state * x)
            return self.state

    ddp = DistributedDataParallel(Carried())
    loss = ddp(float(mine(1, 2))) + ddp(0.5)
    loss.backward()
    totals = []
    for x in (1.0, *(2.0,) * (fc.world_size() - 1)):
        weight = torch.tensor(3.0, requires_grad=True)
        first, own = (torch.sigmoid(weight * y) for y in (1.0, x))
        carried = own + (first - own).detach()
        (own + torch.sigmoid(weight * carried * 0.5)).backward()
        totals.append(weight.grad)
    torch.testing.assert_close(ddp.module.weight.grad, sum(totals) / len(totals))


@case
def a_buffer_stays_the_same_tensor() -> None:
    """Aliases of it, views and arrays over it have the new values: of users, in the module, in other modules, as state."""
    ddp, module = wrapped(a=torch.zeros(4, dtype=torch.float64), b=torch.zeros(2, dtype=torch.float64))
    module.first = module.a[:2]  # an attribute, which is a view
    module.same = module.a
    module.layer.register_buffer("tied", module.b)
    alias, view, array, state = module.a, module.a[1:], module.a.numpy(), ddp.state_dict()
    for held in (None, module.layer(data()) * module.a, module.layer(data()) * module.a[:1]):
        module.a.fill_(mine(2.0, 3.0))
        module.b.fill_(mine(4.0, 5.0))
        if held is None:
            ddp(data()).sum().backward()
            assert torch.equal(view, torch.full((3,), 2.0, dtype=torch.float64)) and array.tolist() == [2.0] * 4
            assert torch.equal(state["module.a"], alias)
        ddp.broadcast_buffers()
        assert module.a is alias and module.same is alias and module.layer.tied is module.b
        assert alias.eq(2).all() and module.first.eq(2).all() and module.b.eq(4).all()


@case
def only_what_differs_is_written() -> None:
    """Rank 0 writes nothing; others what has other bits: also zeros of another sign, and NaNs with another payload."""
    nan = torch.tensor([0x7FF8000000000001, 0x7FF8000000000002]).view(torch.float64)
    large = torch.arange(5000, dtype=torch.float64)
    for dtype in (torch.float64, torch.complex128, torch.bfloat16, torch.bool, torch.int8):
        ddp, module = wrapped(same=torch.ones(4).to(dtype), large=large.to(dtype), other=torch.ones(4).to(dtype))
        before = {name: buffer._version for name, buffer in module.named_buffers()}
        ddp.broadcast_buffers()
        assert {name: buffer._version for name, buffer in module.named_buffers()} == before
        module.other.fill_(mine(1, 0))
        module.large[-1] = mine(1, 0)
        before = {name: buffer._version for name, buffer in module.named_buffers()}
        ddp.broadcast_buffers()
        written = [name for name, buffer in module.named_buffers() if buffer._version != before[name]]
        assert written == mine([], ["large", "other"]), written
        same_on_all_ranks(list(module.buffers()))
    ddp, module = wrapped(zero=torch.tensor([0.0]), nan=nan)
    module.zero.copy_(mine(torch.zeros(1), -torch.zeros(1)))
    module.nan.copy_(mine(nan, nan.flip(0)))
    ddp.broadcast_buffers()
    same_on_all_ranks(list(module.buffers()))


@case
def passes_in_inference_mode() -> None:
    """Buffers that change or grow there stay tensors that can be trained with where they were such."""
    ddp, module = wrapped(cos=torch.ones(4, dtype=torch.float64))
    with torch.inference_mode():
        module.cos.fill_(mine(2.0, 3.0))
        ddp.broadcast_buffers()
    is_like_rank_0(module.cos, torch.full((4,), 2.0, dtype=torch.float64))
    ddp(data()).sum().backward()
    held = module.layer(data()) * module.cos
    with torch.inference_mode():
        module.cos.data.fill_(mine(4.0, 5.0))
        ddp.broadcast_buffers()
    assert module.cos.eq(4).all() and not module.cos.is_inference()
    torch.autograd.grad(held.sum(), module.layer.bias)
    with torch.inference_mode():
        module.cos = torch.ones(8, dtype=torch.float64) + fc.rank()  # a cache that grew
        ddp.broadcast_buffers()
    module.cos = torch.ones(9, dtype=torch.float64) + fc.rank()
    ddp.broadcast_buffers()
    with torch.inference_mode():
        module.cos = torch.ones(9, dtype=torch.float64) + fc.rank()
    ddp.broadcast_buffers()
    is_like_rank_0(module.cos, torch.ones(9, dtype=torch.float64))


@case
def scripted_modules() -> None:
    """TorchScript keeps tensors of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        inner = torch.jit.script(torch.nn.Sequential(*mlp(depth=1), torch.nn.BatchNorm1d(4, dtype=torch.float64)))
    ddp = DistributedDataParallel(inner)
    for step in range(3):
        (ddp(data(step)).sum() + ddp(data(step + 5)).sum()).backward()
    ddp.broadcast_buffers()
    same_on_all_ranks(list(inner.buffers()))


# ---------------------------------------------------------------- kinds of tensors


@case
def overlapping_tensors() -> None:
    """What is expanded or unfolded is broadcast from its base, at first, before passes, and as a parameter."""
    row, line = mine(torch.arange(3.0), torch.zeros(3)), mine(torch.arange(6.0), torch.zeros(6))
    base = torch.full((), float(mine(2, 3)))
    buffers = {"rows": row.expand(100, 3), "number": base.expand(2, 2), "windows": line.unfold(0, 3, 1), "gaps": line[::2]}
    ddp, module = wrapped(**buffers)
    module.wide = torch.nn.Parameter(torch.tensor([float(mine(4, 5))], dtype=torch.float64).expand(3))
    ddp = DistributedDataParallel(module)
    for step in range(2):
        assert torch.equal(module.rows, torch.arange(3.0).expand(100, 3) + step)
        assert module.number.eq(2 + step).all() and module.wide.eq(4).all()
        assert torch.equal(module.windows, (torch.arange(6.0) + step).unfold(0, 3, 1)), module.windows
        assert module.rows.stride() == (0, 1) and module.windows.stride() == (1, 1)
        row.copy_(mine(torch.arange(3.0) + 1, torch.zeros(3)))
        base.fill_(mine(3, 7))
        line.copy_(mine(torch.arange(6.0) + 1, torch.zeros(6)))
        ddp.broadcast_buffers()
    assert torch.equal(line, torch.arange(6.0) + 1)


@case
def refused_kinds() -> list[str]:
    """Errors of the constructor, before anything is sent."""
    import torch.testing._internal.two_tensor as two

    with torch.inference_mode():
        cached = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)
        rows = torch.eye(2).to_sparse_csr()
    lazy = [torch.nn.LazyLinear(2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyBatchNorm1d(affine=False))]
    kinds = [ragged, jagged, two.TwoTensor(torch.ones(2), torch.ones(2)), quantized, torch.eye(2).to_sparse(), rows, cached]
    kinds.append(torch.nn.parameter.UninitializedBuffer())
    made = [*lazy, *(Holder(kind=kind) for kind in kinds)]
    return [told(lambda module=module: DistributedDataParallel(module)) for module in made]


@case
def kinds_that_come_later() -> list[str]:
    """Errors on all ranks, where one has them; then they go on."""
    ddp, module = wrapped(kind=torch.ones(2))
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for kind in (ragged, torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to(torch.float8_e4m3fn)):
        module.kind = kind if fc.rank() == 1 else torch.ones(2)
        texts.append(told(lambda: ddp(data())))
    module.kind = torch.ones(2) + fc.rank()
    ddp.broadcast_buffers()
    is_like_rank_0(module.kind, torch.ones(2))
    conjugated = torch.tensor([1 + 2j]) + fc.rank()
    for kind, wanted in ((conjugated.conj(), 1 - 2j), (conjugated.conj().imag, -2.0)):
        module.kind = kind
        ddp.broadcast_buffers()
        assert module.kind.item() == wanted and (module.kind.is_conj() or module.kind.is_neg()), module.kind
    module.kind = torch.ones(4, dtype=torch.float64, requires_grad=True)  # a buffer that is learned
    kept = module.kind
    with torch.no_grad():
        kept.fill_(mine(2, 3))
    ddp(data()).sum().backward()
    assert module.kind is kept and kept.eq(2).all() and kept.grad is not None
    assert np.isfinite(kept.grad.numpy()).all()
    return texts
