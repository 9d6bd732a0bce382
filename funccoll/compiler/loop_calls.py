"""The body of a loop as calls of kernels: which arrays they read and write. `loop_plan` decides where these are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.ir import Atom, Equation, Literal, Program, Var
from ..kernels.native.loop import FusedLoop, LoopPlace, StoredNumber
from ..kernels.native.products import MatrixProduct
from ..kernels.native.strided_copies import StridedCopy
from ..primitives.elementwise import stop_gradient_p
from ..primitives.fused import fused_p
from ..primitives.indexing import getitem_p, index_set_p, realize, scatter_p
from ..primitives.linalg import matmul_p
from ..primitives.piece_sums import accumulate_p
from ..primitives.shaping import broadcast_to_p, concatenate_p, pad_p, reshape_p, transpose_p
from ..primitives.varying import pvary_p
from .loop_plan import LoopPlan
from .loop_views import ArrayView, KernelCall, LoopArray, c_strides

__all__ = ["LoopCalls"]

_KINDS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_LARGEST_PRODUCT = 1 << 21
"""Multiplications up to which a product is computed here. One core of Sapphire Rapids: 0.5 to 0.9 of OpenBLAS's time with
AVX-512, and 0.8 to 1.4 with AVX2, without the microsecond of a call."""
_LARGEST_MATRIX = 1 << 17
"""Elements of a matrix up to which its product with one row is computed here. Larger ones wait for memory."""
_LARGEST_STACK = 64
"""Products of a stack: each is a call of its own."""


class _NotFusable(Exception):
    """The body has something that no kernel computes."""


class LoopCalls:
    """The calls of a loop while they are found. `body` has groups."""

    def __init__(self, body: Program, consts: int, carry: int, length: int, reverse: bool):
        self.body, self.consts, self.carry, self.length, self.reverse = body, consts, carry, length, reverse
        self.calls: list[KernelCall] = []
        self.views: dict[Var, ArrayView] = {}
        self.copies: dict[tuple[Any, ...], ArrayView] = {}
        """Views in C order, by what they are copies of."""
        for k, v in enumerate(body.inputs):
            array, number = (
                ("const", k) if k < consts else ("carry", k - consts) if k < consts + carry else ("element", k - consts - carry)
            )
            memory = LoopArray(v.type.nbytes, array == "const", LoopPlace(array, number))
            self.views[v] = ArrayView(memory, v.type.dtype, v.type.shape, c_strides(v.type.shape))

    def loop(self) -> FusedLoop | None:
        """Return the loop as data; None if it cannot be a kernel."""
        body = self.body
        if any(not v.type.size for v in (*body.inputs, *(a for a in body.outputs if type(a) is Var))):
            return None
        try:
            for eqn in body.equations:
                self.add(eqn)
            outputs = [self.view(a, a.type.dtype) for a in body.outputs]
        except _NotFusable:
            return None
        arrays = [self.views[v].memory for v in body.inputs]
        return LoopPlan(self.calls, arrays, outputs, self.consts, self.carry, self.length, self.reverse).loop()

    # ------------------------------------------------------------ views

    def view(self, atom: Atom, dtype: np.dtype) -> ArrayView:
        """Return the elements of an operand."""
        if isinstance(atom, Literal):
            return self.number(np.asarray(atom.value).astype(dtype)).of(lambda x: np.broadcast_to(x, atom.type.shape))
        return self.views[atom]

    def number(self, value: np.ndarray) -> ArrayView:
        """Return a number in the workspace."""
        if value.size != 1 or value.dtype.itemsize > 8:
            raise _NotFusable
        bits = int.from_bytes(value.tobytes(), "little", signed=True)
        key = "number", bits, value.dtype
        if key not in self.copies:
            made = ArrayView(LoopArray(value.dtype.itemsize, True), value.dtype, (), ())
            self.calls.append(KernelCall(StoredNumber(value.dtype.itemsize, bits), [], [made]))
            self.copies[key] = made
        return self.copies[key]

    def new(self, dtype: np.dtype, shape: Sequence[int], sources: Sequence[ArrayView]) -> ArrayView:
        """Return a temporary array, which is computed from these."""
        shape = tuple(shape)
        if not math.prod(shape):
            raise _NotFusable
        memory = LoopArray(math.prod(shape) * dtype.itemsize, all(s.memory.invariant for s in sources))
        return ArrayView(memory, dtype, shape, c_strides(shape))

    def copy(self, source: ArrayView, target: ArrayView, adds: bool = False) -> None:
        """Append the copy of elements to others of the same shape, or their addition to these."""
        if adds and source.dtype not in _KINDS:
            raise _NotFusable
        adding = _KINDS[source.dtype] if adds else ""
        if math.prod(source.shape):
            kernel = StridedCopy(source.dtype.itemsize, source.shape, source.strides, target.strides, adding)
            self.calls.append(KernelCall(kernel, [source], [target]))

    def in_c_order(self, view: ArrayView) -> ArrayView:
        """Return elements in C order: these, or a copy."""
        if view.contiguous:
            return view
        key = view.memory, view.offset, view.shape, view.strides, view.dtype
        if key not in self.copies:
            self.copies[key] = made = self.new(view.dtype, view.shape, [view])
            self.copy(view, made)
        return self.copies[key]

    # ------------------------------------------------------------ equations

    def add(self, eqn: Equation) -> None:
        """Append the calls of an equation, or note its result as a view."""
        primitive, params = eqn.primitive, eqn.params
        out = eqn.outputs[0]
        if primitive is fused_p:
            reads = [self.in_c_order(self.view(a, a.type.dtype)) for a in eqn.inputs]
            writes = [self.new(v.type.dtype, v.type.shape, reads) for v in eqn.outputs]
            self.calls.append(KernelCall(params["group"], reads, writes, frozenset(params["aliases"])))
            self.views.update(zip(eqn.outputs, writes, strict=True))
            return
        operands = [self.view(a, a.type.dtype) for a in eqn.inputs]
        if any(o.dtype != out.type.dtype for o in operands):
            raise _NotFusable
        if primitive in (pvary_p, stop_gradient_p):
            found = operands[0]
        elif primitive is reshape_p:
            found = self.in_c_order(operands[0]).reshaped(out.type.shape)
        elif primitive is transpose_p:
            found = operands[0].of(lambda x: x.transpose(params["permutation"]))
        elif primitive is broadcast_to_p:
            found = operands[0].of(lambda x: np.broadcast_to(x, out.type.shape))
        elif primitive is getitem_p and len(operands) == 1:
            found = operands[0].of(lambda x: x[(*realize(params["recipe"], ()), ...)])
        elif primitive is matmul_p:
            found = self.product(operands[0], operands[1], out)
        else:
            found = self.joined(eqn, operands)
        self.views[out] = found

    def joined(self, eqn: Equation, operands: list[ArrayView]) -> ArrayView:
        """Return an array that is put together from others."""
        primitive, params, type = eqn.primitive, eqn.params, eqn.outputs[0].type
        everything: list[tuple[ArrayView, Any]] = []
        adds = False
        if primitive is concatenate_p:
            dim, stops = params["dim"], [0, *itertools.accumulate(x.shape[params["dim"]] for x in operands)]
            before = (slice(None),) * dim
            everything = [(x, (*before, slice(a, b))) for x, (a, b) in zip(operands, itertools.pairwise(stops), strict=True)]
        elif primitive is pad_p:
            x, around = operands
            inside = tuple(slice(low, low + n) for n, (low, _) in zip(x.shape, params["widths"], strict=True))
            everything = [(around, ()), (x, inside)]
        elif primitive is index_set_p and len(operands) == 2:
            everything = [(operands[0], ()), (operands[1], realize(params["recipe"], ()))]
        elif primitive is scatter_p and len(operands) == 1:
            everything = [(self.zero(type.dtype), ()), (operands[0], realize(params["recipe"], ()))]
        elif primitive is accumulate_p and len(operands) == params["started"] + len(params["recipes"]):
            parts = [realize(recipe, ()) for recipe in params["recipes"]]
            count = np.zeros(type.shape, np.int64)
            for part in parts:
                count[part] += 1
            start, *pieces = operands if params["started"] else [self.zero(type.dtype), *operands]
            adds = params["started"] or count.max() > 1
            everything = [] if count.min() and not adds else [(start, ())]
            everything += zip(pieces, parts, strict=True)
        else:
            raise _NotFusable
        made = self.new(type.dtype, type.shape, operands)
        for n, (source, index) in enumerate(everything):
            target = made.of(lambda x, index=index: x[(*index, ...)])
            self.copy(source.of(lambda x, shape=target.shape: np.broadcast_to(x, shape)), target, adds and n > 0)
        return made

    def zero(self, dtype: np.dtype) -> ArrayView:
        """Return a zero."""
        return self.number(np.zeros((), dtype))

    # ------------------------------------------------------------ products

    def product(self, x: ArrayView, y: ArrayView, out: Var) -> ArrayView:
        """Return a product of matrices, of vectors, or of stacks of matrices."""
        if out.type.dtype not in _KINDS:
            raise _NotFusable
        left = x if len(x.shape) > 1 else x.of(lambda a: a[None, :])
        right = y if len(y.shape) > 1 else y.of(lambda a: a[:, None])
        if len(left.shape) > 2 and len(right.shape) == 2:  # one product of all rows
            left = self.in_c_order(left).reshaped((math.prod(left.shape[:-1]), left.shape[-1]))
        stack = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        if math.prod(stack) > _LARGEST_STACK:
            raise _NotFusable
        left = left.of(lambda a: np.broadcast_to(a, (*stack, *a.shape[-2:])))
        right = right.of(lambda a: np.broadcast_to(a, (*stack, *a.shape[-2:])))
        rows, columns = left.shape[-2], right.shape[-1]
        if columns == 1 and rows > 1:  # a matrix times a vector: the rows of the result are one row of a product
            left, right = (v.of(lambda a: a.swapaxes(-1, -2)) for v in (right, left))
            rows, columns = columns, rows
        if right.strides[-1] != 1 and columns > 1:
            right = self.in_c_order(right)
        made = self.new(out.type.dtype, out.type.shape, [x, y])
        result = made.reshaped((*stack, rows, columns))
        for index in np.ndindex(*stack):
            a, b, c = (v.of(lambda array, index=index: array[(*index, ...)]) for v in (left, right, result))
            self.one_product(a, b, c)
        return made

    def one_product(self, a: ArrayView, b: ArrayView, c: ArrayView) -> None:
        """Append a product of two matrices."""
        (rows, inner), columns = a.shape, b.shape[1]
        large = inner * columns > _LARGEST_MATRIX if rows == 1 else rows * inner * columns > _LARGEST_PRODUCT
        if large:
            raise _NotFusable
        kernel = MatrixProduct(_KINDS[a.dtype], rows, inner, columns, (a.strides[0], a.strides[1]), b.strides[0])
        self.calls.append(KernelCall(kernel, [a, b], [c]))
