"""Collectives of torch tensors in a process of a job: values by the table of `collective_cases.py`, gradients by one process.

Every rank computes what each of its group must get, from all ranks' inputs, which it can make.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

import funccoll as fc
import funccoll.torch as ft
from funccoll.compiler.compile_spmd import compile_spmd
from funccoll.torch.tensors import as_array, as_tensor
from tests.support.cases import collective_cases
from tests.support.cases.collective_cases import CASES, COMPLEX, DTYPES, dtypes_of, sample

NOT_OF_TENSORS = ("stack", "own_slice", "pvary", "axis_index", "barrier")
MOVED = [np.dtype(bool), fc.bfloat16, np.dtype(np.complex128)]
"""dtypes of the cases that move data."""
FEW = [np.dtype(np.uint8), fc.bfloat16, np.dtype(np.float32)]
"""dtypes of reductions other than all_reduce sum: each needs a kernel, which takes a second where none is on disk yet."""
Tensors = list[torch.Tensor]
How = Literal["few", "one", "dtypes", "product"]
"""Checks of values: each 7th case or each one in one dtype, each one in several, and the product with all kinds of tensors."""


def failures_of(*checks: Callable[[], None]) -> list[str]:
    """The traceback of each check that fails."""
    found = []
    for check in checks:
        try:
            check()
        except Exception:
            found.append(traceback.format_exc())
    return found


def group_of(mesh: Any, axes: Any) -> tuple[list[int], int]:
    """The ranks that communicate with this one along `axes`, and its place among them."""
    (group,) = [group for group in mesh.groups(axes) if fc.rank() in group]
    return group, group.index(fc.rank())


# ---------------------------------------------------------------- values


def tensor_kinds(mesh: Any) -> dict[str, Callable[[np.ndarray], torch.Tensor]]:
    """Tensors of one value in different memory: name -> the function that makes them."""

    def strided(value: np.ndarray) -> torch.Tensor:
        out = torch.zeros([2 * n for n in value.shape], dtype=as_tensor(value).dtype)
        out = out[tuple([slice(1, None, 2)] * value.ndim)] if value.ndim else out
        return out.copy_(as_tensor(value))

    def transposed(value: np.ndarray) -> torch.Tensor:
        return as_tensor(np.array(value.T, order="C")).permute(list(reversed(range(value.ndim))))

    def shared(value: np.ndarray) -> torch.Tensor:
        x = as_tensor(value)
        return ft.empty_like(x, mesh=mesh).copy_(x)

    def conjugated(value: np.ndarray) -> torch.Tensor:
        return as_tensor(np.asarray(np.conj(value))).conj()

    def recorded(value: np.ndarray) -> torch.Tensor:
        x = as_tensor(value)
        return torch.nn.Parameter(x) if x.dtype.is_floating_point else x

    return {
        "plain": as_tensor,
        "strided": strided,
        "transposed": transposed,
        "shared": shared,
        "conjugated": conjugated,
        "parameter": recorded,
    }


def checks(kinds: list[str], how: How) -> Iterator[tuple[Any, np.dtype, str]]:
    """What is checked: (case, dtype, kind of tensor)."""
    cases = [case for name, case in CASES.items() if not any(word in name for word in NOT_OF_TENSORS)]
    number = 0
    for place, case in enumerate(cases[::7] if how == "few" else cases):
        few = MOVED if case.moves else DTYPES if case.name.startswith("all_reduce sum") else FEW
        dtypes = [dtype for dtype in (DTYPES if how == "product" else few) if dtype in dtypes_of(case)]
        for dtype in dtypes if how in ("dtypes", "product") else [dtypes[place % len(dtypes)]]:
            for kind in kinds if how == "product" else [kinds[number // 3 % len(kinds)]]:
                yield case, dtype, "plain" if kind == "conjugated" and dtype not in COMPLEX else kind
            number += 1


def check_values(mesh: Any, axes: Any, how: How) -> Iterator[list[str]]:
    """The failures of values, without gradients, after each 500 checks and at the end."""
    group, place = group_of(mesh, axes)
    bound = {
        name: (lambda x, a, _f=getattr(ft, name), **options: _f(x, mesh, a, **options))
        for name in ft.__all__
        if name not in ("SyncBatchNorm", "barrier", "empty", "empty_like")
    }
    collective_cases.fc = SimpleNamespace(**bound)  # what the calls of the table name
    found, kinds = [], tensor_kinds(mesh)
    rng = np.random.default_rng(0)
    number = 0
    with torch.no_grad():
        for case, dtype, kind in checks(list(kinds), how):
            values = [np.asarray(sample(dtype, case.shape(len(group)), rng)) for _ in range(fc.world_size())]
            number += 1

            def check(case: Any = case, dtype: Any = dtype, values: Any = values, kind: str = kind) -> None:
                x = kinds[kind](values[fc.rank()])
                got = case.call(x, axes, len(group))
                want = np.asarray(case.oracle([values[r] for r in group], place))
                where = f"{case.name} of {dtype}, {kind}"
                assert tuple(got.shape) == want.shape and as_array(got).dtype == want.dtype, where
                assert got.is_contiguous() and not got.requires_grad, where
                assert as_array(got).tobytes() == np.ascontiguousarray(want).tobytes(), f"{where}: {got} {want}"
                assert as_array(x.contiguous()).tobytes() == values[fc.rank()].tobytes(), f"{where} wrote its operand"
                if got.numel():  # its memory is its own: what is written there is nowhere else
                    got.fill_(1)
                    again = case.call(x, axes, len(group))
                    assert as_array(again).tobytes() == np.ascontiguousarray(want).tobytes(), f"{where}, again"

            found += failures_of(check)
            if number % 500 == 0:
                yield found
                found = []
    assert number >= {"few": 18, "one": 120, "dtypes": 350, "product": 7000}[how], number
    yield found


# ---------------------------------------------------------------- gradients


def whole_maps(p: int) -> dict[str, tuple[Callable[..., torch.Tensor], Callable[[Tensors], Tensors]]]:
    """Name -> (the collective of (x, mesh, axes), the same as a map from all ranks' tensors to all ranks' results)."""
    reductions = {
        "sum": lambda s: s.sum(0),
        "mean": lambda s: s.mean(0),
        "max": lambda s: s.amax(0),
        "min": lambda s: s.amin(0),
        "prod": lambda s: s.prod(0),
    }
    zeros = torch.zeros_like
    maps: dict[str, Any] = {}
    for op, combine in reductions.items():
        total = lambda xs, combine=combine: combine(torch.stack(xs))
        maps[f"all_reduce {op}"] = (
            lambda x, m, a, op=op: ft.all_reduce(x, m, a, op=op),
            lambda xs, total=total: [total(xs)] * p,
        )
        maps[f"reduce {op}"] = (
            lambda x, m, a, op=op: ft.reduce(x, m, a, root=p - 1, op=op),
            lambda xs, total=total: [zeros(xs[0])] * (p - 1) + [total(xs)],
        )
        maps[f"reduce_scatter {op}"] = (
            lambda x, m, a, op=op: ft.reduce_scatter(x, m, a, dim=-1, op=op),
            lambda xs, total=total: list(total(xs).chunk(p, -1)),
        )
    for op in ("sum", "max", "prod"):
        combine, first = reductions[op], float(op == "prod")
        maps[f"inclusive_scan {op}"] = (
            lambda x, m, a, op=op: ft.inclusive_scan(x, m, a, op=op),
            lambda xs, combine=combine: [combine(torch.stack(xs[: i + 1])) for i in range(p)],
        )
        if op == "max":
            continue  # the loss of its identity is infinite
        maps[f"exclusive_scan {op}"] = (
            lambda x, m, a, op=op: ft.exclusive_scan(x, m, a, op=op, reverse=True),
            lambda xs, combine=combine, first=first: [
                *(combine(torch.stack(xs[i + 1 :])) for i in range(p - 1)),
                torch.full_like(xs[0], first),
            ],
        )
    maps["all_gather"] = (lambda x, m, a: ft.all_gather(x, m, a, dim=1), lambda xs: [torch.cat(xs, 1)] * p)
    maps["all_to_all"] = (
        lambda x, m, a: ft.all_to_all(x, m, a, split_dim=0, concat_dim=-1),
        lambda xs: [torch.cat([x.chunk(p, 0)[i] for x in xs], -1) for i in range(p)],
    )
    maps["permute"] = (
        lambda x, m, a: ft.permute(x, m, a, pairs=[(i, i + 1) for i in range(p - 1)]),
        lambda xs: [zeros(xs[0]), *xs[:-1]],
    )
    maps["broadcast"] = (lambda x, m, a: ft.broadcast(x, m, a, root=p - 1), lambda xs: [xs[-1]] * p)
    maps["gather"] = (
        lambda x, m, a: ft.gather(x, m, a, root=0, dim=1),
        lambda xs: [torch.cat(xs, 1)] + [zeros(torch.cat(xs, 1))] * (p - 1),
    )
    maps["scatter"] = (lambda x, m, a: ft.scatter(x, m, a, root=p - 1), lambda xs: list(xs[-1].chunk(p, 0)))
    return maps


COMPLEX_TOO = "all_reduce prod", "reduce_scatter mean", "all_to_all"


def loss(out: torch.Tensor, rank: int) -> torch.Tensor:
    """A real loss of one rank's result, another one on each rank, with a second derivative."""
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64) + rank).view(out.shape)
    real = torch.view_as_real(out).sum(-1) if out.is_complex() else out
    return (weights * (real**3 + 2 * real)).sum()


def check_gradients(mesh: Any, axes: Any) -> list[str]:
    """The failures of first and second derivatives; each rank's backward passes begin with losses of its own."""
    group, place = group_of(mesh, axes)
    p = len(group)
    found = []
    for name, (call, whole) in whole_maps(p).items():
        for dtype in (torch.float64, torch.complex128):
            if dtype.is_complex and name not in COMPLEX_TOO:
                continue
            torch.manual_seed(0)
            values = [torch.randint(-2, 3, (2 * p, 2 * p)).to(dtype) for _ in range(fc.world_size())]  # ties, zeros
            if dtype.is_complex:
                values = [value + 1j * value.flip(0) for value in values]

            def check(name: str = name, call: Any = call, whole: Any = whole, values: Any = values) -> None:
                own = values[fc.rank()].clone().requires_grad_()
                first = torch.autograd.grad(loss(call(own, mesh, axes), place), own, create_graph=True)[0]
                second = torch.autograd.grad(loss(first, place + 7), own)[0]
                every = [values[r].clone().requires_grad_() for r in group]
                total = torch.stack([loss(out, i) for i, out in enumerate(whole(every))]).sum()
                firsts = torch.autograd.grad(total + sum(0 * (x * x).sum().real for x in every), every, create_graph=True)
                total = torch.stack([loss(out, i + 7) for i, out in enumerate(firsts)]).sum()
                seconds = torch.autograd.grad(total + sum(0 * (x * x).sum().real for x in every), every)
                assert any(map(torch.count_nonzero, firsts)) and any(map(torch.count_nonzero, seconds)), name
                torch.testing.assert_close(first, firsts[place], rtol=1e-12, atol=1e-10, msg=lambda m: f"{name}: {m}")
                torch.testing.assert_close(second, seconds[place], rtol=1e-12, atol=1e-7, msg=lambda m: f"second {name}: {m}")

            found += failures_of(check)
    return found


def check_uses(mesh: Any) -> list[str]:
    """Failures of what surrounds a call: modes of autograd, memory formats, shared memory, errors."""
    axis, p, rank = mesh.axis_names, mesh.size, fc.rank()
    x = torch.arange(6.0).view(2, 3) + rank
    total = sum(torch.arange(6.0).view(2, 3) + r for r in range(p))

    def expanded_cotangents() -> None:
        leaf = x.clone().requires_grad_()
        ft.all_gather(leaf, mesh, axis).sum().backward()
        assert leaf.grad is not None and leaf.grad.tolist() == [[float(p)] * 3] * 2

    def an_operation_after_another() -> None:
        leaf = x.clone().requires_grad_()
        a = ft.all_reduce(leaf * 2, mesh, axis)
        b = ft.all_reduce(a.square(), mesh, axis, op="mean")
        b.backward(torch.ones_like(b))
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, p * 8.0 * total)

    def channels_last() -> None:
        image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(rank))
        got = ft.all_reduce(image.to(memory_format=torch.channels_last), mesh, axis)
        assert torch.equal(got, ft.all_reduce(image, mesh, axis))

    def autocast() -> None:
        weight = torch.ones(3, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = ft.all_reduce(x @ weight, mesh, axis)
            assert out.dtype is torch.bfloat16 and out.requires_grad
            out.float().sum().backward()
        assert weight.grad is not None and weight.grad.dtype is torch.float32
        torch.testing.assert_close(weight.grad, p * x.bfloat16().sum(0)[:, None].float().expand(3, 3))

    def inference_mode() -> None:
        with torch.inference_mode():
            assert torch.equal(ft.all_reduce(x + 0, mesh, axis), total)

    def results_that_are_kept() -> None:
        kept = [ft.all_reduce(x * i, mesh, axis) for i in range(9)]
        views = [ft.all_reduce(x * i, mesh, axis)[0].detach() for i in range(9)]
        for i in range(9):
            assert torch.equal(kept[i], total * i) and torch.equal(views[i], total[0] * i)

    def in_shared_memory() -> None:
        heap = mesh.transport.job.heap
        for size, dtype in (((1 << 16,), torch.float32), ((3, 5), torch.bfloat16), ((), torch.bool), ((0, 4), None)):
            tensor = ft.empty(*size, dtype=dtype, mesh=mesh)
            assert tensor.dtype is (dtype or torch.float32) and tuple(tensor.shape) == size and tensor.is_contiguous()
            assert 0 <= tensor.data_ptr() - heap.base < heap.size or not tensor.numel()
        assert ft.empty([2, 3], mesh=mesh).shape == (2, 3)
        assert ft.empty_like(x, mesh=mesh, dtype=torch.int8).dtype is torch.int8

    def nothing_is_staged() -> None:
        """What a collective copies for the other ranks holds a private tensor afterwards, and nothing of a shared one."""
        for size in (1 << 10, 1 << 18):  # smaller ones go through mailboxes
            types = [((size,), np.dtype(np.float32))]
            run = compile_spmd(lambda x: [fc.all_reduce(x, axis)], types, mesh, "staging").run
            for marker, tensor in ((7.25, ft.empty(size, mesh=mesh)), (9.25, torch.empty(size))):
                tensor.fill_(marker)
                (out,) = run(as_array(tensor))
                assert (out == p * marker).all()
                copies = [np.asarray(buffer)[: buffer.nbytes // 4 * 4].view(np.float32) for buffer in run._buffers]
                assert any((copy == marker).any() for copy in copies) is (marker == 9.25), (size, marker)

    def barriers() -> None:
        ft.barrier(mesh, axis)
        ft.barrier(mesh, mesh.axis_names[0])

    def refused_before_anything_moves() -> None:
        """On one rank alone: the others would hear of it if it had come to a collective."""
        if rank == 1:
            for error, words, call in refusals(mesh, p):
                with pytest.raises(error, match=re.escape(words)):
                    call()
        assert torch.equal(ft.all_reduce(x, mesh, axis), total)

    return failures_of(
        expanded_cotangents,
        an_operation_after_another,
        channels_last,
        autocast,
        inference_mode,
        results_that_are_kept,
        in_shared_memory,
        nothing_is_staged,
        barriers,
        refused_before_anything_moves,
    )


def refusals(mesh: Any, p: int) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """(error, words in it, a call that raises it)."""
    from funccoll.errors import DeviceError, DTypeError, MeshError, ShapeError, TraceError, UnsupportedError

    x, axis = torch.ones(2 * p, 3), mesh.axis_names[0]
    n = mesh.shape[axis]
    return [
        (TraceError, "x is a ndarray, and must be a torch tensor", lambda: ft.all_reduce(np.ones(3), mesh, axis)),  # type: ignore[arg-type]
        (TraceError, "x is a list", lambda: ft.all_gather([x], mesh, axis)),  # type: ignore[arg-type]
        (
            TraceError,
            "of layout sparse_coo, and collectives are of dense tensors: use x.to_dense()",
            lambda: ft.all_reduce(x.to_sparse(), mesh, axis),
        ),
        (DeviceError, f"x of shape ({2 * p}, 3) is on device 'meta'", lambda: ft.all_reduce(x.to("meta"), mesh, axis)),
        (DTypeError, "x has dtype torch.float8_e4m3fn", lambda: ft.all_reduce(x.to(torch.float8_e4m3fn), mesh, axis)),
        (DTypeError, "complex numbers have no order", lambda: ft.all_reduce(x.cfloat(), mesh, axis, op="max")),
        (DTypeError, "bitwise operations need integers", lambda: ft.reduce(x, mesh, axis, op="xor")),
        (DTypeError, "of booleans", lambda: ft.all_reduce(x.bool(), mesh, axis)),
        (UnsupportedError, "unknown op 'avg'. Use one of sum, mean", lambda: ft.all_reduce(x, mesh, axis, op="avg")),
        (UnsupportedError, "unknown op ['sum']", lambda: ft.all_reduce(x, mesh, axis, op=["sum"])),  # type: ignore[arg-type]
        (MeshError, f"unknown axis 'rows'. The mesh has axes {dict(mesh.shape)}", lambda: ft.all_reduce(x, mesh, "rows")),
        (MeshError, "unknown axis 'rows'", lambda: ft.barrier(mesh, "rows")),
        (MeshError, "axis must be the name of a mesh axis", lambda: ft.all_reduce(x, mesh, {})),  # type: ignore[arg-type]
        (MeshError, "names a mesh axis twice", lambda: ft.all_reduce(x, mesh, (axis, axis))),
        (MeshError, "has no devices to run on", lambda: ft.all_reduce(x, fc.abstract_mesh({"a": 2}), "a")),
        (MeshError, "mesh must be one from fc.make_mesh", lambda: ft.all_reduce(x, "data", "data")),  # type: ignore[arg-type]
        (ShapeError, "dim=2 does not exist in an operand of shape", lambda: ft.all_gather(x, mesh, axis, dim=2)),
        (ShapeError, "It has no dimensions", lambda: ft.all_gather(x.sum(), mesh, axis)),
        (ShapeError, f"root={n} must be an integer from 0 to {n - 1}", lambda: ft.broadcast(x, mesh, axis, root=n)),
        (ShapeError, "pairs must be a list of (source, destination)", lambda: ft.permute(x, mesh, axis, pairs=7)),  # type: ignore[arg-type]
        (ShapeError, "a source appears twice", lambda: ft.permute(x, mesh, axis, pairs=[(0, 0), (0, 0)])),
        (ShapeError, "size (2, -1) must be integers, 0 or more", lambda: ft.empty(2, -1, mesh=mesh)),
        (ShapeError, "size ('a',) must be integers", lambda: ft.empty("a", mesh=mesh)),
        (DTypeError, "funccoll.torch.empty has dtype", lambda: ft.empty(2, dtype=torch.float8_e4m3fn, mesh=mesh)),
        *(
            [
                (
                    ShapeError,
                    f"which {n} does not divide. Pad it to {n + n}",
                    lambda: ft.reduce_scatter(torch.ones(n + 1), mesh, axis),
                )
            ]
            if n > 1
            else []
        ),
    ]
