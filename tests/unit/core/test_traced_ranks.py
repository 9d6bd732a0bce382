"""fc.rank() in functions that are traced for virtual devices: warned of once, at the user's line."""

import warnings
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P

pytestmark = pytest.mark.covers("job-checks")

MESH = fc.make_mesh({"data": 2, "model": 2})


def warned(call, *args):
    """The warnings that a call shows, of each line one."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        call(*args)
    return found


def boundary(x):
    return x + (fc.rank() == 0)


def jitted(fn: Any, mesh: fc.Mesh = MESH) -> Any:
    return fc.jit(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


def test_whole():
    (found,) = warned(jitted(boundary), np.ones(2))
    assert found.category is fc.TracedRankWarning
    assert (found.filename, found.lineno) == (__file__, boundary.__code__.co_firstlineno + 1)
    assert str(found.message) == (
        "fc.rank() is read while boundary is traced: it is this process's number, a constant of the program, 0 on all 4 "
        "devices of the mesh. A device's own position is fc.axis_index('data') or fc.axis_index('model'); np.where(...) "
        "decides by it. Code that runs once for each process belongs outside of the traced function."
    )


def test_once_for_a_line_and_in_a_loop_that_is_traced_again():
    step = jitted(lambda x: fc.fori_loop(0, 3, lambda i, c: boundary(c) + x, np.zeros(1)))
    other = jitted(lambda x: boundary(x) * 2, fc.make_mesh({"data": 2}))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        step(np.ones(2))
        step(np.ones(2))
        other.lower(np.ones(2))
    assert [str(w.message).count("axis_index") for w in found] == [2, 1]  # another text, of another mesh
    assert "A device's own position is fc.axis_index('data'); np." in str(found[1].message)


@pytest.mark.parametrize(
    "call",
    [
        fc.rank,
        lambda: fc.jit(boundary)(np.ones(2)),  # one device: it is the process
        lambda: jitted(boundary, fc.make_mesh({"data": 1}))(np.ones(2)),
        lambda: fc.grad(lambda x: np.sum(x) + fc.rank())(np.ones(2)),
        lambda: jitted(lambda x: fc.pure_callback(lambda y: y + fc.rank(), x, x))(np.ones(2)),
        lambda: jitted(lambda x: x + fc.world_size())(np.ones(2)),
        lambda: jitted(lambda x: (fc.make_mesh({"data": 2}), x)[1])(np.ones(2)),
    ],
)
def test_what_is_no_mistake(call):
    assert not warned(call)


def test_our_own_modules_mean_the_process():
    """Code of funccoll that runs while a function is traced, as DataParallel.save."""
    source = compile("def number(): return rank()", fc.__file__, "exec")
    names = {"rank": fc.rank}
    exec(source, names)
    assert not warned(jitted(lambda x: x + names["number"]()), np.ones(2))
