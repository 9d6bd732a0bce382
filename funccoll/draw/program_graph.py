"""Programs as layered graphs of equations (Sugiyama, Tagawa and Toda, IEEE Trans. SMC 11(2), 1981), collectives emphasised."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.display import size_text
from ..core.ir import Atom, Equation, Program, Var
from ..core.mesh import shown_groups
from ..errors import DrawingError
from .drawing import Drawing
from .graph_layout import Layout, layered
from .scene import Arrows, Axis, Boxes, Curve, LegendEntry, Mark, Panel, Scene

__all__ = ["program"]

_EQUATIONS, _WIDE = 48, 11.5
"""The most equations that are drawn one by one, and the widest graph of them, in inches."""
_BANDS = 16
"""The most depths that are drawn one by one in the summary form."""
_LONG = 48
"""The most characters of groups in a box."""
_COLOURS = {
    "collective": "c1",
    "effect": "c1",
    "compute": "band",
    "local": "tc5",
    "higher": "band",
    "fence": "band",
    "value": "surface",
}


@dataclass
class _GraphNode:
    text: str
    hover: str
    kind: str
    reads: dict[int, str] = field(default_factory=dict)
    """Nodes that it reads, with the names of the values."""
    scope: str = ""
    """The outermost named scope of its equations."""


def program(program: Program, *, theme: str | None = None) -> Drawing:
    """Draw a program as a graph: equations as boxes, from the inputs above to the outputs below, with collectives emphasised.

    Named scopes have colours. The hover text has the equation and its file:line. A program of more than 48 equations, or a very
    wide one, is drawn by depth: the equations between the same collectives are one box, and the drawing says so.

    Args:
        program: A Program, or a stage with a `.program`, such as `fn.trace(...)`.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `program` is neither.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> step = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(fc.draw.program(step.trace(np.ones(4))))
        <Drawing: Program <lambda> on mesh(data=2): 1 equation, 1 collective; .save("drawing.svg") writes it>
    """
    found = getattr(program, "program", program)
    if not isinstance(found, Program):
        raise DrawingError(f"program() draws a Program, such as fn.trace(...).program, not {type(program).__name__}.")
    count, collectives = len(found.equations), len(found.collectives())
    mesh = ", ".join(f"{n}={s}" for n, s in found.axis_sizes.items())
    title = f"Program {found.label} on mesh({mesh}): {_plural(count, 'equation')}, {_plural(collectives, 'collective')}"
    notes = [] if collectives else ["It has no collectives."]
    if count <= _EQUATIONS:
        nodes = _single(found)
        layout = _placed(nodes)
        if layout.width <= _WIDE:
            return Drawing(_scene(title, notes, nodes, layout), theme)
    nodes, note = _summary(found)
    return Drawing(_scene(title, [*notes, note], nodes, _placed(nodes)), theme)


def _plural(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' if n != 1 else ''}"


def _single(program: Program) -> list[_GraphNode]:
    """Return a node for each input that is read, each equation, and each output."""
    names = program.names
    nodes: list[_GraphNode] = []
    maker: dict[Var, int] = {}
    for what, variables in (("constant", [v for v, _ in program.constants]), ("input", program.inputs)):
        for var in variables:
            maker[var] = len(nodes)
            nodes.append(_GraphNode(f"{what} {names[var]}\n{var.type}", f"{what} {names[var]}: {var.type}", "value"))
    for eqn in program.equations:
        kind = "collective" if eqn.bodies and eqn.communicates else eqn.primitive.kind
        node = _GraphNode(_text(eqn), _hover(eqn, program), kind, scope=_scope(eqn))
        for atom in eqn.inputs:
            if isinstance(atom, Var):
                node.reads[maker[atom]] = ", ".join(filter(None, [node.reads.get(maker[atom], ""), names[atom]]))
        maker.update(dict.fromkeys(eqn.outputs, len(nodes)))
        nodes.append(node)
    for number, atom in enumerate(program.outputs):
        shown = names[atom] if isinstance(atom, Var) else repr(atom)
        nodes.append(_GraphNode(f"output {number}\n{atom.type}", f"output {number}: {shown}:{atom.type}", "value"))
        if isinstance(atom, Var):
            nodes[-1].reads[maker[atom]] = shown
    return nodes


def _scope(eqn: Equation) -> str:
    return eqn.source.scope.partition("/")[0] if eqn.source else ""


def _text(eqn: Equation) -> str:
    """Return the primitive, its axes if it communicates, and the type of the first output.

    A loop has its number of iterations.
    """
    head = eqn.primitive.name
    if eqn.bodies:
        head += "" if eqn.times == 1 else f" × {'?' if eqn.times is None else f'{eqn.times:,}'}"
        inside = sum(e.primitive.communicates for body in eqn.bodies.values() for e, _ in body.executed())
        head += f": {_plural(inside, 'collective')}" if inside else ""
    if eqn.primitive.communicates:
        op = eqn.params.get("op")
        head += f" {op}" if isinstance(op, str) else ""
        head += f" {_over(eqn)}" if eqn.axes() else ""
    more = f" (+{len(eqn.outputs) - 1})" if len(eqn.outputs) > 1 else ""
    return f"{head}\n{eqn.outputs[0].type}{more}" if eqn.outputs else head


def _over(eqn: Equation) -> str:
    """Return the axes of a collective, and its groups along them; many groups are only counted."""
    groups = eqn.params.get("groups", ())
    shown = shown_groups(groups)
    among = f" in {shown if len(shown) <= _LONG else f'{len(groups)} groups'}" if groups else ""
    return f"over {', '.join(eqn.axes())}{among}"


def _hover(eqn: Equation, program: Program) -> str:
    names = program.names

    def used(atom: Atom) -> str:
        return names[atom] if isinstance(atom, Var) else repr(atom)

    left = " ".join(f"{names[v]}:{v.type}" for v in eqn.outputs) or "_"
    params = ", ".join(f"{k}={v!r:.40}" for k, v in sorted(eqn.params.items()) if isinstance(v, (str, int, float, tuple)))
    line = f"{left} = {eqn.primitive.name}{f'[{params}]' if params else ''} {' '.join(map(used, eqn.inputs))}"
    return f"{line[:160]}{'…' if len(line) > 160 else ''}" + (f"\n{eqn.source}" if eqn.source else "")


# ---------------------------------------------------------------- the summary form


def _summary(program: Program) -> tuple[list[_GraphNode], str]:
    """Return nodes by depth, and the sentence about it.

    The depth is the number of collectives on the longest chain before an equation.
    """
    depth: dict[Var, int] = {}
    at: list[int] = []
    for eqn in program.equations:
        before = max((depth.get(a, 0) for a in eqn.inputs if isinstance(a, Var)), default=0)
        at.append(before)
        depth.update(dict.fromkeys(eqn.outputs, before + eqn.primitive.communicates))
    every = -(-(max(at, default=0) + 1) // _BANDS)
    groups: defaultdict[Any, list[Equation]] = defaultdict(list)
    key_of: dict[Var, Any] = dict.fromkeys((*[v for v, _ in program.constants], *program.inputs), "inputs")
    reads: defaultdict[Any, set[Any]] = defaultdict(set)
    runs = _runs(program, [d // every for d in at])
    for eqn, d, run in zip(program.equations, at, runs, strict=True):
        what = (eqn.primitive.name, _over(eqn)) if eqn.primitive.communicates and every == 1 else ("", "")
        key = (d // every, bool(what[0]), *what, 0 if what[0] else run)
        groups[key].append(eqn)
        reads[key] |= {key_of[a] for a in eqn.inputs if isinstance(a, Var)} - {key}
        key_of.update(dict.fromkeys(eqn.outputs, key))
    inputs = _plural(len(program.inputs) + len(program.constants), "input")
    nodes = [_GraphNode(inputs, inputs, "value")]
    number: dict[Any, int] = {"inputs": 0}
    for key in sorted(groups):
        number[key] = len(nodes)
        node = _group(groups[key], key, every)
        node.reads = dict.fromkeys((number[k] for k in sorted(reads[key], key=lambda k: number[k])), "")
        nodes.append(node)
    outputs = _plural(len(program.outputs), "output")
    nodes.append(_GraphNode(outputs, outputs, "value"))
    nodes[-1].reads = dict.fromkeys((number[key_of[a]] for a in program.outputs if isinstance(a, Var)), "")
    band = f", in bands of {every} depths" if every > 1 else ""
    scopes = ", and the same named scope" if any(runs) else ""
    note = (
        f"{len(program.equations):,} equations: drawn by depth{band}. A box holds the equations that have the same number of "
        f"collectives on the longest chain before them{scopes}."
    )
    return nodes, note


def _runs(program: Program, bands: Sequence[int]) -> list[int]:
    """Return, by equation, how often the named scope has changed in its band.

    Only neighbours share a box, so no box needs itself. Without scopes, and if that would be too many boxes, all are 0.
    """
    last: dict[int, tuple[str, int]] = {}
    found = []
    for eqn, band in zip(program.equations, bands, strict=True):
        scope, run = last.get(band, (_scope(eqn), 0))
        last[band] = _scope(eqn), run + (scope != _scope(eqn))
        found.append(last[band][1])
    return found if len({*zip(bands, found, strict=True)}) <= _EQUATIONS else [0] * len(found)


def _group(eqns: Sequence[Equation], key: Any, every: int) -> _GraphNode:
    counts = Counter(e.primitive.name for e in eqns).most_common()
    lines = sorted({str(e.source) for e in eqns if e.source})
    hover = f"{', '.join(f'{n} ×{c}' for n, c in counts[:12])}\n" + "\n".join(lines[:6])
    hover += f"\n… and {len(lines) - 6} more lines" if len(lines) > 6 else ""
    if key[1]:
        nbytes = sum(a.type.nbytes for e in eqns for a in e.inputs)
        return _GraphNode(f"{len(eqns)} × {key[2]} {key[3]}\n{size_text(nbytes)} a device", hover, "collective")
    head, scopes = _plural(len(eqns), "equation"), {_scope(e) for e in eqns}
    scope = scopes.pop() if len(scopes) == 1 else ""
    head = f"{scope}: {head}" if scope else head
    if every > 1:
        among = sum(e.primitive.communicates for e in eqns)
        depths = f"depths {key[0] * every}–{(key[0] + 1) * every - 1}"
        text = f"{depths}: {head}\n{_plural(among, 'collective')} among them"
        return _GraphNode(text, hover, "collective" if among else "compute", scope=scope)
    most = ", ".join(f"{n} ×{c}" if c > 1 else n for n, c in counts[:3])
    return _GraphNode(f"{head}\n{most}{', …' if len(counts) > 3 else ''}", hover, "compute", scope=scope)


# ---------------------------------------------------------------- the picture


def _placed(nodes: Sequence[_GraphNode]) -> Layout:
    widths = [0.24 + max(len(line) for line in n.text.split("\n")) * 0.067 for n in nodes]
    return layered([list(n.reads) for n in nodes], widths)


_COMPUTE = "compute", "higher", "fence"
_OF_SCOPES = "tc0", "tc3", "tc2", "tc4", "tc6"
"""Colours of computing in named scopes, for as many of them."""


def _scope_colours(nodes: Sequence[_GraphNode]) -> dict[str, str]:
    """Return colours of the named scopes with most boxes, in the order of the program."""
    counts = Counter(n.scope for n in nodes if n.scope and n.kind in _COMPUTE)
    most = [scope for scope, _ in counts.most_common(len(_OF_SCOPES))]
    return dict(zip([scope for scope in counts if scope in most], _OF_SCOPES, strict=False))


_PITCH, _TALL = 0.66, 0.38
"""Inches from layer to layer, and of a box."""


def _scene(title: str, notes: Sequence[str], nodes: Sequence[_GraphNode], layout: Layout) -> Scene:
    boxes, scopes = [], _scope_colours(nodes)
    for n, x, y, wide in zip(nodes, layout.x, layout.layer, layout.widths, strict=True):
        top = y * _PITCH
        fill = scopes.get(n.scope, "band") if n.kind in _COMPUTE else _COLOURS.get(n.kind, "band")
        boxes.append((x - wide / 2, x + wide / 2, top - _TALL / 2, top + _TALL / 2, fill, n.hover, n.text))
    paths: dict[str, tuple[list[float], list[float]]] = {}
    arrows = []
    for (source, target), via in layout.routes.items():
        xs = [layout.x[source], *(x for x, _ in via), layout.x[target]]
        begin, end = layout.layer[source] * _PITCH + _TALL / 2, layout.layer[target] * _PITCH - _TALL / 2
        ys = [begin, *(y * _PITCH for _, y in via), end]
        colour = "c1" if nodes[source].kind in ("collective", "effect") else "muted"
        if via:
            path_x, path_y = paths.setdefault(colour, ([], []))
            path_x += [*xs[:-1], math.nan]
            path_y += [*ys[:-1], math.nan]
        name = nodes[target].reads[source]
        arrows.append((xs[-2], ys[-2], xs[-1], ys[-1], colour, False, 1.0, name))
    marks: list[Mark] = [Curve(*paths[colour], colour, 1.0) for colour in sorted(paths, reverse=True)]
    marks += [Arrows.of(arrows), Boxes.of(boxes, "muted")]
    width = max(layout.width, 3.0)
    rows = max(layout.layer, default=0)
    x = Axis((layout.width - width) / 2 - 0.02, (layout.width + width) / 2 + 0.02)
    y = Axis(-0.3, rows * _PITCH + 0.3, reversed=True)
    kinds = {n.kind for n in nodes}
    legend = [LegendEntry("inputs and outputs", "grid")] if "value" in kinds else []
    plain = any(n.kind in _COMPUTE and n.scope not in scopes for n in nodes)
    legend += [LegendEntry("compute", "band")] if plain else []
    legend += [LegendEntry(f"compute: {scope}", colour) for scope, colour in scopes.items()]
    legend += [LegendEntry("depends on the device, moves nothing", "tc5")] if "local" in kinds else []
    legend += [LegendEntry("collective", "c1")] if kinds & {"collective", "effect"} else []
    return Scene(title, (Panel(x, y, tuple(marks), width, (rows * _PITCH + 0.6)),), tuple(notes), tuple(legend))
