"""Callers of signatures, and their dispatch, by the C extension and in Python: both do the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree
import pytest

import funccoll as fc
from funccoll import P
from funccoll.arrays.array import Array
from funccoll.arrays.array_layout import ArrayLayout, layout_of
from funccoll.compiler import fast_paths
from funccoll.compiler.fast_paths import MOST_FAST_PATHS, PythonDispatch, make_fast_path
from funccoll.core.c_extension import extension
from funccoll.core.sharding import Sharding
from tests.support.array_shapes import set_shape
from tests.support.groups import in_groups

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("fast-calls")]
KINDS = ["python", *(["C"] if extension is not None else [])]
DISPATCHES = {"python": PythonDispatch, "C": getattr(extension, "Dispatch", None)}
MESH = fc.make_mesh({"d": 4})


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    monkeypatch.setattr(fast_paths, "extension", None if request.param == "python" else extension)
    return request.param


def layout(shape: tuple[int, ...], dtype: Any = np.float32, spec: Any = None) -> Any:
    return layout_of(shape, np.dtype(dtype), Sharding(MESH, spec or P()))


def fast_path(
    leaves: Sequence[Any],
    layouts: Sequence[Any],
    run: Callable[..., Any],
    outs: Sequence[Any],
    tree: Any = None,
    failed: Callable[[BaseException], object] = lambda error: None,
) -> Any:
    return make_fast_path(leaves, layouts, run, outs, optree.treespec_leaf() if tree is None else tree, failed)


A = layout((4,))
X = Array(A, np.arange(4, dtype=np.float32))


def test_an_array(kind):
    call = fast_path([X], [A], lambda x: (x + 1,), [A])
    found = call((X,))
    assert type(found) is Array and found.layout is A and list(np.asarray(found)) == [1, 2, 3, 4]
    assert call([X]).layout is A  # leaves of a pytree are a list


def test_arrays_of_numpy_and_several_results(kind):
    b = layout((2, 2), np.int64)
    tree = optree.tree_structure([0, 0])  # type: ignore[arg-type]
    call = fast_path([np.ones((2, 2), np.int64), X], [b, A], lambda n, x: (n * 2, x), [b, A], tree)
    first, second = call((np.full((2, 2), 3), X))
    assert np.asarray(first).tolist() == [[6, 6], [6, 6]] and second._copies is X._copies


@pytest.mark.parametrize(
    "leaves",
    [
        (),
        (X, X),
        (1.0,),
        (np.arange(4, dtype=np.float32),),
        (Array(layout((4,), np.int32), np.zeros(4, np.int32)),),
        (Array(layout((4,), spec=P("d")), np.zeros(4, np.float32)),),
        ("text",),
        (None,),
    ],
)
def test_other_arguments_than_an_array(kind, leaves):
    assert fast_path([X], [A], lambda x: (x,), [A])(leaves) is NotImplemented


class Mine(np.ndarray):
    pass


@in_groups(
    "leaf",
    [
        X,
        np.zeros(5, np.float32),
        np.zeros((4, 1), np.float32),
        np.zeros(4),
        np.zeros(4, ">f4"),
        np.float32(1),
        [0.0] * 4,
        np.zeros(4, np.float32).view(Mine),
        np.ma.masked_array(np.zeros(4, np.float32)),
        np.zeros((), np.float32),
    ],
)
def test_other_arguments_than_an_array_of_numpy(kind, leaf):
    assert fast_path([np.zeros(4, np.float32)], [A], lambda x: (x,), [A])((leaf,)) is NotImplemented


def test_an_array_of_numpy_that_is_not_contiguous_is_copied(kind):
    given = []
    call = fast_path([np.zeros(4, np.float32)], [A], lambda x: (given.append(x), (x,))[1], [A])
    x = np.arange(8, dtype=np.float32)[::2]
    assert list(np.asarray(call((x,)))) == [0, 2, 4, 6] and given[0].flags.c_contiguous
    y = x.copy()
    call((y,))
    assert np.shares_memory(given[1], y)


def test_an_array_of_numpy_is_split_over_virtual_devices(kind):
    split = layout((8,), spec=P("d"))
    call = fast_path([np.zeros(8, np.float32)], [split], lambda blocks: ([b + 1 for b in blocks],), [split])
    assert np.asarray(call((np.arange(8, dtype=np.float32),))).tolist() == [*range(1, 9)]


def test_deleted_arrays_do_not_fit(kind):
    x = Array(A, np.zeros(4, np.float32))
    call = fast_path([x], [A], lambda x: (x,), [A])
    x.give_up()
    assert call((x,)) is NotImplemented
    y = Array(A, None)  # as one that another thread gives up, between
    if kind == "C":
        assert call((y,)) is NotImplemented


@pytest.mark.parametrize("leaf", [1, 1.0, Array(layout((8,), spec=P("d")), None), np.zeros(4, ">f4"), [1.0]])
def test_arguments_that_take_more_work_have_no_caller(kind, leaf):
    assert fast_path([leaf], [A], lambda x: (x,), [A]) is None


ONE, WHOLE = fc.make_mesh({"m": 1}), fc.make_mesh({"m": 2})


@pytest.mark.parametrize(("mesh", "spec"), [(ONE, P()), (ONE, P("m")), (WHOLE, P())])
def test_an_array_of_another_mesh_that_is_one_block_is_taken_as_it_is(mesh, spec):
    x = fc.device_put(np.arange(4.0), mesh, spec)
    f = fc.jit(lambda x: x * 2)
    for _ in range(2):
        assert np.array_equal(f(x), [0, 2, 4, 6])
    assert len(f.fast_paths) == 1 and np.array_equal(f.fast_paths[0]((x,)), [0, 2, 4, 6])
    assert f.fast_paths[0]((fc.device_put(np.arange(4.0), fc.make_mesh({"n": 1}), P()),)) is NotImplemented
    kept = fc.jit(lambda x: x)(x)  # an argument that is a result
    del x
    assert np.array_equal(f(kept), [0, 2, 4, 6])


def test_an_array_of_another_mesh_in_several_blocks_is_put_together():
    x, f = fc.device_put(np.arange(4.0), WHOLE, P("m")), fc.jit(lambda x: x * 2)
    for _ in range(2):
        assert np.array_equal(f(x), [0, 2, 4, 6])
    assert not f.fast_paths


def test_a_donated_array_of_another_mesh_is_deleted():
    x = fc.device_put(np.arange(4.0), ONE, P())
    other, f = fc.jit(lambda x: x)(x), fc.jit(lambda x: x * 2, donate_argnums=0)
    assert np.array_equal(f(x), [0, 2, 4, 6]) and np.array_equal(other, np.arange(4))
    with pytest.raises(fc.errors.DeletedArrayError, match="was donated"):
        f(x)


def test_exceptions_are_noted(kind):
    noted = []

    def run(x: Any) -> Any:
        raise OverflowError("too much")

    call = fast_path([X], [A], run, [A], failed=noted.append)
    with pytest.raises(OverflowError, match="too much") as error:
        call((X,))
    assert noted == [error.value]
    assert any(entry.name == "run" for entry in error.traceback)


def test_an_exception_of_the_note_has_the_first_as_context(kind):
    def note(error: BaseException) -> None:
        raise LookupError("second")

    call = fast_path([X], [A], lambda x: 1 / 0, [A], failed=note)
    with pytest.raises(LookupError, match="second") as error:
        call((X,))
    assert isinstance(error.value.__context__, ZeroDivisionError)


def test_an_exception_after_the_run_is_noted(kind):
    noted = []
    tree = optree.tree_structure([0, 0])  # type: ignore[arg-type]
    call = fast_path([X], [A], lambda x: (x,), [A], tree, noted.append)  # one result too few
    with pytest.raises((ValueError, TypeError)):
        call((X,))
    assert len(noted) == 1


def test_arguments_are_held_while_it_runs(kind):
    held = []

    def run(block: Any) -> Any:
        x.give_up()  # another thread donates it
        gc.collect()
        held.append(block[0])
        return (block,)

    x = Array(A, np.ones(4, np.float32))
    call = fast_path([x], [A], run, [A])
    call((x,))
    assert held[-1] == 1


def test_nobody_else_resizes_or_reshapes_an_argument_while_it_runs(kind):
    def run(x: Any, y: Any) -> Any:  # in the place of another thread
        with pytest.raises(ValueError, match="resize"):
            x_given.resize(1000, refcheck=False)
        set_shape(x_given, (2, 2))
        return (x + y,)

    x_given, y = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    call = fast_path([np.zeros(4, np.float32), y], [A, A], run, [A])
    assert np.asarray(call((x_given, y))).tolist() == [1, 2, 3, 4]
    assert call((x_given, y)) is NotImplemented
    x_given.resize(8, refcheck=False)  # afterwards it may
    assert call((x_given, y)) is NotImplemented


def test_an_argument_stays_as_it_is_while_another_one_is_split(kind, monkeypatch):
    split, shapes = layout((8, 2), spec=P("d")), []
    x, y = (np.arange(16, dtype=np.float32).reshape(8, 2) for _ in range(2))
    blocks = ArrayLayout.split

    def other_code(self: ArrayLayout, value: Any) -> Any:  # in the place of another thread
        set_shape(y, (2, 8))
        shapes.append(value.shape)
        return blocks(self, value)

    monkeypatch.setattr(ArrayLayout, "split", other_code)
    call = fast_path([x, y], [split, split], lambda a, b: ([p + q for p, q in zip(a, b, strict=True)],), [split])
    assert np.asarray(call((x, y))).tolist() == (x * 2).tolist() and shapes == [(8, 2)] * 2


def test_nothing_leaks(kind):
    blocks = [np.zeros(4, np.float32) for _ in range(3)]
    watched = [weakref.ref(block) for block in blocks]
    b = layout((4,))
    call = fast_path([X, np.zeros(4, np.float32)], [A, b], lambda x, y: (x + y,), [A])
    results = [call((Array(A, block), block)) for block in blocks]
    watched += [weakref.ref(result) for result in results]
    results.clear()
    blocks.clear()
    gone = weakref.ref(call) if kind == "python" else None
    del call
    gc.collect()
    assert not any(ref() for ref in watched) and (gone is None or gone() is None)


# ---------------------------------------------------------------- dispatch


def dispatch(kind: str) -> Any:
    class Found(DISPATCHES[kind]):
        def __init__(self) -> None:
            super().__init__()
            self.slow: list[Any] = []

        def fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.slow.append((args, kwargs))
            return "slow"

    return Found()


def test_dispatch(kind):
    found, b = dispatch(kind), layout((4,), np.int32)
    n = Array(b, np.zeros(4, np.int32))
    assert found(X) == "slow" and found(1, key=2) == "slow" and found.slow == [((X,), {}), ((1,), {"key": 2})]
    found.fast_paths.insert(0, fast_path([X], [A], lambda x: (x + 1,), [A]))
    found.fast_paths.insert(0, fast_path([n], [b], lambda x: (x + 2,), [b]))
    assert list(np.asarray(found(X))) == [1, 2, 3, 4]
    assert list(np.asarray(found(n))) == [2] * 4
    assert found(X, n) == "slow" and found(key=X) == "slow" and found() == "slow"
    found.fast_paths.clear()
    assert found(X) == "slow"


def test_a_jitted_function_keeps_few_callers():
    f = fc.jit(lambda x: x + 1)
    for n in range(1, 3 * MOST_FAST_PATHS):
        assert f(np.zeros(n)).shape == (n,)
    assert len(f.fast_paths) == MOST_FAST_PATHS
    for n in range(1, 3 * MOST_FAST_PATHS):
        assert np.asarray(f(np.full(n, n))).tolist() == [n + 1] * n
    f.clear_cache()
    assert not f.fast_paths and f(np.zeros(2)).shape == (2,)


@pytest.mark.parametrize("number", [True, 2, 2.0, 2j, np.float32(2), np.int64(2), np.bool_(True), np.float16(2)])
def test_numbers_are_quick(number, monkeypatch):
    f = fc.jit(lambda x, n: x * n)
    x = np.arange(3, dtype=np.float32)
    first = f(x, number)
    monkeypatch.setattr(f, "_compile_and_call", None)
    again = f(x, number)
    assert again.dtype == first.dtype == (x * number).dtype and np.asarray(again).tolist() == (x * number).tolist()
    monkeypatch.undo()
    assert f(x, np.float64(2)).dtype == np.float64 and f(x, 3).dtype == np.float32


def test_pytrees_numbers_and_keywords_after_flat_calls():
    f = fc.jit(lambda x, scale=1: {"y": x * scale})
    x = np.arange(3.0)
    for _ in range(3):
        assert f(x)["y"].tolist() == [0, 1, 2]
        assert f(x, 2)["y"].tolist() == [0, 2, 4]
        assert f(x, scale=3)["y"].tolist() == [0, 3, 6]
        assert f(x, np.full(3, 2.0))["y"].tolist() == [0, 2, 4]
    g = fc.jit(lambda t: t["a"] - t["b"])
    for i in range(3):
        assert np.asarray(g({"a": x, "b": x * i})).tolist() == (x - x * i).tolist()
        assert np.asarray(g({"b": x.astype(np.float32), "a": x})).tolist() == [0, 0, 0]


def test_an_argument_that_another_thread_has_changed_before_a_slow_call_is_refused():
    x = np.zeros((2, 3))
    compiled = fc.jit(lambda x: x + 1).lower(x).compile()
    set_shape(x, (3, 2))
    with pytest.raises(fc.errors.ShapeError, match=r"was float64\[2, 3\] when it was called, and is \[3, 2\] now"):
        compiled.execute([x])
