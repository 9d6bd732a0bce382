"""Files, views in notebooks and themes of drawings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, draw
from funccoll.core.timeline import Span, Timeline
from funccoll.draw.page_layout import wrapped
from funccoll.draw.scene import spread
from funccoll.draw.themes import LEAST_CONTRAST, THEMES, contrast, find_theme, series
from funccoll.errors import DrawingError, FunccollError, MissingPackageError
from funccoll.schedules import Topology, build
from tests.support.drawn_programs import boxes_of, training_step
from tests.support.oracles.drawing_checks import check_drawing, pairs_apart

pytestmark = pytest.mark.covers("drawings")

# ---------------------------------------------------------------- files, notebooks, themes


def test_files_are_the_same_bytes_each_time_whatever_the_user_has_set(tmp_path):
    code = """
import sys, matplotlib as m
m.rcParams.update({"font.size": 30, "lines.linewidth": 9, "svg.fonttype": "none"})
settings = lambda: {k: dict.__getitem__(m.rcParams, k) for k in m.rcParams}  # rcParams[k] imports pyplot
before = settings()
from funccoll import draw, schedules
drawing = draw.space_time(schedules.build("all_reduce", 4, "ring"))
drawing.save("b.svg")
drawing.save("b.png")
assert settings() == before and "matplotlib.pyplot" not in sys.modules and "plotly" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    for suffix in (".svg", ".png"):
        draw.space_time(build("all_reduce", 4, "ring")).save(tmp_path / f"a{suffix}")
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix in (".svg", ".png") or p.name[0] == ".") == [
        "a.png",
        "a.svg",
        "b.png",
        "b.svg",
    ]


def test_an_unknown_suffix_says_what_exists(tmp_path):
    drawing = build("all_reduce", 2, "ring").draw()
    with pytest.raises(DrawingError, match=r"saved as \.svg or \.png.*to_plotly"):
        drawing.save(tmp_path / "x.pdf")
    with pytest.raises(FileNotFoundError):
        drawing.save(tmp_path / "missing" / "x.svg")
    assert list(tmp_path.iterdir()) == []


def test_what_a_notebook_gets_is_small_and_has_no_script():
    bundle = build("all_reduce", 16, "ring").draw()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "application/vnd.plotly.v1+json", "image/png"}
    title = "all_reduce on 16 ranks: ring, 30 rounds, 16 chunks per block"
    assert bundle["text/plain"] == f'<Drawing: {title}; .save("drawing.svg") writes it>'
    text = json.dumps(bundle)
    assert len(text) < 250_000  # 480 arrows
    figure = json.dumps(bundle["application/vnd.plotly.v1+json"])
    assert "http" not in figure and "<script" not in figure and "/tests/" not in figure
    few = json.dumps(build("all_reduce", 8, "recursive_doubling").draw()._repr_mimebundle_())
    assert len(few) < 60_000


NEEDED = "fc.draw needs {} for this: pip install 'funccoll[draw]'."


def test_a_missing_matplotlib_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['matplotlib'] = None\nfrom funccoll import schedules\n"
        "d = schedules.build('all_reduce', 2, 'ring').draw(); print(sorted(d._repr_mimebundle_()))\nd.to_svg()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert f"MissingPackageError: {NEEDED.format('matplotlib')}" in done.stderr
    assert "image/png" not in done.stdout and "plotly.v1" in done.stdout


def test_a_missing_plotly_is_named_with_its_extra(monkeypatch):
    for name in ("plotly", "plotly.graph_objects"):
        monkeypatch.setitem(sys.modules, name, None)
    drawing = build("all_reduce", 2, "ring").draw()
    with pytest.raises(MissingPackageError, match=re.escape(NEEDED.format("plotly"))):
        drawing.to_plotly()
    assert set(drawing._repr_mimebundle_()) == {"text/plain", "application/vnd.plotly.v1+json", "image/png"}


def test_long_titles_stay_on_the_page():
    spans = [Span(0, 0.0, 1.0, "wait", 1, "a $x_1$ <b>", "f.py:3")]
    check_drawing(draw.timelines(*(Timeline.of(title, 2, spans) for title in ("word " * 60, "nospace" * 40))))
    check_drawing(draw.costs("all_gather", Topology.ethernet(3), [1000, 1001]))


@pytest.mark.parametrize("function", [draw.space_time, draw.link_matrix, draw.chunk_table])
def test_drawings_of_schedules_take_schedules_only(function):
    with pytest.raises(DrawingError, match=rf"{function.__name__}\(\) draws a Schedule, not str"):
        function("ring")


@pytest.mark.parametrize(
    ("function", "algorithm", "options"),
    [
        (draw.space_time, "ring", {"channels": 2}),
        (draw.chunk_table, "hierarchical", {"levels": (2, 2)}),
        (draw.link_matrix, "hierarchical", {"levels": (2, 2)}),
        *(
            pytest.param(function, algorithm, options, marks=pytest.mark.slow)
            for function, algorithm, options in (
                (draw.space_time, "hierarchical", {"levels": (2, 2)}),
                (draw.chunk_table, "ring", {"channels": 2}),
                (draw.link_matrix, "ring", {"channels": 2}),
            )
        ),
    ],
)
def test_drawings_of_channels_and_levels(function, algorithm, options):
    check_drawing(function(build("all_reduce", 4, algorithm, **options)))


def test_threads_draw_the_same(tmp_path):
    import threading

    drawing = build("all_reduce", 4, "ring").draw()
    threads = [threading.Thread(target=drawing.save, args=(tmp_path / f"{i}.svg",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.read_text() for path in tmp_path.iterdir()} == {drawing.to_svg()}


def test_themes(monkeypatch):
    schedule = build("all_reduce", 2, "ring")
    assert THEMES["dark"].surface in schedule.draw(theme="dark").to_svg()
    monkeypatch.setenv("FUNCCOLL_THEME", "dark")
    assert find_theme() is THEMES["dark"] and find_theme("light") is THEMES["light"]
    monkeypatch.setenv("FUNCCOLL_THEME", "darkk")
    with pytest.raises(DrawingError, match=r"unknown FUNCCOLL_THEME='darkk'. Did you mean 'dark'\?"):
        schedule.draw().to_svg()
    with pytest.raises(DrawingError, match="unknown theme='blue'"):
        schedule.draw(theme="blue")


def test_neighbours_in_a_palette_are_told_apart():
    for theme in THEMES.values():
        colours = [theme.colour(series(i, 8)) for i in range(8)]
        assert len(set(colours)) == 8
        assert all(contrast(c, theme.surface) >= 2 for c in colours)
        ramp = [theme.colour(f"r{i / 31}") for i in range(32)]
        assert len(set(ramp)) == 32
        for fill in (*colours, *ramp):
            assert contrast(max(("#000000", "#ffffff"), key=lambda t: contrast(t, fill)), fill) >= LEAST_CONTRAST


def test_an_unknown_drawing_of_a_schedule_says_what_exists():
    with pytest.raises(DrawingError, match=r"unknown drawing 'spacetime'.*Did you mean 'space_time'\?"):
        build("all_reduce", 2, "ring").draw("spacetime")
    assert issubclass(DrawingError, (FunccollError, ValueError))


@given(st.lists(st.floats(-5, 5), max_size=12), st.floats(0.01, 2))
def test_spread_moves_labels_apart_within_the_limits(wanted, apart):
    placed = spread(wanted, apart, -6, 6)
    assert all(-6 - 1e-9 <= x <= 6 + 1e-9 for x in placed)
    assert pairs_apart(placed, min(apart, 12 / max(1, len(wanted) - 1)))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [placed[i] for i in order] == sorted(placed)


# ---------------------------------------------------------------- views in notebooks


def test_a_schedule_is_shown_as_a_table_with_its_picture_where_that_is_small():
    for p, name, picture in ((4, "ring", True), (8, "ring", False), (8, "two_shot", True), (16, "ring", False)):
        html = build("all_reduce", p, name)._repr_html_()
        assert ("<svg" in html) == picture and name in html and "chunks per block" in html
        assert len(html) < 62_000 and "<?xml" not in html and "<script" not in html
    assert html == build("all_reduce", 16, "ring")._repr_html_()


def test_views_of_everything_that_a_notebook_shows(mesh):
    """Every object of the user's has a view in HTML, whose tags are balanced, with its texts escaped."""
    from html.parser import HTMLParser

    schedule = build("all_reduce", 4, "ring")
    topology = Topology.one_host(4)
    stage, plan = training_step(mesh)
    views = [
        mesh,
        fc.device_put(np.arange(8.0), mesh, P("data")),
        stage.program,
        stage,
        stage.lower().collectives(),
        schedule,
        topology,
        schedule.cost(topology, 4096),
        fc.schedules.explain("all_reduce", 4, 4096),
        schedule.simulate(topology, 4096),
        schedule.simulate(topology, 4096).timeline(),
        plan,
    ]
    for thing in views:
        html = thing._repr_html_()
        depth: list[str] = []

        class Tags(HTMLParser):
            def handle_starttag(self, tag, attrs):
                if tag not in ("br", "img"):
                    depth.append(tag)

            def handle_endtag(self, tag):
                assert depth.pop() == tag

        Tags().feed(html)
        assert not depth and len(html) > 40, type(thing)
        assert "script" not in html


def test_a_span_that_is_too_short_to_be_seen_has_an_outline_of_its_colour():
    times = (0, 0.0, 0.5, "wait"), (0, 0.5, 0.500001, "move"), (1, 0.1, 1.0, "wait")
    spans = [Span(*row, -1, "a", "") for row in times]
    for chosen, edge in ((spans, "fill"), (spans[::2], "surface")):
        drawing = Timeline.of("t", 2, chosen).draw()
        check_drawing(drawing)
        boxes = boxes_of(drawing)
        assert boxes.edge == edge and list(boxes.fill)[-1] == ("c0" if edge == "fill" else "grid")
    assert "stroke: #0072b2" in Timeline.of("t", 2, spans).draw().to_svg()


def test_long_words_are_broken_behind_their_marks():
    place = "at /home/me/project/models/transformer_block.py:12 in reduce_scatter_of_gradients"
    assert wrapped(place, 20, len) == [
        "at /home/me/",
        "project/models/",
        "transformer_",
        "block.py:12 in",
        "reduce_scatter_",
        "of_gradients",
    ]
    assert wrapped("abcdefgh", 4, len) == ["abcd", "efgh"]


@given(st.text("ab/_. ", max_size=40), st.integers(1, 12))
def test_folded_text_is_whole_and_fits(text, width):
    lines = wrapped(text, width, len)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(len(line) <= width for line in lines)
    if all(len(word) <= width for word in text.split(" ")):
        assert " ".join(lines) == text
