"""Named scopes: where they show, what they leave as it is, and that a profile of lines computes the same."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import TraceError
from funccoll.profiling import Profile

pytestmark = pytest.mark.covers("jit")


@pytest.fixture
def line():
    return fc.make_mesh({"d": 2})


@fc.named_scope("mlp")
def mlp(w, x):
    """A layer."""
    return np.tanh(x @ w)


def layer(w, x):
    with fc.named_scope("block"):
        y = mlp(w, x)
        with fc.named_scope("sum"):
            total = fc.all_reduce(np.sum(y), "d")
    return total


def plain(w, x):
    return fc.all_reduce(np.sum(np.tanh(x @ w)), "d")


W, X = np.eye(3, dtype=np.float32), np.ones((4, 3), np.float32)


def scopes(program):
    """By primitive, the scopes of its equations, at all depths."""
    return {(eqn.primitive.name, eqn.source.scope) for eqn, _ in program.executed() if eqn.source}


def test_texts_tables_and_errors_name_the_scope(line):
    lowered = fc.jit(layer, mesh=line, in_specs=(P(), P("d"))).lower(W, X)
    assert {("tanh", "block/mlp"), ("all_reduce", "block/sum")} <= scopes(lowered.program)
    assert "(mlp) in block/mlp" in lowered.as_text() and "(layer) in block/sum" in lowered.as_text()
    (row,) = lowered.collectives()
    assert row.source.scope == "block/sum" and "(layer) in block/sum" in repr(lowered.collectives())

    def wrong(x):
        with fc.named_scope("head"):
            return np.matmul(x, np.ones((7, 2), np.float32))

    with pytest.raises(fc.errors.ShapeError, match=r"at .*test_named_scopes.py:\d+ in wrong$"):
        fc.jit(wrong, mesh=line, in_specs=P("d"), out_specs=P("d"))(X)


def test_nothing_but_names_depends_on_scopes(line):
    named, other = (fc.jit(f, mesh=line, in_specs=(P(), P("d"))) for f in (layer, plain))
    assert named.lower(W, X).fingerprint == other.lower(W, X).fingerprint
    assert named.lower(W, X).program.text(sources=False) == other.lower(W, X).program.text(sources=False)
    assert float(named(W, X)) == float(other(W, X))
    assert mlp.__name__ == "mlp" and mlp.__doc__ == "A layer."
    with fc.named_scope("around"):  # a program does not depend on where it is called first
        found = fc.jit(plain, mesh=line, in_specs=(P(), P("d"))).lower(W, X)
    assert {scope for _, scope in scopes(found.program)} == {""}


def test_gradients_loops_and_batches_keep_the_scope(line):
    def loss(w, x):
        grads = fc.grad(lambda w: fc.all_reduce(np.sum(mlp(w, x)), "d"))(w)
        with fc.named_scope("loop"):
            carry, _ = fc.scan(lambda c, v: (c + mlp(grads, v[None])[0], None), x[0] * 0, x)
        with fc.named_scope("batch"):
            rows = fc.vmap(lambda v: np.sin(mlp(w, v[None]))[0])(x)
        return fc.all_reduce(np.sum(carry) + np.sum(rows), "d")

    found = scopes(fc.jit(loss, mesh=line, in_specs=(P(), P("d"))).trace(W, X).program)
    assert {scope for name, scope in found if name in ("matmul", "transpose")} >= {"mlp", "loop/mlp", "batch/mlp"}
    assert ("sin", "batch") in found and ("tanh", "loop/mlp") in found

    @fc.named_scope("deep")
    def deep(x, n):
        return np.cos(deep(x, n - 1)) if n else x

    def recursive(x):
        return np.exp(deep(x, 2))

    found = scopes(fc.jit(recursive).trace(X).program)
    assert found == {("cos", "deep"), ("cos", "deep/deep"), ("exp", "")}


def test_a_scope_ends_with_an_exception_and_is_of_one_thread():
    scope = fc.named_scope("a")
    with pytest.raises(KeyError), scope, scope:
        raise KeyError
    traced = lambda: scopes(fc.jit(np.sin).trace(X).program)
    seen = []
    with scope:
        thread = threading.Thread(target=lambda: seen.append(fc.jit(lambda x: mlp(W, x)).trace(X).program))
        thread.start()
        thread.join()
    assert scopes(seen[0]) == {("matmul", "mlp"), ("tanh", "mlp")} and {s for _, s in traced()} <= {""}


@pytest.mark.parametrize("name", ["", " ", "a\nb", 3, None, mlp])
def test_names_that_are_none(name):
    with pytest.raises(TraceError, match='named_scope takes a name in one line, such as "attention", not '):
        fc.named_scope(name)


def test_drawings_have_the_scopes(line):
    def deep(w, x):
        for i in range(30):
            x = mlp(w, x)
            if i % 10 == 9:
                with fc.named_scope("norm"):
                    x = x / np.max(x)
        return fc.all_reduce(np.sum(x), "d")

    for f in (layer, deep):
        program = fc.jit(f, mesh=line, in_specs=(P(), P("d"))).lower(W, X).program
        drawing = program.draw()
        outermost = {scope.partition("/")[0] for _, scope in scopes(program)} - {""}
        assert {e.text for e in drawing.scene.legend} >= {f"compute: {scope}" for scope in outermost}
        assert ("the same named scope" in " ".join(drawing.scene.notes)) == (f is deep)


@pytest.mark.usefixtures("numpy_compute")
def test_a_profile_of_lines_computes_the_same_and_names_the_line_of_an_exception(line, tmp_path):
    def step(x, i):
        with fc.named_scope("first"):
            y = np.tanh(x) * 2
            y = y + x
        picked = y[i]  # the line that raises
        return fc.all_reduce(picked * 3, "d"), np.exp(y)

    f = fc.jit(step, mesh=line, in_specs=(P("d"), P()), out_specs=(P(), P("d")))
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    before = [np.asarray(a) for a in f(x, 1)]
    with fc.profile(tmp_path):
        inside = [np.asarray(a) for a in f(x, 1)]
        with pytest.raises(IndexError) as caught:
            f(x, 7)
    after = [np.asarray(a) for a in f(x, 1)]
    for values in (inside, after):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(values, before, strict=True))
    (note,) = [note for note in caught.value.__notes__ if "test_named_scopes" in note]
    number = int(note.rpartition(":")[2].partition(" ")[0])
    text = Path(__file__).read_text().splitlines()
    assert "the line that raises" in text[number - 1]
    lines = Profile.load(tmp_path).lines
    assert len([line for line in lines if line.source.endswith("(step) in first")]) == 2
    assert any(line.source.endswith(f":{number} (step)") for line in lines)  # also of the call that it ended
