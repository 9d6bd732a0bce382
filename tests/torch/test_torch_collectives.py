"""Collectives of torch tensors: values, gradients of first and second order, memory and errors."""

from __future__ import annotations

import gc
import json
import re
import weakref

import pytest

import funccoll as fc
from funccoll.errors import FunccollError, MeshError, UnsupportedError
from tests.support.lazy_modules import lazily, need
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-collectives")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")
torch, ft, cases = lazily("torch"), lazily("funccoll.torch"), lazily("tests.support.cases.torch_collective_cases")

HEAD = (
    JOIN
    + """
import json
import torch
torch.set_num_threads(1)
import funccoll as fc, funccoll.torch as ft
from tests.support.cases.torch_collective_cases import *
"""
)
CHECKS = """
mesh = fc.make_mesh({axes})
for axes in {along}:
    for failures in check_values(mesh, axes, {how!r}):
        say(json.dumps(failures))
    say(json.dumps(check_gradients(mesh, axes)))
say(json.dumps(check_uses(mesh)))
say("end")
"""


TWO, THREE, FOUR = {"data": 2}, {"data": 3}, {"data": 2, "model": 2}
ALONG = ["model", ("model", "data")]


@pytest.mark.parametrize(
    ("axes", "along", "how"),
    [
        (TWO, ["data"], "few"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(THREE, ["data"], "dtypes"), (FOUR, ALONG, "one")]),
        *(
            pytest.param(*case, "product", marks=pytest.mark.exhaustive)
            for case in [
                (TWO, ["data"]),
                (THREE, ["data"]),
                (FOUR, ALONG),
            ]
        ),
    ],
)
def test_on_processes(axes, along, how):
    count = fc.abstract_mesh(axes).size
    with Ranks(HEAD + CHECKS.format(axes=axes, along=along, how=how), range(count), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        while (lines := ranks.lines()) != dict.fromkeys(range(count), "end"):  # in parts: kernels may have to be compiled
            for rank, line in lines.items():
                failures = json.loads(line)
                assert not failures, f"{len(failures)} failures on rank {rank}:\n" + "\n".join(failures[:5])
        ranks.end_well()


AS_TORCH = """
import warnings
warnings.simplefilter("ignore")  # torch.distributed's own
import torch.distributed as dist
import torch.distributed.nn.functional as theirs
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=rank, world_size=2)
mesh = fc.make_mesh({{"data": 2}})
pairs = {{
    "all_reduce": (lambda x: ft.all_reduce(x, mesh, "data"), theirs.all_reduce),
    "all_gather": (lambda x: ft.all_gather(x, mesh, "data"), lambda x: torch.cat(theirs.all_gather(x))),
    "broadcast": (lambda x: ft.broadcast(x, mesh, "data", root=1), lambda x: theirs.broadcast(x.clone(), 1)),
    "all_to_all": (lambda x: ft.all_to_all(x, mesh, "data", split_dim=0, concat_dim=0),
                   lambda x: torch.cat(theirs.all_to_all([torch.empty(2, 3) for _ in "ab"], list(x.chunk(2))))),
}}
differ = []
for name, calls in pairs.items():
    found = []
    for call in calls:
        x = (torch.arange(12.0).view(4, 3) + rank).requires_grad_()
        out = call(x)
        found.append((out.detach(), torch.autograd.grad((out.square() * (1 + rank)).sum(), x)[0]))
    differ += [name] if not all(map(torch.equal, *found)) else []
say(json.dumps(differ))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_gradients_are_those_of_torch_distributed(tmp_path):
    """The losses of the ranks differ; integers, so that sums are exact."""
    with Ranks(HEAD + AS_TORCH.format(store=str(tmp_path / "store")), range(2), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert set(ranks.lines().values()) == {"[]"}
        ranks.end_well()


WITHOUT_BACKWARD = """
mesh = fc.make_mesh({"data": 2})
out = ft.all_reduce(torch.ones(3, requires_grad=True), mesh, "data")
try:
    out.sum().backward() if rank == 0 else ft.all_gather(torch.ones(4), mesh, "data")
except fc.FunccollError as error:
    say(json.dumps([type(error).__name__, str(error)]))
"""


@pytest.mark.slow
def test_a_rank_without_a_backward_pass_is_named():
    with Ranks(HEAD + WITHOUT_BACKWARD, range(2), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        for rank in range(2):
            kind, text = json.loads(ranks.line(rank))
            assert kind == "ProgramMismatch"
            assert re.search(r"rank 0: all_reduce .* shape \[3\], over 'data'", text)
            assert re.search(r"rank 1: all_gather .* shape \[4\], over 'data'", text)
            assert "tensor_collectives.py" not in text and "function.py" not in text
        for rank in range(2):
            ranks.end(rank)


# ---------------------------------------------------------------- one device, which needs no job


@pytest.fixture
def alone():
    return fc.make_mesh({"data": 1})


def test_one_device(alone):
    """All collectives are the identity in values and gradients, on memory of their own."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for call in (
        ft.all_reduce,
        ft.all_gather,
        ft.reduce_scatter,
        ft.broadcast,
        ft.reduce,
        ft.gather,
        ft.scatter,
        lambda x, m, a: ft.all_to_all(x, m, a, split_dim=0, concat_dim=1),
        lambda x, m, a: ft.permute(x, m, a, pairs=[(0, 0)]),
        *(lambda x, m, a, op=op: ft.all_reduce(x, m, a, op=op) for op in ("mean", "max", "min", "prod")),
    ):
        out = call(x, alone, "data")
        assert torch.equal(out, x) and out.data_ptr() != x.data_ptr() and out.requires_grad
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert torch.equal(gradient, 2 * x)
    assert torch.autograd.gradcheck(lambda x: ft.all_reduce(x, alone, "data", op="prod"), x)
    assert torch.autograd.gradgradcheck(lambda x: ft.all_reduce(x, alone, "data", op="mean"), x)
    ft.barrier(alone, "data")
    assert ft.empty(2, 3, mesh=alone).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when make_dual is called first
def test_forward_mode(alone):
    x = torch.randn(4, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x * 2)
        out = torch.autograd.forward_ad.unpack_dual(ft.all_gather(dual, alone, "data"))
        assert torch.equal(out.primal, x) and out.tangent is not None and torch.equal(out.tangent, 2 * x)
        with pytest.raises(RuntimeError, match="jvp"):
            ft.all_reduce(dual, alone, "data", op="max")


@pytest.mark.parametrize("number", range(24))
def test_refusals(alone, number):
    error, words, call = cases.refusals(alone, 1)[number]
    with pytest.raises(error, match=re.escape(words)) as raised:
        call()
    assert isinstance(raised.value, FunccollError)
    assert raised.value.source is not None and raised.value.source.file.endswith("torch_collective_cases.py")


def test_every_refusal_is_tested(alone):
    assert len(cases.refusals(alone, 1)) == 24


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # as above
def test_transforms_of_torch_func_are_refused(alone):
    """Their tensors have no memory of their own: that of functionalize read as zeros, and make_fx kept a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    reduced = lambda v: ft.all_reduce(v, alone, "data")
    x, leaf = torch.arange(6.0).reshape(3, 2), torch.ones(3, 2, requires_grad=True)
    batch = r"x of shape \(2,\) is one example of a batch of vmap, .* whole batch, of shape \(3, 2\), with dimensions"
    derivative = r"x of shape \(3, 2\) is differentiated inside of one of torch.func's transforms .* Use torch.autograd"
    calls = [
        (batch, lambda: torch.func.vmap(reduced)(x)),
        (derivative, lambda: torch.func.grad(lambda v: reduced(v).sum())(x)),
        (derivative, lambda: torch.func.jvp(reduced, (x,), (x,))),
        (derivative, lambda: torch.func.jacrev(reduced)(x)),
        (derivative, lambda: torch.vmap(lambda v: v * reduced(leaf).sum())(x)),
        ("functionalize.*outside", lambda: torch.func.functionalize(reduced)(x)),
        ("traced by make_fx.*constant.*torch.compile", lambda: make_fx(reduced)(x)),
        ("batch of vmap.*vectorize=True", lambda: torch.autograd.functional.jacobian(reduced, x, vectorize=True)),
        (
            "batch of vmap.*is_grads_batched=True",
            lambda: torch.autograd.grad(reduced(leaf), leaf, torch.ones(4, 3, 2), is_grads_batched=True),
        ),
    ]
    for words, call in calls:
        with pytest.raises(UnsupportedError, match=rf"^all_reduce: .*{words}") as raised:
            call()
        assert raised.value.source is not None and raised.value.source.file == __file__
    inside = torch.vmap(lambda v: v + reduced(x)[0])(x)  # what is not of the batch is reduced as it is
    assert torch.equal(inside, x + x[0]) and torch.equal(reduced(x), x)


def test_virtual_devices_are_refused():
    mesh = fc.make_mesh({"data": 4})
    for call in (
        lambda: ft.all_reduce(torch.ones(2), mesh, "data"),
        lambda: ft.barrier(mesh, "data"),
        lambda: ft.empty(2, mesh=mesh),
    ):
        with pytest.raises(MeshError, match=r"plays all 4 devices.*`funccoll run -n 4 script.py`"):
            call()


def test_compiled_functions_are_bounded(alone, monkeypatch):
    """A shape that was not used for long is compiled anew."""
    monkeypatch.setattr("funccoll.torch.tensor_programs.KEPT", 3)
    for size in (1, 2, 3, 1, 4, 1, 2):
        assert ft.all_reduce(torch.ones(size), alone, "data").shape == (size,)
    found = alone.programs["torch"].cache_info()
    assert (found.currsize, found.hits) == (3, 2)


def test_compiled_functions_end_with_their_mesh():
    mesh, equal = fc.make_mesh({"data": 1}), fc.make_mesh({"data": 1})
    for each in (mesh, equal):
        ft.all_reduce(torch.ones(2), each, "data")
    kept, other = (weakref.ref(each.programs["torch"]) for each in (mesh, equal))
    del mesh, each
    gc.collect()
    assert kept() is None and other() is equal.programs["torch"]


def test_errors_of_a_backward_pass_name_the_users_line(alone):
    """Torch's frames are not the user's."""
    x = torch.ones(3, requires_grad=True)
    out = ft.all_reduce(x, alone, "data")
    alone.programs["torch"].cache_clear()
    alone.programs["torch"] = None  # so that it is looked at again
    object.__setattr__(alone, "device_type", "cuda")
    with pytest.raises(FunccollError, match="mesh of GPUs") as raised:
        out.sum().backward()
    assert raised.value.source is not None and raised.value.source.file == __file__


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own access
def test_a_compiled_function_has_a_graph_break(alone):
    """Values and gradients are those of the function; each call breaks the graph once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    import funccoll.torch as ft  # dynamo would trace the lazy one

    def function(x, norm=ft.SyncBatchNorm(3, process_group=alone)):
        ft.barrier(alone, "data")
        shared = ft.empty(3, mesh=alone).fill_(2.0)
        return (ft.all_reduce(x * 2, alone, "data", op="mean") + norm(x) * shared).square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter)
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(2):
        wanted, found = (torch.autograd.grad(call(x), x)[0] for call in (function, compiled))
        torch.testing.assert_close(found, wanted)
    assert counter.frame_count <= 4  # the parts between barrier, empty, all_reduce, SyncBatchNorm and the end
