"""MSCCL XML from elsewhere: every type of step, in place and buffered; malformed and malicious files; mutations."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules.export import read_text
from funccoll.schedules.streams.interpret import interpret
from tests.support.cases.msccl_files import (
    algorithm,
    block,
    exchange_in_place,
    gather_in_place,
    line_of,
    overwritten_after_send,
    overwritten_late,
    pairs,
    replaced,
    ring_in_place,
    scatter_in_place,
    step,
)
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.oracles.schedule_oracle import Oracle

pytestmark = pytest.mark.covers("schedule-files")

BY_HAND = {
    "exchange in place": exchange_in_place(),
    "ring in place on 2": ring_in_place(2),
    "ring in place on 5": ring_in_place(5),
    "overwritten after the send": overwritten_after_send(),
    "overwritten late": overwritten_late(),
    "all_gather in place": gather_in_place(),
    "reduce_scatter in place": scatter_in_place(),
}
RING = fs.build("all_reduce", 3, "ring").to_msccl_xml()
FLAT = fs.build("reduce", 3, "flat").to_msccl_xml()


def check_values(schedule, seed: int = 0) -> None:
    """Its streams, interpreted in two orders, give what NumPy gives."""
    c = schedule.collective
    inputs = [np.random.default_rng(seed + r).integers(-99, 99, 24 * c.input_blocks * c.parts) for r in range(c.nranks)]
    schedule.streams().verify()
    for order in (0, 1):
        Oracle(c, inputs).check(interpret(schedule.streams(), [inputs], seed=order)[0])
    schedule.messages().verify()


@pytest.mark.parametrize("name", BY_HAND)
def test_files_in_the_style_of_msccl_tools(name):
    check_values(fs.from_msccl_xml(BY_HAND[name]))


def test_what_is_sent_is_copied_only_where_sends_must_be_buffered():
    """The files have one chunk of scratch, and two: the first one needs another, because it overwrites what it has sent."""
    chunks = [fs.from_msccl_xml(BY_HAND[f"overwritten {when}"]).scratch_chunks for when in ("after the send", "late")]
    assert chunks == [1 + 1, 2]


def test_the_fold_of_consecutive_reductions_is_one():
    """k - 1 steps `re` in a row are a fold of k operands, which is rounded once: as two_shot says."""
    proof = fs.from_msccl_xml(fs.build("all_reduce", 4, "two_shot").to_msccl_xml()).prove()
    assert proof.left_fold and not proof.partial_sums


def test_a_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "ring.xml"
    path.write_text("\ufeff" + RING, encoding="utf-8")
    assert fs.from_msccl_xml(path).digest == fs.from_msccl_xml(str(path)).digest == fs.from_msccl_xml(RING).digest


def test_the_root_is_the_attribute_or_the_only_rank_with_an_output():
    text = fs.build("reduce", 3, "flat", root=1).to_msccl_xml()
    without = replaced(text, ' root="1"', "")
    assert fs.from_msccl_xml(text).collective.root == fs.from_msccl_xml(without).collective.root == 1
    with pytest.raises(ScheduleError, match="does not implement reduce on 3 ranks, root=2"):
        fs.from_msccl_xml(replaced(text, 'root="1"', 'root="2"'))


# ---------------------------------------------------------------- malformed files

# fmt: off
MALFORMED = {
    "not XML": ("<algo", "<algo <", "algo", "it is not well-formed: not well-formed"),
    "cut off": ("</algo>\n", "", "</gpu>", "it is not well-formed: no element found"),
    "an element of another kind": ("<tb ", "<thread ", "<thread", "there is no element thread. There are algo, gpu, tb, step"),
    "a misspelt element": ("<step ", "<stp ", "<stp", "there is no element stp. Did you mean 'step'\\?"),
    "steps outside": ("<gpu ", "<step ", "<step", "step stands in algo, and belongs in tb"),
    "text": ("</tb>", "</tb>x", "</tb>x", "it has text between the elements: 'x'"),
    "an attribute twice": (' s="0"', ' s="0" s="0"', ' s="0" s="0"', "not well-formed: duplicate attribute"),
    "a missing attribute": (' cnt="1"', "", '<step s="0" .*dstoff="[0-9]*" depid', "step has no attribute cnt"),
    "a missing coll": (' coll="allreduce"', "", "<algo", "algo has no attribute coll"),
    "another collective": ('coll="allreduce"', 'coll="allreduc"', "<algo",
        "coll='allreduc' is not .* Did you mean 'allreduce'"),
    "what runtimes have and we do not": ('coll="allreduce"', 'coll="alltoallv"', "<algo",
        "coll='alltoallv' is not a collective"),
    "a number that is none": ('cnt="1"', 'cnt="0x1"', 'cnt="0x1"', "cnt='0x1' of step must be an integer from 1 to 71"),
    "a huge number": ('cnt="1"', f'cnt="{"9" * 5000}"', 'cnt="9', "cnt='9999.*must be an integer from 1 to 71"),
    "digits of another script": ('cnt="1"', 'cnt="\u0661"', 'cnt="\u0661"', "must be an integer"),
    "too many chunks at once": ('cnt="1"', 'cnt="72"', 'cnt="72"', "must be an integer from 1 to 71"),
    "an offset out of range": ('dstoff="2"', 'dstoff="3"', 'dstoff="3"',
        'chunks 3 to 3 of "o" do not exist: o_chunks=3 on gpu 0'),
    "a negative offset": ('srcoff="0"', 'srcoff="-1"', 'srcoff="-1"', "chunks -1 to -1"),
    "another buffer": ('srcbuf="i"', 'srcbuf="x"', 'srcbuf="x"', "srcbuf='x' is not a buffer: i, o or s"),
    "another step": ('type="rrc"', 'type="rrx"', 'type="rrx"', "there is no step of type='rrx'. There are s, r, rcs"),
    "a step out of order": ('<step s="1"', '<step s="2"', '<step s="2"', "step s=2 comes in place of 1"),
    "a thread block twice": ('<tb id="1"', '<tb id="0"', '<tb id="0" send="1"', "tb id=0 of gpu 0 comes in place of 1"),
    "a gpu twice": ('<gpu id="1" i_', '<gpu id="0"  i_', '<gpu id="0"  i_', "gpu id=0 comes in place of 1"),
    "a gpu that does not exist": ('<gpu id="2"', '<gpu id="3"', '<gpu id="3"', "id='3' of gpu must be an integer from 0 to 2"),
    "too few gpus": ('ngpus="3"', 'ngpus="4"', "<algo", "ngpus=4, and there are 3 gpus"),
    "its own peer": ('send="1"', 'send="0"', 'send="0"', "tb 1 of gpu 0 sends to, or receives from, its own rank"),
    "a peer that does not exist": ('send="1"', 'send="3"', 'send="3"', "send='3' of tb must be an integer from -1 to 2"),
    "a send without a peer": ('send="1"', 'send="-1"', 'type="s"', 'step 0, type="s", is in a thread block with send="-1"'),
    "a channel that does not exist": ('chan="0"', 'chan="1"', 'chan="1"', "chan='1' of tb must be an integer from"),
    "half a dependency": ('depid="0" deps="0"', 'depid="0" deps="-1"', 'depid="0" deps="-1"',
        "both name a step, or both are -1"),
    "a dependency that does not exist": ('depid="0" deps="0"', 'depid="0" deps="9"', 'depid="0" deps="9"',
        "this gpu has no such step"),
    "waiting for itself": ('depid="0" deps="0"', 'depid="1"  deps="1"', 'depid="1"  deps="1"',
        "waits for itself, or for a later one of its thread block"),
    "waiting for what tells nothing": ('hasdep="1"', 'hasdep="0"', 'depid="0" deps="0"',
        r'deps=0: that step \(line 4\) has hasdep="0"'),
    "a root that is none": ('ngpus="3"', 'ngpus="3" root="0"', "<algo", "allreduce has no root, and root=0 is given"),
    "an unprintable name": ('name="ring"', 'name="a&#7;b"', "<algo", "not well-formed|printable"),
    "a name of a book": ('name="ring"', f'name="{"x" * 201}"', "<algo", "at most 200 printable characters"),
    "more chunks than data": ('i_chunks="3"', 'i_chunks="4"', "<gpu",
        "i_chunks=4 of gpu 0: nchunksperloop=3 means .* allreduce has 3"),
}
# fmt: on


@in_groups("name", MALFORMED)
def test_a_malformed_file_is_refused_at_its_line(name):
    old, new, at, what = MALFORMED[name]
    text = replaced(RING, old, new)
    with pytest.raises(ScheduleError, match=f"^MSCCL XML, line .*{what}") as caught:
        fs.from_msccl_xml(text)
    assert len(str(caught.value)) < 600
    if "well-formed" not in what:
        assert f"line {line_of(text, at)}:" in str(caught.value)


def test_one_connection_in_two_thread_blocks_is_refused():
    twice = [block(0, 1, -1, [step(0, "s", "i0", "o0")]), block(1, 1, -1, [step(0, "s", "i0", "o0")])]
    text = algorithm("broadcast", 1, [((1, 1, 0), twice), ((1, 1, 0), [])])
    with pytest.raises(ScheduleError, match="tb 1 and tb 0 of gpu 0 have the same connection"):
        fs.from_msccl_xml(text)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("no such file.xml", "neither a text that begins with '<' nor a file that can be read .No such file"),
        ("", "neither a text"),
        ("a\0b", "neither a text .*null byte"),
        (7, "give the text or the path of a file, not int"),
        (None, "not NoneType"),
        (b"<algo/>", "not bytes"),
        ("/", "'/' is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("<\ud800>", "characters that UTF-8 does not have"),
        ("<a/>", "no element a"),
        ("<algo/>", "algo has no attribute"),
        ("<!-- -->", "not well-formed: no element found"),
    ],
)
def test_what_is_not_a_file_or_a_text_is_refused(given, what):
    with pytest.raises(ScheduleError, match=f"MSCCL XML.*{what}"):
        fs.from_msccl_xml(given)


def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ScheduleError, match="is not a regular file"):
        fs.from_msccl_xml(tmp_path / "fifo")


def test_other_encodings_are_refused(tmp_path):
    for encoding in ("utf-16", "latin-1"):
        path = tmp_path / encoding
        named = RING.replace("ring", "r\xefng")
        path.write_bytes(f'<?xml version="1.0" encoding="{encoding}"?>{named}'.encode(encoding))
        with pytest.raises(ScheduleError, match="is not UTF-8: byte 0x"):
            fs.from_msccl_xml(path)
    # A declaration does not make the reader take another encoding.
    assert fs.from_msccl_xml(f'<?xml version="1.0" encoding="UTF-7"?>\n{RING}').digest == fs.from_msccl_xml(RING).digest


# ---------------------------------------------------------------- malicious files

ENTITIES = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(30))
MALICIOUS = {
    "billion laughs": (f'<!DOCTYPE algo [<!ENTITY e0 "ha">{ENTITIES}]>\n' + RING.replace('"ring"', '"&e30;"'), "document type"),
    "an external entity": (
        '<!DOCTYPE algo [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n' + RING.replace('"ring"', '"&x;"'),
        "document type",
    ),
    "an external DTD": ('<!DOCTYPE algo SYSTEM "http://127.0.0.1:9/x.dtd">\n' + RING, "document type"),
    "an unknown entity": (RING.replace('"ring"', '"&x;"'), "undefined entity"),
    "10⁹ gpus": (RING.replace('ngpus="3"', f'ngpus="{10**9}"'), "ngpus=1000000000, and there are 3 gpus"),
    "10¹² gpus": (RING.replace('ngpus="3"', f'ngpus="{10**12}"'), "must be an integer from 1 to 1000000000"),
    "10¹² chunks": (RING.replace('nchunksperloop="3"', f'nchunksperloop="{10**12}"'), "must be an integer from 1 to"),
    "10⁹ chunks": (RING.replace('nchunksperloop="3"', f'nchunksperloop="{10**9}"'), "its buffers have 6,000,000,000 chunks"),
    "10⁹ chunks of scratch": (RING.replace('s_chunks="0"', f's_chunks="{10**9}"'), "its buffers have 3,000,000,018 chunks"),
    "10⁹ channels": (
        RING.replace('nchannels="1"', f'nchannels="{10**9}"'),
        "nchannels='1000000000' of algo must be an integer",
    ),
    "deep": ("<algo>" * 200_000, "algo has no attribute|algo stands in algo"),
    "deep elsewhere": (RING.replace("</step>", "") + "<x>" * 200_000, "not well-formed"),
    "many elements": (RING.replace("</algo>", "<gpu/>" * 10 + "</algo>"), "gpu has no attribute id"),
    "many comments": ("<!-- -->" * 500_000, "not well-formed: no element found"),
    "a long attribute": (RING.replace('"ring"', f'"{"x" * 5_000_000}"'), "at most 200 printable characters"),
    "many attributes": (RING.replace("<algo", "<algo " + " ".join(f'a{i}="1"' for i in range(50_000))), None),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_file_is_refused_in_little_memory(name):
    text, what = MALICIOUS[name]
    tracemalloc.start()
    try:
        if what is None:
            assert fs.from_msccl_xml(text).nranks == 3
        else:
            with pytest.raises(ScheduleError, match=what) as caught:
                fs.from_msccl_xml(text)
            assert len(str(caught.value)) < 600
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_text_or_file_that_is_too_large_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(read_text, "LARGEST_FILE", len(RING) - 1)
    monkeypatch.chdir(tmp_path)  # a long path is shortened in the error
    Path("large.xml").write_text(RING)
    for text, what in ((RING, "the text has"), (Path("large.xml"), "large.xml' has")):
        with pytest.raises(ScheduleError, match=f"{what} [0-9,]+ (characters|bytes), and [0-9,]+ are read at most"):
            fs.from_msccl_xml(text)


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path):
    with open(tmp_path / "sparse.xml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ScheduleError, match="has 1,099,511,627,776 bytes, and 16,777,216 are read at most"):
        fs.from_msccl_xml(tmp_path / "sparse.xml")


@pytest.mark.slow
def test_many_steps_are_read_in_linear_time():
    """A chain of 20,000 copies: what is quadratic in the steps would not end."""
    steps = [step(i, "cpy", "i0", "o0") for i in range(70_000)]
    few = [((1, 1, 0), [block(0, -1, -1, steps[:20_000])])]
    assert fs.from_msccl_xml(algorithm("broadcast", 1, few)).nrounds == 20_000
    more = [((1, 1, 0), [block(0, -1, -1, steps)])]
    with pytest.raises(ScheduleError, match="line 65537: it has more than 65,536 elements"):
        fs.from_msccl_xml(algorithm("broadcast", 1, more))


# ---------------------------------------------------------------- programs that are wrong


def test_a_cycle_of_dependencies_is_a_deadlock():
    a, b = (block(t, -1, -1, [step(0, "cpy", "i0", "o0", depends=(1 - t, 0), awaited=1)]) for t in (0, 1))
    with pytest.raises(ScheduleError, match=r"line 4: deadlock: steps wait for each other in a cycle \(lines 4, 7\)"):
        fs.from_msccl_xml(algorithm("broadcast", 1, [((1, 1, 0), [a, b])]))


def test_a_step_may_wait_for_an_earlier_one_of_its_thread_block():
    """It is done then; a generator of msccl-tools writes such steps."""
    steps = [step(0, "cpy", "i0", "s0", awaited=1), step(1, "cpy", "s0", "o0", depends=(0, 0))]
    assert fs.from_msccl_xml(algorithm("broadcast", 1, [((1, 1, 1), [block(0, -1, -1, steps)])])).nrounds == 2


def test_receives_before_sends_are_a_deadlock():
    def gpu(r):
        return (1, 1, 1), [block(0, 1 - r, 1 - r, [step(0, "r", "i0", "s0"), step(1, "s", "i0", "s0")])]

    with pytest.raises(ScheduleError, match="deadlock: steps wait for each other in a cycle"):
        fs.from_msccl_xml(algorithm("allreduce", 1, [gpu(0), gpu(1)]))


def test_a_send_without_a_receive_is_a_deadlock():
    sends = [block(0, 1, -1, [step(0, "s", "i0", "o0"), step(1, "s", "i0", "o0")])]
    receives = [block(0, -1, 0, [step(0, "r", "i0", "o0")])]
    for first, second, what in (
        (sends, receives, "line 5.*sends 2 times .* receives 1 times: there is no receive for this send"),
        (sends[:0], receives, "line 6.*sends 0 times .* receives 1 times: there is no send for this"),
    ):
        with pytest.raises(ScheduleError, match=f"{what}"):
            fs.from_msccl_xml(algorithm("broadcast", 1, [((1, 1, 0), first), ((1, 1, 0), second)]))


def test_sides_of_a_message_must_have_equal_counts():
    two = [
        ((2, 2, 0), [block(0, 1, -1, [step(0, "s", "i0", "o0", 2)])]),
        ((2, 2, 0), [block(0, -1, 0, [step(0, "r", "i0", "o0")])]),
    ]
    with pytest.raises(ScheduleError, match="lines 4 and 9: a send of 2 chunks is paired with a receive of 1"):
        fs.from_msccl_xml(algorithm("broadcast", 2, two))


def test_a_missing_dependency_is_a_race_although_the_values_would_be_right():
    text = replaced(RING, 'depid="0" deps="0"', 'depid="-1" deps="-1"').replace('hasdep="1"', 'hasdep="0"', 1)
    line = line_of(text, 'type="rrc"')
    with pytest.raises(ScheduleError, match=f"lines {line} and [0-9]+: race: two steps of one gpu use the same chunk"):
        fs.from_msccl_xml(text)


def test_a_program_that_does_something_else_is_refused_with_its_line():
    text = replaced(RING, 'type="rrc" srcbuf="i" srcoff="1"', 'type="rrc" srcbuf="i" srcoff="0"')
    with pytest.raises(ScheduleError, match=r"ring.* is wrong: it mixes chunks that are different parts of the data") as caught:
        fs.from_msccl_xml(text)
    assert f"<text>:{line_of(text, 'srcoff=.0. dstbuf=.o. dstoff=.1.')}" in str(caught.value)
    with pytest.raises(ScheduleError, match=r"ring for broadcast on 3 ranks.*broadcast only copies"):
        fs.from_msccl_xml(RING.replace("allreduce", "broadcast"))


def test_ranks_that_add_in_different_orders_are_refused():
    """Sums that are equal but for their rounding: the guide to schedules says so."""
    words = r"different orders, so their bits would differ\. .*that of rank 2 x0\[0\] \+ x2\[0\] \+ x1\[0\], .*the same for all"
    with pytest.raises(ScheduleError, match=words) as caught:
        fs.from_msccl_xml(pairs(3, own_first=True))
    assert "in MSCCL XML" in str(caught.value)
    assert str(fs.from_msccl_xml(pairs(3, own_first=False)).collective) == "all_reduce on 3 ranks"


def test_what_no_step_writes_is_named():
    with pytest.raises(ScheduleError, match=r"must hold .*and no move writes it"):
        fs.from_msccl_xml(algorithm("allreduce", 1, [((1, 1, 0), [])] * 2))


# ---------------------------------------------------------------- mutations


def tokens(text: str) -> list[str]:
    """A text cut into attribute values and what stands between them."""
    return text.split('"')


@examples(600, few=16, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_file_is_refused_or_is_still_right(data):
    """Change values, lines or characters of a valid file: a ScheduleError, or a schedule that gives what NumPy gives."""
    text = data.draw(st.sampled_from([RING, FLAT, *BY_HAND.values()]))
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["value", "line", "swap", "cut", "character"]))
        lines = text.splitlines()
        i, j = (data.draw(st.integers(0, max(0, len(lines) - 1))) for _ in range(2))
        if how == "value":
            parts = tokens(text)
            k = 2 * data.draw(st.integers(0, max(0, len(parts) // 2 - 1))) + 1
            value = st.sampled_from(
                ["0", "1", "2", "-1", "3", "i", "o", "s", "r", "rrc", "re", "cpy", "nop", "rcs", "", "99", "1e3"]
            )
            if k < len(parts):
                parts[k] = data.draw(value)
            text = '"'.join(parts)
        elif how == "line":
            del lines[i : i + 1]
            text = "\n".join(lines)
        elif how == "swap" and lines:
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
        elif how == "cut":
            text = text[: data.draw(st.integers(0, len(text)))]
        else:
            k = data.draw(st.integers(0, len(text)))
            text = text[:k] + data.draw(st.text(max_size=2)) + text[k + 1 :]
    try:
        schedule = fs.from_msccl_xml("<" + text[1:])
    except ScheduleError:
        return
    check_values(schedule)
