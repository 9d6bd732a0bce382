"""Calls of programs on a mesh inside a gradient that is taken outside of it: `fc.grad(lambda w: loss(w, x))` of a jitted loss.

Such a trace is of global values. A call is one equation (`primitives/shard_map_call.py`). Its gradient is two programs on the
same mesh. One also returns the residuals. The other goes from these and the cotangents of the results to the cotangents of the
arguments. Both are compiled once. The cotangent of a value has the value's sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout, layout_of
from ..core.interpreter import Traced, bind, evaluate
from ..core.ir import Equation, Program
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.pytree_paths import parameter_names
from ..core.sharding import Sharding
from ..core.types import ArrayType, is_inexact
from ..errors import ShardingError, Source, current_source
from ..primitives.shard_map_call import shard_map_call_p
from ..tracing.trace import sharding_of, stage, value_type
from ..transforms.autodiff.backward import RULES, SPLIT
from ..transforms.autodiff.control_rules import Transposed, differentiated
from .codegen.non_finite import NonFinite
from .debug_modes import MODES
from .resharding import reshard
from .signature import Signature
from .stages import Compiled, TracedFunction, trace_redistribution

__all__ = ["ProgramCall", "moved", "sum_of"]


class ProgramCall:
    """A traced program on a mesh, called with global values. `source` is the line of its function."""

    def __init__(
        self,
        name: str,
        program: Program,
        in_layouts: Sequence[ArrayLayout],
        out_layouts: Sequence[ArrayLayout],
        mesh: Mesh,
        source: Source | None = None,
        names: Sequence[str] = (),
    ):
        self.name, self.program, self.mesh, self.source = name, program, mesh, source
        self.in_layouts, self.out_layouts = tuple(in_layouts), tuple(out_layouts)
        self.names = tuple(names or parameter_names(None, len(in_layouts)))
        self._gradients: dict[tuple[bool, ...], _Gradient] = {}
        self._others: dict[tuple[Sharding, ...], ProgramCall] = {}
        self._compiled: dict[NonFinite | None, Compiled] = {}

    def __repr__(self) -> str:
        return self.name  # for the text of programs: no address

    @property
    def compiled(self) -> Compiled:
        """The executable program."""
        mode = MODES.non_finite
        found = self._compiled.get(mode)
        if found is None:
            found = self._compiled[mode] = self._compile()
        return found

    def _compile(self) -> Compiled:
        leaf = optree.treespec_leaf()
        trees = [optree.treespec_tuple([leaf] * len(layouts)) for layouts in (self.in_layouts, self.out_layouts)]
        kept = (False,) * len(self.in_layouts)
        signature = Signature(
            self.name, self.mesh, trees[0], self.in_layouts, self.names, trees[1], self.out_layouts, kept, self.source
        )
        return TracedFunction(self.program, signature).lower().compile()

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Return the results for concrete arguments: Arrays if they are split, NumPy arrays if they are whole."""
        outs = self.compiled.execute(values)
        return [x if layout.sharding.varying else np.asarray(x) for x, layout in zip(outs, self.out_layouts, strict=True)]

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Call it with values in any shardings of its mesh. Traced ones are brought into its own inside of the program."""
        whole = Sharding(self.mesh, P())
        given = tuple(
            (sharding_of(v) or whole) if isinstance(v, Traced) else layout.sharding
            for v, layout in zip(values, self.in_layouts, strict=True)
        )
        call = self._others.get(given)
        if call is None:
            call = self._others[given] = self._taking(given)
        return bind(shard_map_call_p, *values, call=call)

    def _taking(self, given: tuple[Sharding, ...]) -> ProgramCall:
        """Return the same function of arguments in other shardings."""
        own = [layout.sharding for layout in self.in_layouts]
        if list(given) == own:
            return self
        layouts = [layout_of(x.shape, x.dtype, s, x.weak) for x, s in zip(self.in_layouts, given, strict=True)]
        constants, shapes = [value for _, value in self.program.constants], [x.shape for x in layouts]

        def call(*blocks: Any) -> list[Any]:
            return evaluate(self.program, constants, [*map(reshard, blocks, shapes, given, own)])[0]

        return self._made(call, layouts, self.out_layouts, self.name, self.names)

    def _made(
        self,
        fn: Callable[..., list[Any]],
        ins: Sequence[ArrayLayout],
        outs: Sequence[ArrayLayout],
        name: str,
        names: Sequence[str] = (),
    ) -> ProgramCall:
        program, _ = stage(fn, [x.type for x in ins], axis_sizes=self.mesh.shape, label=name)
        return ProgramCall(name, program, ins, outs, self.mesh, self.source, names)

    def gradient(self, active: tuple[bool, ...]) -> _Gradient:
        """Return its derivative in the active arguments."""
        found = self._gradients.get(active)
        if found is None:
            found = self._gradients[active] = self._differentiate(active)
        return found

    def _differentiate(self, active: tuple[bool, ...]) -> _Gradient:
        program, count = self.program, len(self.out_layouts)
        nowhere, everywhere = [False] * len(active), [True] * len(active)
        staged, captured, back = differentiated(program, active, nowhere, everywhere)
        types = [a.type for a in staged.outputs[count:]]
        residuals = [self._stacked(t) for t in types]

        def forward(*blocks: Any) -> list[Any]:
            outs = evaluate(staged, captured, blocks)[0]
            kept = zip(outs[count:], types, strict=True)
            return [*outs[:count], *(np.reshape(x, (1, *t.shape)) if t.varying else x for x, t in kept)]

        def backward(*given: Any) -> list[Any]:
            stored = (np.reshape(x, t.shape) for x, t in zip(given, types, strict=False))
            arguments = given[len(types) :]
            needs = [next(stored) if n is None else arguments[n] if type(n) is int else n for n in back.needs]
            return back.run(needs, arguments[len(active) :])

        ins = [*residuals, *self.in_layouts, *compress(self.out_layouts, back.takes)]
        return _Gradient(
            self._made(forward, self.in_layouts, [*self.out_layouts, *residuals], self.name, self.names),
            self._made(backward, ins, [*compress(self.in_layouts, back.gives)], f"gradient of {self.name}"),
            back,
        )

    def _stacked(self, type: ArrayType) -> ArrayLayout:
        """Return the layout of blocks of a type as one array, stacked along a new first dimension."""
        axes = tuple(a for a in self.mesh.axis_names if a in type.varying)
        if not axes:
            return layout_of(type.shape, type.dtype, Sharding(self.mesh, P()))
        size = int(np.prod([self.mesh.shape[a] for a in axes]))
        return layout_of((size, *type.shape), type.dtype, Sharding(self.mesh, P(axes)))


@dataclass(frozen=True)
class _Gradient:
    """A call that also returns residuals, and the call from residuals, arguments and cotangents to cotangents."""

    forward: ProgramCall
    backward: ProgramCall
    transposed: Transposed


def _rule(
    eqn: Equation, values: Sequence[Any], active: Sequence[bool], unreduced: frozenset[str]
) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    call: ProgramCall = eqn.params["call"]
    gradient = call.gradient(tuple(a and is_inexact(t.dtype) for a, t in zip(active, call.in_layouts, strict=True)))
    outs = gradient.forward.bind(values)
    count = len(eqn.outputs)
    results, residuals = outs[:count], outs[count:]

    def pullback(cts: list[Any]) -> list[Any]:
        back = gradient.transposed
        full = [_zeros(v.type) if ct is None else ct for v, ct in zip(eqn.outputs, cts, strict=True)]
        found = iter(gradient.backward.bind([*residuals, *values, *compress(full, back.takes)]))
        return [next(found) if g else None for g in back.gives]

    return results, pullback


RULES[shard_map_call_p] = _rule


# ---------------------------------------------------------------- values that are split


@functools.lru_cache(maxsize=256)
def moved(given: ArrayLayout, wanted: Sharding, source: Source | None) -> ProgramCall:
    """Return the redistribution of a global value. `source`, the user's line, is in the key as in `stages.redistribution`."""
    result = layout_of(given.shape, given.dtype, wanted)
    program = trace_redistribution(given, result, source).program
    return ProgramCall("redistribute", program, [given], [result], wanted.mesh)


def _move(x: Any, sharding: Sharding) -> Any:
    type = value_type(x)
    given = sharding_of(x) or Sharding(sharding.mesh, P())
    if given.mesh != sharding.mesh:
        raise ShardingError(
            f"a cotangent {type} is split as {given.spec!r} over {given.mesh!r}, and its value as {sharding.spec!r} over "
            f"{sharding.mesh!r}: they have one mesh, or the cotangent is whole."
        )
    return moved(layout_of(type.shape, type.dtype, given), sharding, current_source()).bind((x,))[0]


def _add(x: Any, y: Any) -> Any:
    sharding, type = sharding_of(x), value_type(x)
    assert sharding is not None
    return sum_of(layout_of(type.shape, type.dtype, sharding)).bind((x, y))[0]


@functools.lru_cache(maxsize=256)
def sum_of(layout: ArrayLayout) -> ProgramCall:
    """Return the sum of two global values that are split alike."""
    mesh = layout.sharding.mesh
    program, _ = stage(lambda x, y: [x + y], [layout.type] * 2, axis_sizes=mesh.shape, label="a sum of cotangents")
    return ProgramCall("a sum of cotangents", program, [layout] * 2, [layout], mesh)


def _zeros(type: ArrayType) -> np.ndarray:
    return np.zeros(type.shape, type.dtype)


def _split_zeros(type: ArrayType, sharding: Sharding) -> Array:
    """Return zeros of a global type as an Array."""
    layout = layout_of(type.shape, type.dtype, sharding)
    return Array(layout, layout.split(_zeros(type)))


SPLIT.update(add=_add, zeros=_split_zeros, move=_move)
