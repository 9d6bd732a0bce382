"""Layered layout of a directed acyclic graph: layers, the order within each, positions, and routes of long edges.

Source: Sugiyama, Tagawa and Toda, IEEE Trans. Systems, Man and Cybernetics 11(2), 1981: longest-path layers, dummy nodes on
long edges, and sweeps that sort each layer by the means of its neighbours' places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .scene import isotonic

__all__ = ["Layout", "layered"]

_SWEEPS = 8
_GAP, _DUMMY = 0.16, 0.1
"""Inches between boxes; the width of a dummy node."""


@dataclass(frozen=True)
class Layout:
    """Positions of nodes in inches across and layers down. Routes have the points between an edge's ends."""

    x: list[float]
    layer: list[int]
    widths: list[float]
    width: float
    routes: dict[tuple[int, int], list[tuple[float, float]]]


def layered(reads: Sequence[Sequence[int]], widths: Sequence[float]) -> Layout:
    """Lay out nodes in boxes of the given widths. Each node reads earlier ones."""
    n = len(reads)
    layer = _layers(reads)
    below: list[list[int]] = [[] for _ in range(n)]  # nodes and dummies
    above: list[list[int]] = [[] for _ in range(n)]
    layers = list(layer)
    wide = list(widths)
    chains: dict[tuple[int, int], list[int]] = {}
    for target, sources in enumerate(reads):
        for source in dict.fromkeys(sources):
            chain = []
            last = source
            for level in range(layer[source] + 1, layer[target]):
                chain.append(len(layers))
                layers.append(level)
                wide.append(_DUMMY)
                below.append([])
                above.append([])
                below[last].append(chain[-1])
                above[chain[-1]].append(last)
                last = chain[-1]
            below[last].append(target)
            above[target].append(last)
            chains[source, target] = chain
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for node, level in enumerate(layers):
        rows[level].append(node)
    x = _positions(rows, above, below, wide)
    left = min((x[i] - wide[i] / 2 for i in range(len(x))), default=0.0)
    right = max((x[i] + wide[i] / 2 for i in range(len(x))), default=0.0)
    x = [v - left for v in x]
    routes = {edge: [(x[i], float(layers[i])) for i in chain] for edge, chain in chains.items()}
    return Layout(x[:n], layer, list(widths), right - left, routes)


def _layers(reads: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest path to each node. Nodes that read nothing stand just above the first node that reads them."""
    layer = [0] * len(reads)
    for node, sources in enumerate(reads):
        layer[node] = max((layer[s] + 1 for s in sources), default=0)
    first = [min((layer[t] for t, sources in enumerate(reads) if s in sources), default=1) for s in range(len(reads))]
    return [layer[s] if reads[s] else max(0, first[s] - 1) for s in range(len(reads))]


def _positions(rows: list[list[int]], above: list[list[int]], below: list[list[int]], wide: Sequence[float]) -> list[float]:
    """Return places across, in sweeps down and up: sorted by the mean of the neighbours, then as near to it as boxes allow."""
    x = [0.0] * len(wide)
    for row in rows:
        _place(row, [0.0] * len(row), wide, x)
    best, fewest = list(x), _crossings(rows, below, x)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else rows[::-1]:
            near = above if down else below
            wanted = {i: sum(x[k] for k in near[i]) / len(near[i]) if near[i] else x[i] for i in row}
            row.sort(key=lambda i: wanted[i])
            _place(row, [wanted[i] for i in row], wide, x)
        crossings = _crossings(rows, below, x)
        if crossings <= fewest:
            best, fewest = list(x), crossings
    for row in rows:
        row.sort(key=lambda i: best[i])
    for _ in range(_SWEEPS):  # keep the order, straighten long edges
        for row in rows:
            near = [[best[k] for k in (*above[i], *below[i])] or [best[i]] for i in row]
            _place(row, [sum(n) / len(n) for n in near], wide, best)
    return best


def _place(row: list[int], wanted: Sequence[float], wide: Sequence[float], x: list[float]) -> None:
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (wide[a] + wide[b]) / 2 + _GAP)
    flat = isotonic([w - o for w, o in zip(wanted, offsets, strict=False)])
    for node, value, offset in zip(row, flat, offsets, strict=False):  # an empty row has an offset, too
        x[node] = value + offset


def _crossings(rows: list[list[int]], below: list[list[int]], x: Sequence[float]) -> int:
    """Return the number of pairs of edges between neighbouring layers that cross."""
    count = 0
    for row in rows:
        edges = sorted((x[a], x[b]) for a in row for b in below[a])
        count += sum(edges[i][1] > edges[j][1] for i in range(len(edges)) for j in range(i + 1, len(edges)))
    return count
