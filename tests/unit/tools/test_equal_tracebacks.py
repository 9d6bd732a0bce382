"""Tracebacks of several ranks: those that are alike are printed once, and no line is lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.tools.commands.equal_tracebacks import EqualTracebacks
from funccoll.tools.commands.printed_traceback import ErrorLines

pytestmark = pytest.mark.covers("launch")

HEAD = "Traceback (most recent call last):\n"
MESH = f'{HEAD}  File "a.py", line 2, in <module>\n    f()\nfunccoll.errors.MeshError: 3 devices\n  at a.py:2\n'
OTHER = MESH.replace("3 devices", "5 devices")
SHORT = f'{HEAD}  File "a.py", line 2, in <module>\nKeyError\n'
CHAINED = f"{SHORT}\nDuring handling of the above exception, another exception occurred:\n\n{MESH}"
FOLDED = re.compile(r"(\w+), as on rank (\d+) \(traceback folded; funccoll run --tracebacks all shows it\)\n")


def printed(outputs, order, cut=None):
    """What each rank's lines become if the ranks write in this order, one line (or `cut` bytes) at a time."""
    tracebacks = EqualTracebacks()
    ranks = [ErrorLines(f"[{rank}] ", rank, tracebacks) for rank in range(len(outputs))]
    rest, shown = [text.encode() for text in outputs], b""
    for rank in [*order, *range(len(outputs)), *(r for r, text in enumerate(outputs) for _ in text)]:
        n = cut or rest[rank].find(b"\n") + 1 or len(rest[rank])
        shown += ranks[rank].feed(rest[rank][:n])
        rest[rank] = rest[rank][n:]
    shown += b"".join(rank.end() for rank in ranks)
    lines = shown.decode().splitlines(keepends=True)
    return ["".join(line.partition("] ")[2] for line in lines if line.startswith(f"[{r}] ")) for r in range(len(outputs))]


def test_the_same_traceback_is_printed_once():
    first, *others = printed(["before\n" + MESH] + [MESH] * 2, [0] * 9)
    assert first == "before\n" + MESH
    assert others == ["MeshError, as on rank 0 (traceback folded; funccoll run --tracebacks all shows it)\n"] * 2


@pytest.mark.parametrize("cut", [1, 50])
def test_writes_that_alternate(cut):
    """Python writes a traceback in small parts: another rank may be ahead of the one whose lines are printed."""
    texts = printed([CHAINED, CHAINED], [0, 1, 1, 1, 0, 1, 0, 0, 1] * 20, cut)
    whole = texts.index(CHAINED)
    folded = f"MeshError, as on rank {whole} (traceback folded; funccoll run --tracebacks all shows it)\n"
    assert texts[1 - whole] == folded


@pytest.mark.parametrize("other", [OTHER, SHORT, CHAINED, MESH.removesuffix("  at a.py:2\n"), MESH + "  more\n"])
def test_other_tracebacks_are_printed_whole(other):
    for order in ([0] * 20, [1] * 20, [0, 1] * 10):
        assert printed([MESH, other], order) == [MESH, other]


def test_lines_that_differ_are_printed_when_they_come():
    tracebacks = EqualTracebacks()
    tracebacks.feed(0, b"", HEAD.encode())
    assert tracebacks.feed(1, b"", HEAD.encode()) == b""
    assert tracebacks.feed(1, b"", b"  here\n") == b""  # rank 0 may print it, too
    assert tracebacks.feed(0, b"", b"  there\n") == b"  there\n" + HEAD.encode() + b"  here\n"


def test_a_rank_that_repeats_its_own_traceback_prints_it_again():
    assert printed([MESH * 3], [0] * 40) == [MESH * 3]


@given(
    st.lists(st.lists(st.sampled_from([MESH, OTHER, SHORT, CHAINED, HEAD, "a line\n", "\n", "end"])), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), max_size=60),
)
def test_no_line_is_lost(parts, order):
    outputs = [re.sub("end(?!$)", "end\n", "".join(one)) for one in parts]
    shown = printed(outputs, [rank for rank in order if rank < len(outputs)])
    for rank, text in enumerate(shown):
        # A folded traceback may have any lines that the named rank has printed.
        pattern, last = "", 0
        for found in FOLDED.finditer(text):
            pattern += re.escape(text[last : found.start()]) + f"({re.escape(HEAD)}(?:.*\n)*?.*{found[1]}(?:.*\n)*?)"
            last = found.end()
            assert int(found[2]) != rank
        whole = outputs[rank] + "\n" * (outputs[rank][-1:] not in ("", "\n"))
        matched = re.fullmatch(pattern + re.escape(text[last:]), whole)
        assert matched, (text, whole)
        for found, lines in zip(FOLDED.finditer(text), matched.groups(), strict=True):
            other = outputs[int(found[2])] + "\n"
            assert lines in other
