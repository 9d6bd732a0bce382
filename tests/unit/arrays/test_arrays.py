"""Arrays: in and out, resharding, immutability, memory that is shared and memory that is not, and how they look."""

import gc
import weakref

import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float

import funccoll as fc
from funccoll import P, Sharding
from tests.support.groups import in_groups
from tests.support.misuse import LINE, X
from tests.support.same_arrays import identity, same

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("arrays")]

MESH = fc.make_mesh({"data": 4, "model": 2})
GRID = np.arange(48, dtype=np.float32).reshape(8, 6)
SPECS = [P(), P("data"), P(None, "model"), P("model", None), P("data", "model"), P(("data", "model")), P(("model", "data"))]
DTYPES = [
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    fc.bfloat16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
]


# ---------------------------------------------------------------- in and out


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_device_put_and_back(spec):
    arr = fc.device_put(GRID, MESH, spec)
    assert arr.shape == (8, 6) and arr.dtype == np.float32 and arr.ndim == 2 and arr.size == 48 and arr.nbytes == 192
    assert arr.sharding == Sharding(MESH, spec) and len(arr) == 8
    assert same(arr, GRID) and same(fc.process_allgather(arr), GRID)
    assert len(arr.shards) == 8
    for device, shard in enumerate(arr.shards):
        assert same(shard, GRID[arr.sharding.index(arr.shape, MESH.coordinates(device))])
        assert shard.flags.c_contiguous and not shard.flags.writeable
    assert same(fc.from_local(arr.shards, MESH, spec), GRID)
    assert same(fc.device_put(GRID, Sharding(MESH, spec)), arr)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    value = (np.arange(8) % 2 if dtype is np.bool_ else np.arange(8)).astype(dtype)
    arr = fc.device_put(value, LINE, P("data"))
    assert arr.dtype == dtype and same(arr, value)
    assert same(identity(P("data"), LINE)(value), value)
    assert same(fc.jit(lambda x: x)(value), value)


LAYOUTS = {
    "reversed": GRID[::-1, ::-1],
    "strided": np.repeat(GRID, 2, axis=0)[::2],
    "fortran": np.asfortranarray(GRID),
    "transposed": np.ascontiguousarray(GRID.T).T,
    "big-endian": GRID.astype(">f4"),
    "read-only": np.frombuffer(GRID.tobytes(), np.float32).reshape(8, 6),
    "broadcast": np.broadcast_to(GRID[0], (8, 6)),
    "unaligned": np.frombuffer(b"\0" + GRID.tobytes(), np.uint8)[1:].view(np.float32).reshape(8, 6),
    "subclass": GRID.view(np.recarray),
    "empty": GRID[:0],
    "no columns": GRID[:, :0],
}


@in_groups("name", LAYOUTS, of=20)
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model")], ids=repr)
def test_every_memory_layout(name, spec):
    value = LAYOUTS[name]
    expected = np.array(value, np.float32)
    assert same(identity(spec)(value), expected)
    doubled = fc.jit(lambda x: x * 2, mesh=MESH, in_specs=(spec,), out_specs=spec)
    assert same(doubled(value), expected * 2)
    arr = fc.device_put(value, MESH, spec)
    assert same(arr, expected) and same(doubled(arr), expected * 2)
    strided = [np.asfortranarray(s) for s in arr.shards]
    assert same(fc.from_local(strided, MESH, spec), expected)


@pytest.mark.parametrize("value", [np.float32(3), np.array(3.0), 3.0, True, 2j, np.zeros(())], ids=repr)
def test_scalars(value):
    arr = fc.device_put(value, MESH)
    assert arr.shape == () and same(arr, np.asarray(value))
    assert same(fc.jit(lambda x: x)(value), np.asarray(value))
    assert all(s.shape == () for s in arr.shards)
    with pytest.raises(TypeError, match="without dimensions"):
        len(arr)


def test_what_else_device_put_takes():
    class Interface:
        __array_interface__ = GRID.__array_interface__

    class Dlpack:
        def __dlpack__(self, **kwargs):
            return GRID.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return (1, 0)

    for value in (Interface(), Dlpack(), GRID.tolist(), memoryview(GRID), fc.device_put(GRID, MESH, P("model"))):
        np.testing.assert_array_equal(np.asarray(fc.device_put(value, MESH, P("data"))), GRID)


def test_from_local_refuses_what_does_not_fit():
    same_everywhere = [X] * 4
    assert same(fc.from_local(same_everywhere, LINE, P()), X)
    nan = np.array([np.nan], np.float32)
    assert same(fc.from_local([nan] * 4, LINE, P()), nan)  # bitwise, not ==
    with pytest.raises(fc.errors.ShardingError, match=r"device 3 holds the same block.*differ"):
        fc.from_local([X, X, X, X + 1], LINE, P())
    with pytest.raises(fc.errors.ShardingError, match="differ"):
        fc.from_local([np.float32(0.0)] * 3 + [np.float32(-0.0)], LINE, P())
    with pytest.raises(fc.errors.ShapeError, match=r"block 3 is float32\[2\] and block 0 float32\[8\]"):
        fc.from_local([X, X, X, X[:2]], LINE, P("data"))
    for given, part in ((X, "one ndarray"), ([X] * 3, "a list of 3"), (None, "one NoneType")):
        with pytest.raises(fc.errors.MeshError, match=f"takes a list of 4 blocks.*{part}.*fc.device_put"):
            fc.from_local(given, LINE, P("data"))


def test_local_is_for_a_process_that_is_one_device():
    one = fc.make_mesh({"data": 1})
    assert same(fc.from_local(X, one, P("data")).local, X)
    with pytest.raises(fc.errors.MeshError, match=r"all 4 devices.*arr.shards\[device\]"):
        fc.device_put(X, LINE, P("data")).local


# ---------------------------------------------------------------- resharding


@in_groups("old", SPECS, repr)
@pytest.mark.parametrize("new", SPECS, ids=repr)
def test_resharding(old, new):
    arr = fc.device_put(GRID, MESH, old)
    moved = fc.device_put(arr, MESH, new)
    assert moved.sharding.spec == new and same(moved, GRID) and same(arr, GRID)
    assert same(identity(new)(arr), GRID)
    assert same(identity(new)(arr), GRID)  # from the cache
    other = fc.make_mesh({"x": 2})
    assert same(fc.device_put(arr, other, P("x")), GRID)


def test_donating_an_array_of_another_sharding():
    step = fc.jit(lambda x: x + 1, mesh=LINE, in_specs=(P("data"),), out_specs=P("data"), donate_argnums=(0,))
    arr = fc.device_put(X, LINE, P())
    assert same(step(arr), X + 1)
    assert arr.is_deleted()
    source = X.copy()
    assert same(step(source), X + 1) and same(source, X)  # a NumPy array stays the caller's
    again = fc.device_put(X, LINE, P("data"))
    kept = again.shards
    result = step(again)
    assert same(result, X + 1) and same(np.concatenate(kept), X)  # views taken before donation never change


# ---------------------------------------------------------------- nothing changes behind anyone's back


MAKERS = {
    "device_put whole": lambda v: fc.device_put(v, LINE),
    "device_put split": lambda v: fc.device_put(v, LINE, P("data")),
    "from_local whole": lambda v: fc.from_local([v] * 4, LINE, P()),
    "from_local split": lambda v: fc.from_local([v[:2], v[2:4], v[4:6], v[6:]], LINE, P("data")),
    "jit": fc.jit(lambda x: x),
    "jit whole": identity(P(), LINE),
    "jit split": identity(P("data"), LINE),
    "jit view": fc.jit(lambda x: x[2:]),
    "jit reshape": fc.jit(lambda x: x.reshape(2, 4).T),
    "jit pytree": lambda v: fc.jit(lambda d: d)({"a": [v]})["a"][0],
    "jit pvary": fc.jit(lambda x: x, mesh=LINE, in_specs=P(), out_specs=P("data")),
    "vjp residual": lambda v: fc.vjp(lambda x: x * x, v)[0],
}


@pytest.mark.parametrize("name", MAKERS)
def test_writing_to_the_source_changes_nothing(name):
    source = X.copy()
    result = MAKERS[name](source)
    before = np.array(result)
    assert not np.shares_memory(np.asarray(result), source)
    source[:] = -1
    assert same(result, before)


def test_captured_constants_are_frozen():
    constant = np.ones(8, np.float32)
    step = fc.jit(lambda x: x + constant)
    assert same(step(X), X + 1)
    constant[:] = 100
    assert same(step(X), X + 1)


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")  # NumPy 2.5
@pytest.mark.parametrize("shape", [(8,), ()])
def test_a_captured_array_counts_with_the_value_it_has_at_each_use(shape):
    buffer = np.zeros(shape, np.float32)

    def body(x):
        buffer[...] = 0
        out = [x + buffer]
        buffer[...] += 1
        return [*out, x + buffer, x * buffer, buffer]

    step = fc.jit(body)
    for _ in range(2):
        for got, want in zip(step(X), [X, X + 1, X, np.ones(shape, np.float32)], strict=True):
            assert same(got, want)
        buffer[...] = 7  # after tracing: the program does not change
    table = np.arange(8.0)
    reshaped = fc.jit(lambda x: [np.sum(table * x), table.__setattr__("shape", (2, 4)), np.sum(table, 0) + x[0]])(X)
    assert reshaped[2].shape == (4,)
    masks = lambda x: sum(np.sum(x * buffer) for i in range(3) if buffer.__setitem__(..., i) is None)
    assert same(fc.grad(masks)(X), np.full(8, 3, np.float32))


def test_arrays_refuse_assignment():
    arr = fc.device_put(X, LINE, P("data"))
    with pytest.raises(fc.errors.InPlaceError, match="never changes"):
        arr[0] = 1
    for view in (*arr.shards, fc.device_put(X, LINE).shards[0], np.asarray(fc.device_put(X, LINE))):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
    copied = np.array(arr)
    copied[:] = 5
    assert same(arr, X)
    with pytest.raises(ValueError, match="copy its blocks into one array"):
        arr.__array__(copy=False)
    assert np.asarray(fc.device_put(X, LINE), copy=True).flags.writeable


def test_outputs_alias_neither_inputs_nor_each_other():
    step = fc.jit(lambda x: (x, x, x[:4], x.reshape(2, 4)))
    source = X.copy()
    outs = step(source)
    for out in outs:
        assert not np.shares_memory(np.asarray(out), source)
    arr = fc.device_put(X, LINE)
    donated = fc.jit(lambda x: (x, x + 1), mesh=LINE, in_specs=(P(),), out_specs=(P(), P()), donate_argnums=0)
    first, second = fc.jit(lambda x: (x, x), mesh=LINE, in_specs=(P(),), out_specs=(P(), P()))(arr)
    for result in donated(first):
        np.asarray(result)
    assert same(second, X) and same(arr, X)


# ---------------------------------------------------------------- DLPack and the array interface


def test_dlpack_out():
    arr = fc.device_put(X, LINE, P("data"))
    out = np.from_dlpack(arr)
    assert same(out, X) and arr.__dlpack_device__() == (1, 0)
    whole = fc.device_put(X, LINE)
    out2 = np.from_dlpack(whole)
    assert same(out2, X)
    with pytest.raises((BufferError, ValueError, TypeError)):
        np.from_dlpack(fc.device_put(np.ones(2, fc.bfloat16), LINE))


def test_memory_lives_as_long_as_its_consumer():
    value = np.arange(1 << 16, dtype=np.float64)
    for consume in (np.from_dlpack, np.asarray, lambda a: a.shards[0], lambda a: np.asarray(_OnlyInterface(a))):
        arr = fc.device_put(value, LINE)
        gone = weakref.ref(arr)
        view = consume(arr)
        del arr
        gc.collect()
        assert gone() is None or view is not None
        noise = [np.full(1 << 16, -1.0) for _ in range(8)]  # would land in freed memory
        assert same(view, value) and len(noise) == 8


class _OnlyInterface:
    def __init__(self, arr):
        self.__array_interface__ = arr.__array_interface__


def test_array_interface():
    arr = fc.device_put(GRID, MESH, P("data", "model"))
    assert same(np.asarray(_OnlyInterface(arr)), GRID)
    assert not hasattr(fc.device_put(np.ones(2, fc.bfloat16), MESH), "__array_interface__")
    assert same(np.asarray(fc.device_put(np.ones(2, fc.bfloat16), MESH)), np.ones(2, fc.bfloat16))


# ---------------------------------------------------------------- annotations


def test_jaxtyping_annotations():
    arr = fc.device_put(GRID, MESH, P("data"))
    assert isinstance(arr, Float[fc.Array, "n m"])
    assert not isinstance(arr, Float[fc.Array, "n"])
    assert not isinstance(fc.device_put(np.arange(4), LINE), Float[fc.Array, "n"])
    assert isinstance(fc.device_put(np.ones(2, fc.bfloat16), LINE), jaxtyping.BFloat16[fc.Array, "n"])

    def body(x):
        assert isinstance(x, Float[fc.Array, "2 6"])
        assert not isinstance(x, Float[fc.Array, "8 6"])
        with jaxtyping.jaxtyped("context"):
            assert isinstance(x, Float[fc.Array, "n m"])
            assert not isinstance(x[0], Float[fc.Array, "n"])  # n is 2 here
        return scaled(x)

    assert not isinstance(GRID, fc.Array)
    assert isinstance(fc.jit(lambda x: x)(X), fc.Array)

    @jaxtyping.jaxtyped(typechecker=None)
    def scaled(x: Float[fc.Array, "n m"]) -> Float[fc.Array, "n m"]:  # noqa: F722
        return x * 2

    assert same(fc.jit(body, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(arr), GRID * 2)
