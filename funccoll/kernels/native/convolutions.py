"""Kernels of convolutions, as small products of matrices on the examples where they lie.

Let the windows of a row of positions be the rows of a matrix, for one row of the window. They lie in the examples already: each
begins some channels behind the one before, and they overlap. BLAS does not take such a matrix, so NumPy's reference copies
windows. These kernels do not. A row of the result is the sum of the products of such matrices and parts of the convolution
kernel. A part of the gradient in the convolution kernel is the sum of products of their transposes and rows of the cotangent.

Sums are in the order of the window, then of the channels; in the gradient in the order of examples and positions. The text has
no other order on another processor (`products`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .counted_loops import CountedLoops
from .group import GroupKernel
from .ir_text import bytes_of
from .products import MatrixProduct, product_text

__all__ = ["Convolution", "convolution_kernel", "is_small"]

_LARGEST = 1 << 20
"""Bytes of a convolution kernel, which is read again for each row of positions: it should stay in the second-level cache. With
four times as much, BLAS is faster."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of padded examples (examples, *sizes, channels).

    - `kind`: "float" or "double".
    - `gives`: "result", from examples and the convolution kernel (*window, channels, outputs); or "gradient", which is added to
      an array of that shape, from examples and a cotangent (examples, *positions, outputs).
    """

    kind: str
    gives: str
    examples: int
    sizes: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    outputs: int
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the number of positions of the window along each dimension."""
        each = zip(self.sizes, self.window, self.strides, self.dilation, strict=True)
        return tuple((n - (k - 1) * d - 1) // s + 1 for n, k, s, d in each)


def is_small(convolution: Convolution) -> bool:
    """True if the kernel is faster than BLAS with copies of windows."""
    c = convolution
    return math.prod(c.window) * c.channels * c.outputs * bytes_of(c.kind) <= _LARGEST


def convolution_kernel(convolution: Convolution, level: str) -> GroupKernel:
    """Return the kernel for one of `machine_code.LEVELS`. It takes contiguous arrays, the last of which it writes."""
    c = convolution
    name = f"convolution_{hashlib.sha256(repr((c, level)).encode()).hexdigest()[:16]}"
    along = _distances(c.sizes, c.channels)  # of the examples
    of_result = _distances(c.positions, c.outputs)
    *outer, row = c.positions
    *window, last = c.window
    places = [*itertools.product(*map(range, window))]
    run = last * c.channels  # elements of a window that lie together
    if c.dilation[-1] > 1:
        places, run = [(*place, k) for place in places for k in range(last)], c.channels
    starts = [sum(k * d * n for k, d, n in zip(place, c.dilation, along[1:], strict=False)) for place in places]
    step = c.strides[-1] * c.channels

    first = MatrixProduct(c.kind, row, run, c.outputs, (step, 1), c.outputs)
    more = MatrixProduct(c.kind, row, run, c.outputs, (step, 1), c.outputs, adds=True)
    if c.gives == "gradient":
        first = more = MatrixProduct(c.kind, run, row, c.outputs, (1, step), c.outputs, adds=True)
    declarations: dict[str, str] = {}
    names = {}
    for product in dict.fromkeys((first, more)):
        names[product] = f"{name}_{'adds' if product.adds else 'begins'}"
        text, needed = product_text(names[product], product, level)
        declarations |= {**needed, names[product]: text}

    loops = CountedLoops()

    def at(base: str, terms: Sequence[tuple[str, int]]) -> str:
        return loops.place(c.kind, base, *terms)

    def row_of(indices: Sequence[str]) -> None:
        of_x = [(i, n * s) for i, n, s in zip(indices, along, (1, *c.strides), strict=False)]
        x, y = at("%i0", of_x), [*zip(indices, of_result, strict=False)]
        other = at("%o0" if c.gives == "result" else "%i1", y)
        for number, start in enumerate(starts):
            left, part = at(x, [(str(start), 1)]), [(str(number * run), c.outputs)]
            product = more if number else first
            if c.gives == "result":
                operands = [left, at("%i1", part), *([other] if product.adds else []), other]
            else:
                operands = [left, other, *[at("%o0", part)] * 2]
            loops.lines.append(f"  call void @{names[product]}({', '.join(f'ptr {p}' for p in operands)})")

    _nested(loops, (c.examples, *outer), row_of)
    definition = loops.function(name, "ptr %i0, ptr %i1, ptr %o0")
    cost = c.examples * math.prod(outer) * len(starts) * more.cost
    return GroupKernel(name, 2, 1, tuple(declarations.items()), definition, 0, frozenset(), cost)


def _distances(sizes: Sequence[int], elements: int) -> tuple[int, ...]:
    """Return the distances between examples, and along each dimension, in elements."""
    return tuple(math.prod(sizes[k:]) * elements for k in range(len(sizes) + 1))


def _nested(loops: CountedLoops, counts: Sequence[int], body: Callable[[Sequence[str]], None]) -> None:
    """Append nested loops. `body` takes the index of each."""

    def loop(indices: tuple[str, ...]) -> None:
        if len(indices) == len(counts):
            body(indices)
        else:
            loops.loop(counts[len(indices)], 1, lambda index, _: loop((*indices, index)))

    loop(())
