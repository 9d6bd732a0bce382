"""An exception of compiled code keeps its type and text, and its notes name the user's line that computed it."""

import traceback

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from tests.support.misuse import LINE, X
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("errors")


def note_of(kind, jitted, *args):
    """The note of the exception `kind` that a call raises, as (line within the function's source, its name)."""
    with pytest.raises(kind) as caught:
        jitted(*args)
    assert type(caught.value) is kind
    notes = caught.value.__notes__
    assert len(notes) == 1 + (kind is IndexError)
    assert notes[0] in "".join(traceback.format_exception(caught.value)).splitlines()
    where, _, function = notes[0].partition(" in ")
    file, _, line = where.rpartition(":")
    assert file == f"  at {__file__}"
    return int(line) - jitted.fn.__code__.co_firstlineno, function


def picked(x, i):
    y = x + 1
    z = np.take(y, i, axis=0)
    return z * 2


def reduced_then_picked(x, i):
    total = fc.all_reduce(x, "data")
    shifted = x - total
    return shifted[i]


def power(x, n):
    return (x * 2).astype(np.int64) ** n


@pytest.mark.parametrize("options", [{}, {"mesh": LINE, "in_specs": (P("data"), P()), "out_specs": P("data")}])
def test_a_line_of_compute_is_named(options):
    far, negative = np.array([8]), np.array(-1)
    assert note_of(IndexError, fc.jit(picked, **options), X, far) == (2, "picked")
    assert note_of(ValueError, fc.jit(power, **options), X, negative) == (1, "power")
    if options:
        assert note_of(IndexError, fc.jit(reduced_then_picked, **options), X, far) == (3, "reduced_then_picked")


def test_a_line_is_named_on_every_way_into_a_program():
    i = np.array([0])
    compiled = fc.jit(picked)
    ready = fc.jit(lambda x: x)(X), fc.jit(lambda i: i)(i)
    compiled(X, i)
    compiled(*ready)  # arguments are known to fit from here on
    assert note_of(IndexError, compiled, X, np.array([8])) == (2, "picked")
    assert note_of(IndexError, compiled, ready[0], fc.jit(lambda i: i)(i + 8)) == (2, "picked")


def test_the_gradient_names_the_line_of_the_function():
    def loss(x, i):
        return np.sum(picked(x, i))

    jitted = fc.jit(fc.grad(loss))
    jitted.fn = picked
    assert note_of(IndexError, jitted, X, np.array([8])) == (2, "picked")


def test_an_exception_before_the_program_runs_has_no_note():
    with pytest.raises(TypeError) as caught:
        fc.jit(lambda x, y: x)(X)
    assert not hasattr(caught.value, "__notes__")


AT_I = {"mesh": fc.make_mesh({"a": 2, "b": 2}), "out_specs": P(("a", "b"))}
ROWS = np.arange(8.0)


def looked_up(table, batch):
    return table[batch["ids"]]


def set_at(table, batch):
    return fc.at(table * 2)[batch["ids"]].set(0.0)


def in_a_branch(table, batch):
    return fc.cond(batch["ids"].sum() > 0, lambda: table[batch["ids"]], lambda: table[batch["ids"] * 0])


def of_a_sum(table, batch):
    return table[batch["ids"] + batch["ids"]]


def labelled(table, batch):
    return fc.nn.cross_entropy(table[None], batch["ids"] + 0)


_LABEL = "a label of fc.nn.cross_entropy ({}) is not one of the classes; a negative one is shown less their number"
NOTES = {
    "an argument": (looked_up, P(), "  on rank 2 (a=1, b=0), of the index batch['ids'] of looked_up, into table of looked_up"),
    "an update of a value": (set_at, P(("a", "b")), "  on rank 2 (a=1, b=0), of the index batch['ids'] of set_at"),
    "an index of several": (of_a_sum, P(), "  on rank 2 (a=1, b=0), into table of of_a_sum"),
    "a label": (labelled, P(), "  on rank 2 (a=1, b=0), " + _LABEL.format("batch['ids'] of labelled")),
}


@pytest.mark.parametrize("name", NOTES)
def test_an_index_out_of_bounds_has_its_device_and_its_argument(name):
    fn, spec, note = NOTES[name]
    jitted = fc.jit(fn, in_specs=(spec, P(("a", "b"))), **AT_I)
    good = np.zeros(4, np.int32)
    jitted(ROWS, {"ids": good})
    for ids in (np.where(np.arange(4) == 2, 9, 0), np.where(np.arange(4) >= 2, 9, 0)):
        with pytest.raises(IndexError, match=r"index (9|18) is out of bounds") as caught:
            jitted(ROWS, {"ids": ids.astype(np.int32)})
        assert caught.value.__notes__[1:] == [note]


def test_a_label_of_a_gradient_is_told_as_one():
    loss = lambda p, y: np.mean(fc.nn.cross_entropy(p * np.ones((2, 3)), y))
    with pytest.raises(IndexError, match="index -103 is out of bounds") as caught:
        fc.jit(fc.grad(loss))(np.ones(3), np.array([1, -100]))
    assert caught.value.__notes__[1:] == ["  " + _LABEL.format("y of <lambda>")]


def test_an_index_that_all_devices_have_is_of_none():
    jitted = fc.jit(looked_up, in_specs=(P(), P()), mesh=AT_I["mesh"], out_specs=P())
    with pytest.raises(IndexError) as caught:
        jitted(ROWS, {"ids": np.array([9])})
    assert caught.value.__notes__[1:] == ["  of the index batch['ids'] of looked_up, into table of looked_up"]


def test_an_index_out_of_bounds_in_a_branch_has_no_wrong_device():
    jitted = fc.jit(in_a_branch, in_specs=(P(), P(("a", "b"))), **AT_I)
    with pytest.raises(IndexError) as caught:
        jitted(ROWS, {"ids": np.where(np.arange(4) == 2, 9, 0)})
    assert not any("rank" in note and "rank 2" not in note for note in caught.value.__notes__)


@pytest.mark.processes
def test_an_index_out_of_bounds_has_its_rank():
    wanted = "  on rank 1, of the index i of <lambda>, into x of <lambda>"
    assert launch(index_out_of_bounds, 2) == [[], [wanted]]


def index_out_of_bounds():
    mesh = fc.make_mesh({"d": 2})
    pick = fc.jit(lambda x, i: x[i], mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    try:
        pick(ROWS, np.array([1, 9]))
    except IndexError as error:
        return error.__notes__[1:]
    return []
