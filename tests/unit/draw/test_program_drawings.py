"""Drawings of programs and of bucket plans."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll as fc
from funccoll import P, draw
from funccoll.draw.scene import Arrows
from funccoll.errors import DrawingError
from tests.support.drawn_programs import boxes_of, training_step
from tests.support.oracles.drawing_checks import check_drawing

pytestmark = pytest.mark.covers("drawings")


def test_program_has_a_box_for_each_equation_and_an_arrow_for_each_value_read(mesh):
    from funccoll.core.ir import Var

    stage, _ = training_step(mesh)
    program = stage.program
    drawing = program.draw()
    check_drawing(drawing, validate=True)
    boxes = boxes_of(drawing)
    values = len(program.inputs) + len(program.constants) + len(program.outputs)
    assert len(boxes) == len(program.equations) + values
    assert boxes.fill.count("c1") == len(program.collectives()) > 1
    assert any("drawn_programs.py:" in hover for hover in boxes.hover)
    maker = {v: number for number, e in enumerate(program.equations) for v in e.outputs}
    maker.update({v: ~i for i, v in enumerate(program.inputs)})
    edges = {(maker[a], n) for n, e in enumerate(program.equations) for a in e.inputs if isinstance(a, Var)}
    (arrows,) = (m for m in drawing.scene.panels[0].marks if isinstance(m, Arrows))
    assert len(arrows) == len(edges) + sum(isinstance(a, Var) for a in program.outputs)
    assert all(b > a for a, b in zip(arrows.y0, arrows.y1, strict=True))
    places = list(zip(boxes.x0, boxes.x1, boxes.y0, strict=True))
    assert not any(a[2] == b[2] and a[0] < b[1] and b[0] < a[1] for i, a in enumerate(places) for b in places[:i])
    assert draw.program(stage).title == drawing.title


def test_a_loop_says_how_often_it_runs_and_what_it_communicates():
    line = fc.make_mesh({"data": 2})

    def fn(x):
        total, _ = fc.scan(lambda c, row: (c + fc.all_reduce(row, "data"), None), np.zeros(3), x)
        return fc.while_loop(lambda c: np.sum(c) < 9, lambda c: c * 2, total)

    drawing = fc.jit(fn, mesh=line, in_specs=P(None, "data"), out_specs=P()).lower(np.ones((5, 6))).program.draw()
    check_drawing(drawing)
    boxes = boxes_of(drawing)
    heads = {text.split("\n")[0]: fill for text, fill in zip(boxes.text, boxes.fill, strict=True)}
    assert heads["scan × 5: 1 collective"] == "c1"
    assert heads["while × ?"] == "band"


def test_large_programs_are_drawn_by_depth(mesh):
    stage, _ = training_step(mesh, 12)
    drawing = draw.program(stage)
    check_drawing(drawing)
    assert "equations: drawn by depth" in drawing.scene.notes[0]
    texts = boxes_of(drawing).text
    assert any(t.startswith(f"{len(stage.program.collectives())} × all_reduce over data") for t in texts)

    @fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def chain(x):
        for _ in range(40):
            x = fc.all_reduce(x * 1.5, "data", op="mean") * x
        return x

    drawing = chain.trace(np.ones(8)).program.draw()
    check_drawing(drawing)
    assert "in bands of 3 depths" in drawing.scene.notes[0]


def test_programs_without_collectives_or_equations(mesh):
    for function in (lambda x: x, lambda x: x + 1):
        traced = fc.jit(function, mesh=mesh, in_specs=P("data"), out_specs=P("data")).trace(np.ones(8))
        drawing = traced.program.draw()
        check_drawing(drawing)
        assert drawing.scene.notes == ("It has no collectives.",)
    with pytest.raises(DrawingError, match="draws a Program"):
        draw.program(3)  # pyright: ignore[reportArgumentType]


def test_buckets_have_a_bar_and_a_place_each(mesh):
    _, plan = training_step(mesh, 5)
    drawing = draw.buckets(plan)
    check_drawing(drawing, validate=True)
    bars, places = (drawing.scene.panels[i].marks for i in (0, 1))
    assert len(bars[0]) == len(plan.rows) > 1
    assert list(places[-1].x) == [row.starts for row in plan.rows]
    assert "predicted communication" in drawing.title and "5 arrays" not in str(bars[-1].text)
    _, many = training_step(mesh, 110)
    check_drawing(draw.buckets(many))
    assert "drawn as" in draw.buckets(many).scene.notes[0]
    with pytest.raises(DrawingError, match=r"data_parallel\(...\).explain"):
        draw.buckets(plan.rows)  # pyright: ignore[reportArgumentType]


def test_programs_name_the_groups_of_collectives():
    """Many of them are only counted; the summary form keeps those of other groups apart."""
    mesh = fc.make_mesh({"x": 24})
    few, many = [[*range(1, 24)], [0]], [[i, i + 12] for i in range(12)]

    def body(x, times=1):
        for _ in range(times):
            x = np.sin(fc.all_reduce(x, "x", groups=few[::-1]) + fc.inclusive_scan(x, "x", groups=many))
        return x

    for times, words in ((1, ("all_reduce", "inclusive_scan")), (13, ("1 × all_reduce", "1 × inclusive_scan"))):
        stage = fc.jit(lambda x, n=times: body(x, n), mesh=mesh, in_specs=P("x"), out_specs=P("x")).trace(np.ones(24))
        texts = " ".join(boxes_of(draw.program(stage)).text)
        assert f"{words[1]} {'sum ' * (times == 1)}over x in 12 groups" in texts
        assert f"{words[0]} {'sum ' * (times == 1)}over x in 2 groups" in texts
