"""Element ranges, and streams run by the reference interpreter: every algorithm, in random orders, against plain NumPy."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.primitives.combining import fold
from funccoll.schedules.chunk_layout import Blocks, ChunkLayout, FlatBuffers
from funccoll.schedules.collective import KINDS, Collective
from funccoll.schedules.schedule import Schedule
from funccoll.schedules.streams.interpret import StreamInterpreter, interpret
from tests.support.oracles.schedule_oracle import Oracle, built, check, make_inputs, variants

pytestmark = pytest.mark.covers("stream-interpreter")

INTEGERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"]


# ---------------------------------------------------------------- element ranges


def flat(index: Any, size: int) -> np.ndarray:
    return np.arange(size)[index]


@given(
    outer=st.integers(1, 4),
    blocks=st.integers(1, 5),
    inner=st.integers(1, 7),
    block=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 28), max_size=5),
)
def test_pieces_are_the_elements_of_a_block(outer, blocks, inner, block, cuts):
    whole = Blocks(outer, blocks, inner)
    block %= blocks
    numbers = np.arange(whole.size).reshape(outer, blocks, inner)[:, block].reshape(-1)
    edges = [0, *sorted(c % (whole.elements + 1) for c in cuts), whole.elements]
    for start, stop in pairwise(edges):
        index = whole.index(block, start, stop)
        np.testing.assert_array_equal(flat(index, whole.size), numbers[start:stop])
        pieces = whole.ranges(block, start, stop)
        assert len(pieces) <= 3
        assert sum(p.rows * p.length for p in pieces) == stop - start
        if outer == 1:
            assert isinstance(index, slice)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    p=st.integers(1, 5),
    chunks=st.integers(1, 4),
    channels=st.integers(1, 3),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    dims=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    itemsize=st.sampled_from([1, 4, 8, 64]),
)
def test_chunks_cut_each_buffer_into_what_it_is(kind, p, chunks, channels, shape, dims, itemsize):
    dim, concat_dim = (d % len(shape) for d in dims)
    shape = [n * 19 if d else n for d, n in enumerate(shape)]
    shape[dim] *= p
    c = Collective(kind, p, chunks=chunks, channels=channels)
    layout = ChunkLayout.of(c, shape, itemsize, dim, concat_dim)
    output = np.zeros(ChunkLayout.output_shape(c, shape, dim, concat_dim))
    for buffer, first, count in (("input", 0, c.input_chunks), ("output", c.input_chunks, c.output_chunks)):
        before = 0 if buffer == "input" else layout.input.size
        size = layout.input.size if buffer == "input" else output.size
        parts = [flat(layout.index(first + k, 0), before + size) for k in range(count)]
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(before, before + size))
    memory = FlatBuffers(layout, 2)
    slots = [memory.index((c.input_chunks + c.output_chunks + k) * p + p - 1, 1, k % c.parts, 0) for k in range(2)]
    assert all(isinstance(s, slice) and memory.of_rank(p - 1).start <= s.start for s in slots)
    assert slots[0].stop <= slots[1].start and slots[1].stop <= memory.of_rank(p - 1).stop


@given(
    p=st.integers(1, 4),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    dims=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    chunks=st.integers(1, 3),
    channels=st.integers(1, 2),
)
def test_equal_chunks_of_two_buffers_hold_the_same_elements(p, shape, dims, chunks, channels):
    dim, concat_dim = (d % len(shape) for d in dims)
    shape[dim] *= p
    c = Collective("all_to_all", p, chunks=chunks, channels=channels)
    layout = ChunkLayout.of(c, shape, 64, dim, concat_dim)
    x = np.arange(np.prod(shape)).reshape(shape)
    blocks = np.split(x, p, axis=dim)
    memory = np.full(layout.input.size + layout.output.size, -1)
    memory[: x.size] = x.reshape(-1)
    for row in range(c.input_chunks):
        memory[layout.index(c.input_chunks + row, 0)] = memory[layout.index(row, 0)]
    got = memory[x.size :].reshape(ChunkLayout.output_shape(c, shape, dim, concat_dim))
    np.testing.assert_array_equal(got, np.concatenate(blocks, axis=concat_dim))


def test_a_dimension_that_cannot_be_cut():
    streams = fs.build("reduce_scatter", 4).streams()
    with pytest.raises(ScheduleError, match=r"shape \(6, 8\) cannot be cut into 4 blocks along dimension 0.*Pad it"):
        interpret(streams, [[np.zeros((6, 8))] * 4])
    with pytest.raises(ScheduleError, match="along dimension 2"):
        interpret(streams, [[np.zeros((8, 8))] * 4], dim=2)


# ---------------------------------------------------------------- every algorithm


QUICK = (1, 2, 3, 4, 6)


def run_all(schedule: Schedule, orders: int, dtypes: Any) -> None:
    """Three executions in a row in that many orders, the dtypes in turn; sizes are odd, sometimes below the number of chunks.

    An order of events does not depend on the dtype: one order in several dtypes would repeat the same events.
    """
    c = schedule.collective
    streams = schedule.streams()
    rng = np.random.default_rng(zlib.crc32(repr(schedule).encode()))
    op = "max" if c.kind == "barrier" else "sum"
    for first, dtype in enumerate(dtypes):
        itemsize = np.dtype(dtype).itemsize
        block = int(rng.choice([1, 3, c.parts * 64 // itemsize + 5]))
        shape = (block * c.input_blocks,)
        program = StreamInterpreter(streams, shape, dtype)
        inputs = [make_inputs(rng, c.nranks, shape, dtype) for _ in range(3)]
        oracles = [Oracle(c, x, op) for x in inputs]
        bits: set[bytes] = set()
        for order in range(first, orders, len(dtypes)):
            runs = program.run(inputs, op=op, seed=order)
            for oracle, outputs in zip(oracles, runs, strict=True):
                oracle.check(outputs, f"{schedule}, {np.dtype(dtype)}[{block}], seed {order}")
            bits.add(b"".join(x.tobytes() for outputs in runs for x in outputs if x is not None))
        assert len(bits) == 1, f"{schedule}: bits depend on the order of events"


def run_variants(
    p: int, orders: int, others: int, kinds: Any = None, every: int = 1, several: tuple[int, ...] = (2, 3)
) -> None:
    """Every algorithm in `orders` orders; every `every`-th of other roots, levels, chunks, and `several` channels, in `others`.

    One order takes the first of the two dtypes alone.
    """
    seen = set()
    for number, (kind, name, options) in enumerate(variants(p, kinds)):
        first = (kind, name) not in seen
        seen.add((kind, name))
        if not first and (number + p) % every:
            continue
        count = orders if first else others
        run_all(built(kind, p, name, **options), count, (np.float32, np.int32)[:count])
        for channels in several if first else ():
            run_all(built(kind, p, name, channels=channels, **options), others, (np.float64, np.int64)[:others])


@pytest.mark.parametrize("p", QUICK)
def test_every_algorithm(p):
    run_variants(p, 2, 1, every=3 if p < 6 else 6, several=(2 + p % 2,))


@pytest.mark.parametrize("p", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_every_algorithm_for_a_power_of_two(p):
    for kind in KINDS:
        for name in fs.algorithms(kind, p):
            pairs = [(r, (r + 3) % p) for r in range(p)] if kind == "permute" else ()
            run_all(built(kind, p, name, pairs=pairs), 2, (np.float32,))


# The proof is of every size; what a size adds here is how its streams are lowered: the small ones have it all.
# The longest tests come first: one of the workers would do them alone in the end.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_for_64_ranks(kind):
    run_variants(64, 4, 2, [kind])


@pytest.mark.slow
@pytest.mark.parametrize("p", [17, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1])
def test_every_variant(p):
    run_variants(p, 4 if p < 10 else 2, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", [33, 27, 21, 17, 16, 15, 12, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1])
def test_every_variant_in_many_orders(p):
    run_variants(p, 20 if p < 10 else 8, 4 if p < 10 else 2)


# ---------------------------------------------------------------- dtypes and ops


def ops_of(dtype: Any) -> list[str]:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return ["and", "or", "xor", "max", "min"]
    if kind in "iu":
        return ["sum", "prod", "max", "min", "and", "or", "xor"]
    return ["sum", "prod", "mean"] if kind == "c" else ["sum", "prod", "mean", "max", "min"]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_dtypes_and_ops(dtype):
    rng = np.random.default_rng(1)
    for name in ("two_shot", "ring", "recursive_doubling", "circulant"):
        streams = fs.build("all_reduce", 5, name).streams()
        for op in ops_of(dtype):
            inputs = [make_inputs(rng, 5, (77,), dtype) for _ in range(2)]
            for x, outputs in zip(inputs, interpret(streams, inputs, op=op, seed=2), strict=True):
                check(streams.schedule.collective, x, outputs, op)
    for kind in ("all_gather", "all_to_all", "broadcast", "scatter"):
        streams = fs.build(kind, 3).streams()
        inputs = make_inputs(rng, 3, (15,), dtype)
        check(streams.schedule.collective, inputs, interpret(streams, [inputs])[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_16_bit_floats_are_rounded_once_per_combine(dtype, op):
    rng = np.random.default_rng(0)
    inputs = make_inputs(rng, 7, (200,), dtype)
    outputs = interpret(fs.build("all_reduce", 7, "two_shot").streams(), [inputs], op=op)[0]
    total = inputs[0].astype(np.float32)
    for x in inputs[1:]:
        total = total + x.astype(np.float32)
    total = total / np.float32(7) if op == "mean" else total
    assert outputs[3] is not None
    assert outputs[3].tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_two_shot_gives_the_bits_of_the_reference(p, op):
    rng = np.random.default_rng(0)
    inputs = make_inputs(rng, p, (3, 50), np.float32)
    for x in inputs:  # NaNs with different payloads, infinities, zeros of both signs
        special = np.array([0x7FC00000, 0xFFC00123, 0x7F800000, 0xFF800000, 0, 0x80000000], np.uint32).view(np.float32)
        x[:, :30] = rng.choice(special, (3, 30))
    with np.errstate(invalid="ignore"):
        wanted = fold(inputs, op)
    for output in interpret(fs.build("all_reduce", p, "two_shot").streams(), [inputs], op=op)[0]:
        assert output is not None
        if op in ("max", "min"):  # sums may keep any NaN's payload
            assert output.tobytes() == wanted.tobytes()
        np.testing.assert_array_equal(output, wanted)


# ---------------------------------------------------------------- shapes and dimensions


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "gather", "scatter"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_other_dimensions(kind, dim):
    rng = np.random.default_rng(0)
    p = 3
    for name in fs.algorithms(kind, p):
        for channels in (1, 2):
            streams = fs.build(kind, p, name, channels=channels).streams()
            shape = [5, 7, 11]
            shape[dim] *= p
            inputs = make_inputs(rng, p, shape, np.int16)
            outputs = interpret(streams, [inputs], dim=dim, seed=1)[0]
            check(streams.schedule.collective, inputs, outputs, dim=dim)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("concat_dim", [0, 1, 2])
def test_all_to_all_cuts_one_dimension_and_joins_another(dim, concat_dim):
    rng = np.random.default_rng(0)
    for name in fs.algorithms("all_to_all", 4):
        streams = fs.build("all_to_all", 4, name, channels=3).streams()
        shape = [3, 5, 7]
        shape[dim] *= 4
        inputs = make_inputs(rng, 4, shape, np.float64)
        outputs = interpret(streams, [inputs], dim=dim, concat_dim=concat_dim)[0]
        check(streams.schedule.collective, inputs, outputs, dim=dim, concat_dim=concat_dim)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), ()])
def test_nothing_and_next_to_nothing(shape):
    for kind in ("all_reduce", "broadcast", "reduce", "barrier", "permute"):
        for name in fs.algorithms(kind, 3):
            streams = fs.build(kind, 3, name, channels=2, pairs=[(0, 2)] if kind == "permute" else ()).streams()
            inputs = [np.full(shape, r, np.float32) for r in range(3)]
            check(streams.schedule.collective, inputs, interpret(streams, [inputs], op="max")[0], "max")


def test_many_executions_in_a_row():
    """Counters are never reset: 12 executions, in which ranks may be apart."""
    rng = np.random.default_rng(0)
    for name in fs.algorithms("all_reduce", 4):
        streams = fs.build("all_reduce", 4, name, channels=2).streams()
        inputs = [make_inputs(rng, 4, (99,), np.int64) for _ in range(12)]
        for x, outputs in zip(inputs, interpret(streams, inputs, seed=3), strict=True):
            check(streams.schedule.collective, x, outputs)


# ---------------------------------------------------------------- what is refused


def test_inputs_that_differ_in_shape_or_dtype():
    streams = fs.build("all_reduce", 2).streams()
    with pytest.raises(ScheduleError, match=r"input of rank 1 is float64\[4\], and that of rank 0 is float64\[3\]"):
        interpret(streams, [[np.zeros(3), np.zeros(4)]])
    with pytest.raises(ScheduleError, match="all ranks give one shape and dtype"):
        interpret(streams, [[np.zeros(3), np.zeros(3, np.float32)]])


def test_a_deadlock_names_who_waits_for_whom():
    from dataclasses import replace

    streams = fs.build("all_reduce", 3, "ring").streams()
    value = streams.wait_value.copy()
    value[-1] = streams.span + 1
    with pytest.raises(ScheduleError, match=r"deadlock: .*none can go on:\n  rank \d, instruction \d+: .*waits until rank"):
        interpret(replace(streams, wait_value=value), [[np.zeros(9)] * 3])
