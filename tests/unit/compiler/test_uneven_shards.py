"""Arrays whose dimensions the devices do not divide: torch.chunk's blocks, on virtual devices and in processes."""

from __future__ import annotations

import copy
import pickle
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.stages import redistribution
from funccoll.core.block_ranges import block_range, block_sizes
from funccoll.core.mesh import Mesh
from funccoll.errors import ShapeError, ShardingError
from tests.support import SUPPORT
from tests.support.cases import uneven_shard_cases as cases
from tests.support.cases.redistribute_cases import spec
from tests.support.example_counts import examples
from tests.support.misuse import LINE, wrong
from tests.support.ranks import mpi_vendors
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("uneven-shards")

DTYPES = np.bool_, np.int8, np.uint16, np.float32, fc.bfloat16, np.complex128
FIVE = fc.device_put(np.arange(5.0), LINE, P("data"))


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(5, 4, "2, 2, 1, 0"), (7, 4, "2, 2, 2, 1"), (8, 4, "2, 2, 2, 2"), (1, 3, "1, 0, 0"), (0, 2, "0, 0"), (9, 1, "9")],
)
def test_blocks_are_those_of_torch_chunk(rows, parts, sizes):
    ranges = [block_range(rows, parts, i) for i in range(parts)]
    assert ", ".join(str(r.stop - r.start) for r in ranges) == sizes == block_sizes(rows, parts)
    assert [i for r in ranges for i in range(r.start, r.stop)] == list(range(rows))


@pytest.mark.slow
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    for rows in range(1, 40):
        for parts in range(1, 12):
            theirs = [len(part) for part in torch.arange(rows).chunk(parts)]
            ours = [r.stop - r.start for r in (block_range(rows, parts, i) for i in range(parts))]
            assert ours == theirs + [0] * (parts - len(theirs))


@pytest.mark.parametrize(
    ("rows", "parts", "words"),
    [
        (50, 16, "4 (12 times), 2 and 0 (3 times)"),
        (48, 16, "3 (16 times)"),
        (9, 10, "1 (9 times) and 0"),
        (0, 16, "0 (16 times)"),
    ],
)
def test_sizes_of_many_blocks_in_words(rows, parts, words):
    assert block_sizes(rows, parts) == words


def test_shapes_of_blocks_by_device():
    mesh = fc.make_mesh({"a": 2, "b": 3})
    sharding = fc.Sharding(mesh, P(("b", "a"), None))
    shapes = [sharding.shard_shape((7, 2), mesh.coordinates(d)) for d in range(6)]
    assert shapes == [(2, 2), (2, 2), (0, 2), (2, 2), (1, 2), (0, 2)]  # blocks 0, 2, 4, 1, 3, 5
    assert sharding.index((7, 2), mesh.coordinates(4)) == (slice(6, 7), slice(0, 2))
    assert sharding.shard_shape((12, 2)) == (2, 2) and sharding.is_even((12, 2)) and not sharding.is_even((7, 2))
    assert (sharding.padded_shard_shape((7, 2)), sharding.padded_shape((7, 2))) == ((2, 2), (12, 2))
    text = wrong(ShardingError, lambda: sharding.shard_shape((7, 2)), "(7, 2)", "2, 2, 2, 1, 0, 0", "dimension 0")
    assert "shard_shape(shape, mesh.coordinates(device))" in text


# ---------------------------------------------------------------- Arrays


@examples(100)
@given(
    sizes=st.lists(st.integers(1, 4), max_size=3), shape=st.lists(st.integers(0, 7), max_size=3), seed=st.integers(0, 1 << 32)
)
def test_any_shape_goes_in_out_and_over(sizes, shape, seed):
    mesh, rng = fc.make_mesh(dict(zip("abc", sizes, strict=False))), random.Random(seed)
    old, new = (spec(list(mesh.axis_names), len(shape), rng) for _ in range(2))
    x = np.random.default_rng(0).integers(0, 100, shape).astype(rng.choice(DTYPES))
    put, wanted = fc.device_put(x, mesh, old), fc.device_put(x, mesh, new)
    for arr in (put, fc.from_local(put.shards, mesh, old, shape=x.shape), pickle.loads(pickle.dumps(put)), copy.deepcopy(put)):
        assert arr.layout is put.layout and np.asarray(arr).tobytes() == x.tobytes()
        for device, block in enumerate(arr.shards):
            at = mesh.coordinates(device)
            assert block.tobytes() == x[arr.sharding.index(x.shape, at)].tobytes()
            assert block.shape == arr.sharding.shard_shape(x.shape, at) and block.flags.c_contiguous
    assert fc.process_allgather(put).tobytes() == x.tobytes()
    moved = fc.redistribute(put, new)
    assert moved.layout is wanted.layout
    for block, other in zip(moved.shards, wanted.shards, strict=True):
        assert (block.shape, block.tobytes()) == (other.shape, other.tobytes()) and block.flags.c_contiguous
        assert not block.flags.writeable


@pytest.mark.parametrize(
    ("old", "new", "shape", "names"),
    [
        (P("a"), P(), (5,), "all_gather"),
        (P(), P("a"), (5,), ""),
        (P("a"), P(None, "a"), (5, 6), "all_to_all"),
        (P(("a", "b")), P(("b", "a")), (9,), "permute"),
        (P("a"), P(("a", "b")), (5,), ""),  # both pad to 8: 2, 2, 1, 0 and 1, 1, 1, 1, 1, 0, 0, 0
        (P("a"), P(("a", "b")), (9,), "all_gather"),  # to 12 and 16
        (P("a"), P("b"), (5,), "all_gather"),  # to 8 and 6
        (P("a", "b"), P("b", "a"), (5, 8), "all_gather all_to_all"),
    ],
    ids=str,
)
def test_it_moves_no_more_than_it_must(old, new, shape, names):
    mesh = fc.make_mesh({"a": 4, "b": 2})
    x = np.arange(float(np.prod(shape))).reshape(shape)
    given, wanted = (fc.device_put(x, mesh, s) for s in (old, new))
    assert all(map(np.array_equal, fc.redistribute(given, new).shards, wanted.shards))
    assert " ".join(row.kind for row in redistribution(given.layout, wanted.layout, None).collectives()) == names


def test_how_an_array_looks_and_computes():
    assert repr(FIVE) == "Array([0., 1., 2., 3., 4.], f64[5], P('data') on Mesh({'data': 4}))"
    html = FIVE._repr_html_()
    assert all(f"<code>[{part}]</code>" in html for part in ("0:2", "2:4", "4:5", "5:5"))
    assert (FIVE + 1).tolist() == [1, 2, 3, 4, 5] and (np.ones(5) @ FIVE, FIVE[4], len(FIVE)) == (10, 4, 5)
    whole = fc.jit(lambda x: 2 * x, mesh=LINE, in_specs=P(), out_specs=P())
    for _ in range(2):
        assert whole(FIVE).tolist() == [0, 2, 4, 6, 8]
    with fc.debug.disable_jit():
        assert whole(FIVE).tolist() == [0, 2, 4, 6, 8]
    column = fc.device_put(np.arange(20.0).reshape(5, 4), LINE, P("data"))
    even = fc.jit(lambda x: x * 2, mesh=LINE, in_specs=P(None, "data"), out_specs=P(None, "data"))
    assert np.array_equal(even(column), np.arange(20.0).reshape(5, 4) * 2)  # its spec splits the Array evenly


def test_gradients():
    cases.gradients({"d": 4})
    cases.gradients({"d": 2, "e": 3})


# ---------------------------------------------------------------- errors


def test_a_function_takes_only_blocks_of_one_shape():
    step = fc.jit(lambda x: x, mesh=LINE, in_specs=P("data"), out_specs=P("data"))
    words = "x of <lambda> of shape (5,)", "do not divide evenly (into 2, 2, 1, 0)", "Pad it to 8", "use None"
    assert "redistribute" not in wrong(ShardingError, lambda: step(np.arange(5.0)), *words)
    wrong(ShardingError, lambda: step(FIVE), *words, "fc.redistribute(x, fc.P())")
    auto = fc.jit(lambda x: x, mesh=LINE, in_specs=fc.AUTO, out_specs=fc.AUTO)
    wrong(ShardingError, lambda: auto(FIVE), *words)
    with fc.debug.disable_jit():
        wrong(ShardingError, lambda: step(FIVE), *words)
    wrong(ShardingError, lambda: step.lower(FIVE), *words)


def put(blocks, shape=None):
    return fc.from_local(blocks, LINE, P("data"), shape=shape)


def test_blocks_of_from_local():
    blocks = [np.ones(2), np.ones(2), np.ones(1), np.ones(0)]
    assert np.array_equal(put(blocks, (5,)), np.ones(5))
    for given_blocks, shape, words in (
        (blocks, None, r"block 2 is float64\[1\] .* unless you pass the global shape, as shape=\(\.\.\.\)"),
        (blocks, (6,), r"block 2 is f64\[1\], and device 2 holds \[2\] .* \(6,\), .* 2, 2, 2, 0 along dimension 0"),
        (blocks, (5, 1), r"block 0 is f64\[2\], and device 0 holds \[2, 1\]"),
        ([*blocks[:3], np.ones(0, np.int8)], (5,), r"block 3 is int8\[0\] and block 0 float64\[2\]"),
        (blocks, (-1,), r"from_local: shape=\(-1,\) must be the sizes of the global array"),
        (blocks, 5, r"from_local: shape=5 must be the sizes of the global array"),
    ):
        with pytest.raises(ShapeError, match=words):
            put(given_blocks, shape)
    wrong(ShardingError, lambda: fc.from_local(blocks, LINE, P("data"), shape=()), "0 dimension(s)")
    wrong(ShardingError, lambda: fc.device_put(np.ones(5), LINE, P(None, "data")), "device_put: x", "2 entries")


# ---------------------------------------------------------------- processes


SLOW = pytest.mark.slow


@pytest.mark.processes
@pytest.mark.parametrize(
    ("axes", "count"),
    [({"a": 3}, 4), *(pytest.param(axes, 40, marks=SLOW) for axes in ({"a": 2}, {"a": 3}, {"a": 2, "b": 2}))],
    ids=str,
)
def test_processes(axes, count):
    launch(cases.moves, Mesh(axes).size, axes, 1, count)


@pytest.mark.processes
@pytest.mark.parametrize(
    "way", ["permuted", *(pytest.param(way, marks=SLOW) for way in ("redistributed", "gathered", "without"))]
)
def test_processes_that_contradict_each_other(way):
    what = "arr of process_allgather" if way == "gathered" else "x of redistribute"
    words = rf"{what} is float64\[8\] in blocks of \[2\] on rank 0, and float64\[7\]"
    if way == "without":
        words = rf"{what} is float64\[8\] in blocks of \[2\] on .* and float64\[4\] in blocks of \[1\] on rank 3.* as shape="
    found = launch(cases.told, 4, way)
    assert any(kind == "ProgramMismatch" for kind, _ in found), found
    for kind, text in found:
        assert kind == "PeerFailure" or re.search(words, text, re.DOTALL), text


@pytest.mark.processes
@SLOW
def test_checkpoints_of_other_numbers_of_processes(tmp_path):
    path = str(tmp_path / "x.npz")
    saved = launch(cases.checkpoint, 3, path, True)
    loaded = launch(cases.checkpoint, 2, path, False)
    assert [shape for _, shape in saved] == [[2, 3], [2, 3], [1, 3]]
    assert [shape for _, shape in loaded] == [[3, 3], [2, 3]]
    assert {value for value, _ in [*saved, *loaded]} == {np.arange(15.0).tobytes().hex()}


@pytest.mark.processes
@SLOW
def test_hosts_of_mpi(tmp_path):
    if why_not := mpi_vendors.why_not("openmpi"):
        pytest.skip(why_not)
    variables = {**mpi_vendors.variables("openmpi"), "FUNCCOLL_TRANSPORT": "mpi", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(SUPPORT / "cases/uneven_shard_cases.py")]
    command = [mpi_vendors.mpirun("openmpi").path, "--oversubscribe", "-n", "3", *program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 3 1" for rank in range(3)]
