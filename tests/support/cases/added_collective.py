"""A collective that the package does not have, made of its four parts; `run` is launched, so no other test sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.collectives.argument_checks import mesh_axes
from funccoll.collectives.functions import _communicate
from funccoll.collectives.record import CollectivePrimitive, Lowering, collective
from funccoll.core.interpreter import bind
from funccoll.core.ir import primitive_named
from funccoll.core.types import ArrayType
from funccoll.primitives.operand_rules import resized
from funccoll.schedules import Move
from funccoll.schedules.collective import KINDS, Kind
from funccoll.schedules.registry import _ALGORITHMS, algorithm


def record() -> CollectivePrimitive:
    """all_gather in the reverse order of devices. No parameter has a name that another collective has."""

    def infer(x: ArrayType, *, axes: tuple[str, ...], along: int, size: int) -> ArrayType:
        return ArrayType(resized(x, along, size, 1), x.dtype, x.varying - set(axes))

    def reference(shards: Sequence[Any], *, along: int, **_: Any) -> list[Any]:
        return [np.concatenate(shards[::-1], axis=along)]

    def vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes, along, size, **_: Any) -> list[Any]:
        own = {"axes": axes, "dim": along, "stack": False, "size": size}
        return [bind(primitive_named("own_slice"), np.concatenate(np.split(ct, size, along)[::-1], along), **own) for ct in cts]

    def lower(*, along: int) -> Lowering:
        return Lowering("mirrored_gather", concat_dim=along)

    return collective("mirrored_gather", infer=infer, reference=reference, vjp=vjp, lower=lower, dims=("along",))


def schedules() -> None:
    """Its postcondition, and an algorithm."""
    KINDS["mirrored_gather"] = Kind("mirrored_gather", 1, 0, lambda c, rank, block: (c.nranks - 1 - block, 0))
    _ALGORITHMS["mirrored_gather"] = {}

    @algorithm("mirrored_gather")
    def direct(p: int):
        """Every rank reads all inputs."""
        r = np.arange(p)
        yield [Move((r, "output", p - 1 - i), (i, "input", 0)) for i in range(p)]


def run() -> list[str]:
    """Call it on a mesh of processes and on one of virtual devices; return what the program's table says of it."""
    n, primitive = fc.world_size(), record()
    schedules()
    x = np.random.default_rng(n).normal(size=(n * 3, 5)).astype(np.float32)
    want = np.concatenate(np.split(x, n)[::-1], axis=1)
    for mesh in (fc.make_mesh({"d": n}), fc.core.mesh.Mesh({"d": n}, range(n))):

        def mirrored(x: Any) -> Any:
            return _communicate(primitive, x, mesh_axes("mirrored_gather", "d"), None, along=1)

        def both(x: Any) -> Any:
            return mirrored(x), fc.grad(lambda x: np.sum(mirrored(x) ** 3))(x)

        step = fc.jit(both, mesh=mesh, in_specs=P("d"), out_specs=(P(), P("d")))
        value, gradient = step(x)
        np.testing.assert_array_equal(np.asarray(value), want)
        np.testing.assert_allclose(fc.process_allgather(gradient), 3 * x**2, rtol=1e-6)
        lowered = step.lower(x)
    return [f"{row.kind} {row.op} {row.axes} {row.schedule}" for row in lowered.collectives()]
