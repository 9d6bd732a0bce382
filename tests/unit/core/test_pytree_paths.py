"""Names of arguments and of places in pytrees, in messages: those that the user wrote, by one rule."""

import functools
import inspect
import re
from collections import namedtuple
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.core.pytree_paths import argument_names, parameter_names, path_name, path_names
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("jit")

MESH = fc.make_mesh({"i": 2})
X, BAD = np.ones(4), np.ones(3)
Pair = namedtuple("Pair", "left right")


@fc.tree.dataclass
class Dense:
    weight: Any
    bias: Any

    @fc.jit
    def apply(self, x):
        return x @ self.weight + self.bias


def step(params, batch, *rest):
    return params["w"].sum() + batch.sum()


def jitted(fn, spec=P("i"), **options):
    return fc.jit(fn, mesh=MESH, in_specs=spec, out_specs=P("i"), **options)


CALLS = {
    "a name": (lambda: jitted(step)({"w": X}, BAD), "batch of step of shape (3,) cannot be split"),
    "a key": (lambda: jitted(step)({"w": BAD}, X), "params['w'] of step of shape (3,)"),
    "a keyword": (lambda: jitted(lambda x, batch: x)(X, batch=BAD), "batch of <lambda> of shape"),
    "*rest": (lambda: jitted(step)({"w": X}, X, X, [X, BAD]), "rest[1][1] of step of shape"),
    "*args": (lambda: jitted(lambda *args: args[0])(X, BAD), "args[1] of <lambda> of shape"),
    "after a static one": (lambda: jitted(lambda n, x, y: x, static_argnums=0)(3, X, BAD), "y of <lambda> of shape"),
    "after a default": (lambda: jitted(lambda x, n=2, y=None: x, static_argnames="n")(X, y=BAD), "y of <lambda> of shape"),
    "without a signature": (lambda: jitted(max)(X, BAD), "args[1] of max of shape"),
    "a partial": (lambda: jitted(functools.partial(step, {"w": 1.0}))(BAD), "batch of partial of shape"),
    "a method": (lambda: Dense(X, np.array("a")).apply(X), "self.bias of apply has dtype"),
    "a named tuple": (lambda: jitted(lambda pair: pair.left)(Pair(X, BAD)), "pair.right of <lambda> of shape"),
    "static": (lambda: fc.jit(lambda x, n: x, static_argnums=1)(X, [1]), "the static argument n of <lambda>"),
    "grad": (lambda: fc.grad(lambda p, layer: 0.0, argnums=1)(X, Dense(1.0, 2)), "<lambda>: layer.bias has dtype int64"),
    "grad of *args": (lambda: fc.grad(lambda *args: 0.0, argnums=(0, -1))(1.0, 2.0, 3), "<lambda>: args[2] has dtype"),
    "jacrev": (lambda: fc.jacrev(lambda x, y: x, argnums=1)(X, [1]), "<lambda>: y[0] has dtype int64"),
    "vmap": (lambda: fc.vmap(lambda x, tree: x)(X, tree={"a": BAD}), "x has 4, tree['a'] has 3 along"),
    "nondiff": (lambda: fc.jit(fc.custom_vjp(step, (1,)).defvjp(step, step))({"w": X}, X), "the argument batch of step is in"),
    "carry": (lambda: fc.fori_loop(0, 2, lambda i, c: Dense(c.weight, BAD), Dense(X, X)), "the carry.bias enters"),
    "scan": (lambda: fc.scan(lambda c, x: (c, x), 0.0, Dense(X, 1.0)), "xs.bias is a scalar"),
    "cond": (lambda: fc.cond(True, lambda: Dense(X, X), lambda: Dense(X, BAD)), "cond: result.bias is"),
    "result": (lambda: fc.jit(lambda x: Dense(x, object()))(X), "at result.bias: a traced function returns"),
    "compiled": (lambda: fc.jit(step).lower({"w": X}, X).compile()({"w": X}, BAD), "batch of step"),
}


@in_groups("name", CALLS)
def test_arguments_have_their_names(name):
    call, words = CALLS[name]
    with pytest.raises(fc.errors.FunccollError, match=re.escape(words)):
        call()


KINDS = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


@given(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 8))
def test_positions_have_the_parameters_that_python_binds(only, either, rest, count):
    """Each name, evaluated where the parameters have their values, is the argument at its position."""
    parameters = [inspect.Parameter(f"p{i}", KINDS[i >= only]) for i in range(only + either)]
    parameters += [inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL)] * rest
    names = parameter_names(inspect.Signature(parameters), count)
    assert len(names) == len(set(names)) == count
    if count <= only + either or rest:
        bound = inspect.Signature(parameters).bind_partial(*range(count)).arguments
        assert [eval(name, {}, dict(bound)) for name in names] == [*range(count)]


TREES = st.recursive(
    st.just(0),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("a'b", max_size=2), inner, max_size=3),
        st.builds(Dense, inner, inner),
        st.builds(Pair, inner, inner),
        st.tuples(inner, st.none()),
    ),
    max_leaves=8,
)


@given(TREES, st.dictionaries(st.sampled_from("xyz"), TREES))
def test_a_name_is_the_expression_of_its_leaf(tree, keywords):
    leaves, treedef = optree.tree_flatten(tree)
    numbered = treedef.unflatten(range(len(leaves)))
    names = path_names("tree", treedef)
    assert [eval(name, {}, {"tree": numbered}) for name in names] == [*range(len(leaves))]
    assert [path_name("tree", treedef, i) for i in range(len(leaves))] == names
    all_names = argument_names(lambda a, *b, **c: 0, [tree, tree], keywords)
    wanted = [*path_names("a", treedef), *path_names("b[0]", treedef)]
    for name in sorted(keywords):
        wanted += path_names(name, optree.tree_structure(keywords[name]))
    assert all_names == wanted
    assert argument_names(lambda a, *b: 0, [tree, tree], positions=(1,)) == path_names("b[0]", treedef)
