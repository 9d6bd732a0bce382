"""Drawings: what they show of the objects, in SVG, PNG and plotly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, draw
from funccoll.core.timeline import ACTIVITIES, Span, Timeline
from funccoll.draw.scene import Arrows, Boxes, Curve
from funccoll.draw.themes import series
from funccoll.errors import DrawingError, ScheduleError, ShardingError
from funccoll.schedules import Topology, algorithms, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.side_by_side import side_by_side
from tests.support.oracles.drawing_checks import arrows_between, check_drawing, moves_between

pytestmark = pytest.mark.covers("drawings")


def schedules(every, ranks):
    """All algorithms: each `every`-th case in `make test`, each algorithm on half of the numbers of ranks in the slow tests."""
    cases = [
        (kind, p, name, (i + j) % 2)
        for kind in KINDS
        for i, p in enumerate(ranks)
        for j, name in enumerate(algorithms(kind, p))
    ]
    marks = lambda number, odd: () if number % every == 0 else pytest.mark.exhaustive if odd else pytest.mark.slow
    return [
        pytest.param(kind, p, name, id=f"{kind}-{p}-{name}", marks=marks(number, odd))
        for number, (kind, p, name, odd) in enumerate(cases)
    ]


def built(kind, p, name, **options):
    pairs = [(r, (r + 1) % p) for r in range(p)] if kind == "permute" else []
    return build(kind, p, name, pairs=pairs, **options)


# ---------------------------------------------------------------- space-time diagrams


@pytest.mark.parametrize(("kind", "p", "name"), schedules(87, [2, 4, 5, 8, 16]))
def test_space_time_has_an_arrow_for_each_move_between_ranks(kind, p, name):
    schedule = built(kind, p, name)
    drawing = draw.space_time(schedule)
    check_drawing(drawing)
    drawn, moves = arrows_between(drawing.scene), moves_between(schedule)
    assert set(drawn) == set(moves)
    for where, count in moves.items():
        assert drawn[where] == (count if count <= 4 else 1), where


@pytest.mark.parametrize(
    ("kind", "name", "p"),
    [
        ("all_to_all", "direct", 32),
        ("broadcast", "binomial", 1024),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("all_reduce", "ring", 64), ("barrier", "dissemination", 100))
        ),
    ],
)
def test_many_ranks_are_drawn_in_a_stated_summary(kind, name, p):
    drawing = draw.space_time(built(kind, p, name))
    check_drawing(drawing)
    assert f"{p:,} ranks: drawn as" in drawing.scene.notes[0]
    (arrows,) = (m for m in drawing.scene.panels[0].marks if isinstance(m, Arrows))
    assert 0 < len(arrows) < 8000


def test_a_schedule_without_messages_says_so():
    for kind, name in (("barrier", "dissemination"), ("all_reduce", "ring")):
        drawing = draw.space_time(build(kind, 1, name))
        check_drawing(drawing)
        assert "Nothing moves between ranks." in drawing.scene.notes


def test_a_wrong_schedule_is_drawn_with_its_error(registered):
    @fc.schedules.algorithm("broadcast", name="of_tests_too_early")
    def too_early(p, root):
        yield fc.schedules.Move((1, "output", 0), (2, "scratch", 0))

    drawing = draw.space_time(build("broadcast", 4, "of_tests_too_early"))
    check_drawing(drawing)
    assert "The schedule is wrong" in drawing.scene.notes[0]
    assert sum(arrows_between(drawing.scene).values()) == 1


def test_colours_of_chunks_follow_the_data():
    """In a ring's all_gather every rank's block keeps its colour wherever it is sent from."""
    drawing = draw.space_time(build("all_gather", 4, "ring"))
    (arrows,) = (m for m in drawing.scene.panels[0].marks if isinstance(m, Arrows))
    for x0, y0, colour in zip(arrows.x0, arrows.y0, arrows.colour, strict=True):
        assert colour == series((round(y0) - int(x0)) % 4, 4)


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow if i % 6 else ()) for i, kind in enumerate(KINDS)])
def test_costs_of_every_collective(kind):
    pairs = kind in ("permute", "barrier")  # without pairs, or data, nothing takes time
    check_drawing(draw.costs(kind, 4, [64, 4096, 1 << 20]), validate=kind == "all_reduce")
    assert pairs or draw.costs(kind, 4, [64, 1 << 20]).scene.panels[0].marks


def test_costs_name_where_the_choice_changes():
    topology = Topology.ethernet(16)
    drawing = draw.costs("broadcast", topology, [256, 1 << 24])
    check_drawing(drawing)
    choice = next(n for n in drawing.scene.notes if n.startswith("Choice"))
    for before, after, nbytes in (("binomial", "scatter_allgather", "172.4 KiB"),):
        assert f"{before} → {after} at {nbytes}" in choice
    at = round(172.4 * 1024)
    chosen = [fc.schedules.select("broadcast", topology, n).algorithm for n in (round(at * 0.99), round(at * 1.01))]
    assert chosen == ["binomial", "scatter_allgather"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((("all_reduce", 4), {"sizes": [5]}), "at least two different numbers of bytes"),
        ((("all_reduce", 4), {"sizes": [0, 5]}), "at least two different numbers of bytes"),
        ((("all_reduce", 4), {"algorithms": ["rings"]}), "Did you mean 'ring'?"),
        ((("all_reduces", 4), {}), "Did you mean 'all_reduce'?"),
        ((("all_reduce", "four"), {}), "must be a Topology"),
        ((("all_reduce", 4), {"sizes": 1024}), "at least two different numbers of bytes"),
        ((("all_reduce", 4), {"algorithms": []}), "leaves nothing to draw"),
    ],
)
def test_bad_arguments_of_costs(arguments, words):
    with pytest.raises((DrawingError, ScheduleError)) as caught:
        draw.costs(*arguments[0], **arguments[1])
    assert words in str(caught.value)


# ---------------------------------------------------------------- shardings


@pytest.mark.parametrize(
    ("spec", "shape", "blocks"),
    [
        (P("data", "model"), (8, 4), 8),
        (P("data"), (8,), 4),
        (P(None, "model"), (8, 6, 5), 2),
        (P(("model", "data")), (16, 3), 8),
        (P(), (3, 2), 1),
        (P(), (), 1),
        (P("data"), (0, 3), 4),
        (P("data", None, "model"), (4, 5, 6), 8),
    ],
)
def test_sharding_shows_each_block_with_its_devices(mesh, spec, shape, blocks):
    sharding = fc.Sharding(mesh, spec)
    drawing = sharding.draw(shape)
    check_drawing(drawing)
    (boxes,) = (m for m in drawing.scene.panels[0].marks if isinstance(m, Boxes))
    assert len(boxes) == blocks
    devices = []
    for hover in boxes.hover:
        words = hover.split("\n")[1].replace("on devices ", "").replace("on device ", "")
        for part in words.split(", "):
            first, _, last = part.partition("–")
            devices += range(int(first), int(last or first) + 1)
    assert sorted(devices) == list(range(8))


def test_sharding_of_many_devices():
    mesh = fc.abstract_mesh({"data": 32, "model": 8})
    check_drawing(draw.sharding(fc.Sharding(mesh, P("data", "model")), (64, 64)))
    check_drawing(draw.sharding(fc.Sharding(mesh, P(("data", "model"))), (2048,)))


def test_blocks_of_several_sizes_are_drawn_to_scale(mesh):
    drawing = draw.sharding(fc.Sharding(mesh, P("data", "model")), (5, 7))
    check_drawing(drawing)
    panel = drawing.scene.panels[0]
    (boxes,) = (m for m in panel.marks if isinstance(m, Boxes))
    assert sorted({*zip(boxes.y0, boxes.y1, strict=True)}) == [(0, 1), (1, 2), (2, 2.5)]
    assert sorted({*zip(boxes.x0, boxes.x1, strict=True)}) == [(0, 1), (1, 1.75)]
    assert boxes.hover[-1] == "[4:5, 4:7]\non device 5" and len(boxes) == 6
    assert [[text for _, text in axis.ticks] for axis in (panel.y, panel.x)] == [["0", "2", "4", "5"], ["0", "4", "7"]]
    sizes = "The blocks of dimension 0 have the sizes 2, 2, 1, 0.", "The blocks of dimension 1 have the sizes 4, 3."
    assert drawing.scene.notes == (*sizes, "The blocks of devices 6, 7 are empty.")
    assert "blocks of at most [2, 4]" in drawing.scene.title


def test_bad_shardings(mesh):
    for bad, words in (((8, -1), "sizes of a global array"), ("abc", "sizes of a global array"), (4, "sizes of a global")):
        with pytest.raises(DrawingError, match=words):
            draw.sharding(fc.Sharding(mesh, P("data")), bad)
    with pytest.raises(DrawingError, match=r"draws an fc\.Sharding"):
        draw.sharding(P("data"), (8,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShardingError, match="Drop the entries"):
        draw.sharding(fc.Sharding(mesh, P("data", "model")), (7,))


# ---------------------------------------------------------------- timelines


def test_timelines_have_a_box_for_each_span():
    found = [build("all_reduce", 4, a).simulate(Topology.one_host(4), 1 << 16).timeline() for a in ("ring", "two_shot")]
    drawing = draw.timelines(*found)
    check_drawing(drawing)
    for timeline, panel in zip(found, drawing.scene.panels, strict=True):
        (boxes,) = panel.marks
        assert len(boxes) == len(timeline)
        assert sorted(zip(boxes.x0, boxes.x1)) == sorted(zip(timeline.start.tolist(), timeline.end.tolist()))
        assert panel.x == drawing.scene.panels[0].x


ACTIVITY = st.sampled_from(["wait", "move"])


@given(st.lists(st.tuples(st.integers(0, 199), st.floats(0, 9), st.floats(0, 1), ACTIVITY), min_size=1))
def test_the_summary_of_a_timeline_keeps_the_time_of_each_activity(rows):
    from funccoll.draw.lanes import Lanes
    from funccoll.draw.timeline_lanes import _BINS, _time_in_bins

    spans = [Span(rank, start, start + length, activity, -1, "x", "") for rank, start, length, activity in rows]
    timeline = Timeline.of("t", 200, spans)
    if timeline.seconds > 1e-6:
        bins = _time_in_bins(timeline, timeline.activity, len(ACTIVITIES), Lanes.of(200, 32)) * timeline.seconds / _BINS
        np.testing.assert_allclose(bins.sum(axis=(1, 2)), timeline.split.sum(axis=0), rtol=1e-6, atol=1e-9)


def test_timelines_of_many_ranks_and_of_nothing():
    many = build("broadcast", 256, "binomial").simulate(Topology.one_host(256), 1 << 20).timeline()
    drawing = many.draw()
    check_drawing(drawing)
    assert "256 ranks: drawn as 32 lanes of 8 ranks each." in drawing.scene.notes[0]
    check_drawing(draw.timelines(Timeline.of("nothing", 2, [])))
    for bad, words in (((), "none was given"), (("x",), "not str")):
        with pytest.raises(DrawingError, match=words):
            draw.timelines(*bad)


# ---------------------------------------------------------------- link matrices and chunk tables


@pytest.mark.parametrize(("kind", "p", "name"), schedules(41, [5, 16]))
def test_link_matrix_has_what_moves_between_each_two_ranks(kind, p, name):
    schedule = built(kind, p, name)
    drawing = draw.link_matrix(schedule)
    check_drawing(drawing)
    expected = np.zeros((p, p), int)
    for (_, source, destination, _), count in moves_between(schedule).items():
        expected[source, destination] += count
    drawn = np.zeros((p, p), int)
    for mark in drawing.scene.panels[0].marks:
        drawn += [[int(t or 0) for t in row] for row in mark.text]
        assert [[v > 0 for v in row] for row in mark.values] == (expected > 0).tolist()
    assert (drawn == expected).all()


def test_link_matrix_in_bytes_and_of_many_ranks():
    schedule = build("all_reduce", 4, "ring")
    (cells,) = draw.link_matrix(schedule, 4096).scene.panels[0].marks
    assert cells.text[0] == ["", "6 KiB", "", ""] and "6,144 bytes" in cells.hover[0][1]  # 6 chunks of 1 KiB
    with pytest.raises(ScheduleError, match="nbytes=0"):
        draw.link_matrix(schedule, 0)
    many = draw.link_matrix(build("broadcast", 1024, "binomial"))
    check_drawing(many)
    assert "1,024 ranks: drawn as 32 lanes of 32 ranks each." in many.scene.notes
    assert "1,023 chunks in all" in many.scene.notes[1]
    assert "No bytes move between ranks." in draw.link_matrix(build("barrier", 4), 0).scene.notes


@pytest.mark.parametrize(("kind", "p", "name"), schedules(41, [4, 8]))
def test_chunk_table_ends_with_the_postcondition(kind, p, name):
    schedule = built(kind, p, name)
    drawing = draw.chunk_table(schedule)
    scene = drawing.scene
    check_drawing(drawing)
    few = schedule.collective.output_chunks > 16
    assert len(scene.steps) == len(scene.panels) == (9 if few else schedule.nrounds + 1)
    assert scene.shown[0] == 0 and scene.shown[-1] == len(scene.panels) - 1
    (first,), (last,) = (scene.panels[i].marks for i in (0, -1))
    has = schedule.collective.has_output(np.arange(p))
    for i, row in enumerate(last.values):
        assert all(v == 1.0 if has[i] else v is None for v in row), (i, row)
    assert all(not v for row in first.values for v in row)


def test_chunk_table_names_contributions():
    *_, last = draw.chunk_table(build("all_reduce", 4, "ring")).scene.panels[3:4]
    (cells,) = last.marks
    assert cells.text[0] == ["all", "2–0", "3–0", ""]
    assert cells.hover[0][2] == "rank 0, chunk 2: x0[2] + x3[2]"
    (cells,) = draw.chunk_table(build("all_to_all", 4, "direct")).scene.panels[-1].marks
    assert [list(row) for row in cells.text] == [[f"{s}→{d}" for s in range(4)] for d in range(4)]


GROUPS = ((3, 0, 5), (1,), (4, 2))


def of_groups(kind, name, groups=GROUPS):
    return side_by_side(tuple(build(kind, len(group), name) for group in groups), groups)


def test_groups_stand_one_after_the_other():
    """Arrows stay between the lines of their group, whose ranks are in its order."""
    schedule = of_groups("all_reduce", "ring")
    for function in (draw.space_time, draw.link_matrix, draw.chunk_table):
        drawing = function(schedule)
        check_drawing(drawing, validate=function is draw.chunk_table)
        panel = drawing.scene.panels[-1]
        assert [text for _, text in panel.y.ticks] == ["3", "0", "5", "1", "4", "2"]
        assert "between groups" in [entry.text for entry in drawing.scene.legend]
        lines = [m for m in panel.marks if isinstance(m, Curve) and m.dash]
        assert [v for v in lines[0].y if v == v] == [2.5, 2.5, 3.5, 3.5]
    drawn = arrows_between(draw.space_time(schedule).scene)
    lane = {rank: i for i, rank in enumerate([3, 0, 5, 1, 4, 2])}
    moves = {(r, lane[source], lane[to], combines) for r, source, to, combines in moves_between(schedule)}
    assert set(drawn) == moves and all((a < 3) == (b < 3) for _, a, b, _ in drawn)
    (cells, _, _) = draw.link_matrix(schedule).scene.panels[0].marks
    assert [[text for text in row if text] for row in cells.text] == [["8"], ["8"], ["8"], [], ["6"], ["6"]]


def test_cells_of_groups_are_about_the_ranks_own_group():
    _, first, *_, last = [panel.marks[0] for panel in draw.chunk_table(of_groups("all_reduce", "ring")).scene.panels]
    assert first.text[0][2] == "3,5" and first.values[0][2] == 2 / 3 and first.hover[0][2].startswith("rank 3, chunk 2: ")
    assert [row[0] for row in last.text] == ["all", "all", "all", "1", "all", "all"]
    assert {value for row in last.values for value in row} == {1.0}
    cells, _ = draw.chunk_table(of_groups("broadcast", "binomial")).scene.panels[-1].marks
    assert [row[0] for row in cells.text] == ["3", "3", "3", "1", "4", "4"]
    cells, _ = draw.chunk_table(of_groups("exclusive_scan", "kogge_stone")).scene.panels[-1].marks
    assert [row[0] for row in cells.text] == ["", "3", "3,0", "", "", "4"]


def test_many_groups_are_counted():
    groups = tuple([tuple(range(i, i + 3)) for i in range(0, 36, 3)] + [(36, 37, 38, 39)])
    drawing = draw.space_time(of_groups("all_reduce", "ring", groups))
    check_drawing(drawing)
    assert drawing.scene.title.startswith("all_reduce on 40 ranks in 13 groups: ring")


def test_chunk_table_of_many_ranks_and_of_a_wrong_schedule(registered):
    drawing = draw.chunk_table(build("all_reduce", 64, "recursive_doubling"))
    check_drawing(drawing)
    assert drawing.scene.notes[0] == "64 ranks: drawn as 16 lanes of 4 ranks each."

    @fc.schedules.algorithm("broadcast", name="of_tests_race")
    def race(p, root):
        yield fc.schedules.Move((1, "output", 0), (0, "input", 0))
        yield [fc.schedules.Move((2, "output", 0), (r, "input", 0)) for r in (0, 0)]

    wrong = draw.chunk_table(build("broadcast", 4, "of_tests_race"))
    check_drawing(wrong)
    assert len(wrong.scene.steps) == 2 and any("race" in note for note in wrong.scene.notes)


# ---------------------------------------------------------------- many ranks


def test_costs_between_sizes_are_those_of_the_model():
    """Interpolation is exact: the cost of a schedule is a convex, piecewise linear function of the size."""
    from funccoll.draw.cost_curves import _Line

    topology = Topology.nvlink_infiniband(4, 4)
    for kind, name in (("all_reduce", "ring"), ("broadcast", "pipelined_chain"), ("all_reduce", "hierarchical")):
        schedule = build(kind, 16, name, levels=(4, 4) if name == "hierarchical" else None)
        line = _Line(schedule, topology, 64, 1 << 28)
        for nbytes in np.geomspace(64, 1 << 28, 60).astype(int).tolist():
            assert line.at(nbytes) == pytest.approx(schedule.cost(topology, nbytes).seconds, rel=1e-6)
        assert len(line._known) < 40


@pytest.mark.slow
def test_costs_of_many_ranks_choose_as_select_does():
    drawing = draw.costs("broadcast", Topology.ethernet(300), [1024, 1 << 16, 1 << 20])
    check_drawing(drawing)
    curves = drawing.scene.panels[0].marks
    chosen = {m.hover[0].split(",")[0] for m in curves if getattr(m, "width", 0) == 3.6}
    assert fc.schedules.select("broadcast", Topology.ethernet(300), 1024).algorithm in chosen


@pytest.mark.parametrize(
    ("kind", "name", "p"),
    [
        ("reduce", "binomial", 64),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("all_reduce", "rabenseifner", 32),
                ("all_gather", "bruck", 40),
                ("all_to_all", "bruck", 24),
                ("broadcast", "scatter_allgather", 32),
            )
        ),
    ],
)
def test_chunk_tables_in_groups_agree_with_the_proof(kind, name, p):
    """Counted contributions are the proof's."""
    from funccoll.draw.chunk_steps import _Counts
    from funccoll.schedules.proof.symbolic import SymbolicExecutor

    schedule = build(kind, p, name)
    counts, executor = _Counts(schedule.places), SymbolicExecutor(schedule.places, name)
    for number in range(schedule.nrounds):
        batches = [b for b in schedule.batches if b.round == number]
        counts.round(batches)
        executor.round(batches)
        written = executor.holds >= 0
        np.testing.assert_array_equal(counts.holds >= 0, written)
        ids = executor.holds[written]
        np.testing.assert_array_equal(counts.count[written], executor.expressions.nranks(ids))
        np.testing.assert_array_equal(counts.holds[written] // p, executor.expressions.labels(ids))
    drawing = draw.chunk_table(schedule)
    check_drawing(drawing)
    (last,) = drawing.scene.panels[-1].marks
    assert {v for row in last.values for v in row} <= {1.0, None}
