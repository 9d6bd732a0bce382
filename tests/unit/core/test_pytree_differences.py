"""Errors about pytrees: they say at which place two trees differ."""

import re
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import PytreeError

pytestmark = pytest.mark.covers("jit")

X = np.ones(2)
Pair = namedtuple("Pair", "left right")


@fc.tree.dataclass
class Dense:
    weight: Any
    bias: Any


def with_specs(in_specs, out_specs, *args):
    fc.jit(lambda *args: args[0], mesh=fc.make_mesh({"i": 1}), in_specs=in_specs, out_specs=out_specs)(*args)


# fmt: off
CASES = {
    "one dict": (lambda: with_specs({"w": P()}, P(), {"w": X}),
                 "is the dict {'w': P()}, and must be a tuple with one entry for each argument, 1 here. If these are the "
                 "specs of one argument, write in_specs=({'w': P()},)."),
    "one large dict": (lambda: with_specs({f"weight{i}": P("i") for i in range(9)}, P(), X), "write in_specs=({...},)."),
    "one dataclass": (lambda: with_specs(Dense(P(), P()), P(), Dense(X, X)), "write in_specs=(Dense(weight=P(), bias=P()),)."),
    "a key": (lambda: with_specs((P(), {"a": {"w": P()}}), P(), X, {"a": {"v": X}}),
              "in_specs[1]['a'] is a dict with the key 'w', and the arguments have a dict with the key 'v' there."),
    "one of many keys": (lambda: with_specs(({f"w{i}": P() for i in range(9)},), P(), {f"w{i}": X for i in range(10)}),
                         "is a dict with 9 keys, and the arguments have a dict with 10 keys ('w9' among them) there."),
    "a length": (lambda: with_specs(({"a": [P(), P()]},), P(), {"a": [X, X, X]}),
                 "in_specs[0]['a'] is a list of 2, and the arguments have a list of 3 there."),
    "an array": (lambda: with_specs(({"a": (P(),)},), P(), {"a": X}),
                 "in_specs[0]['a'] is a tuple of 1, and the arguments have one value there."),
    "a field": (lambda: with_specs((Dense(P(), (P(),)),), P(), Dense(X, X)),
                "in_specs[0].bias is a tuple of 1, and the arguments have one value there."),
    "a field of a named tuple": (lambda: with_specs((Pair(P(), (P(),)),), P(), Pair(X, X)),
                                 "in_specs[0].right is a tuple of 1, and the arguments have one value there."),
    "a compiled function's argument": (lambda: fc.jit(lambda x, tree: x).lower(X, {"a": Pair(X, X)}).compile()(X, {"a": X}),
                                       "tree['a'] is one value, and those that it was compiled for have a Pair with 2"),
    "a class": (lambda: with_specs((Pair(P(), P()),), P(), (X, X)),
                "in_specs[0] is a Pair with 2 children, and the arguments have a tuple of 2 there."),
    "results": (lambda: with_specs((P(),), {"a": (P(), P())}, {"a": [X, X]}),
                "out_specs['a'] is a tuple of 2, and the results have a list of 2 there."),
    "vmap": (lambda: fc.vmap(lambda t: t, ({"a": 0},))({"b": X}),
             "in_axes[0] is a dict with the key 'a', and the arguments have a dict with the key 'b' there."),
    "a carry": (lambda: fc.fori_loop(0, 2, lambda i, c: {"a": c["a"], "b": 1.0}, {"a": 1.0}),
                "carry is a dict with the keys 'a', 'b', and init has a dict with the key 'a' there."),
    "a branch": (lambda: fc.cond(True, lambda: {"y": (X, X)}, lambda: {"y": X}),
                 "['y'] is one value, and that of <lambda> has a tuple of 2 there."),
    "tangents": (lambda: fc.jvp(lambda t: t["a"], ({"a": X},), ({"a": (X,)},)),
                 "tangents[0]['a'] is a tuple of 1, and the arguments have one value there."),
    "gradients": (lambda: fc.optim.sgd(0.1).update({"w": X}, fc.optim.sgd(0.1).init([X]), [X]),
                  "is a dict with the key 'w', and"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_the_place_is_named(name):
    call, words = CASES[name]
    with pytest.raises(PytreeError, match=re.escape(words)) as caught:
        call()
    sentences = str(caught.value).partition("\n")[0]
    assert sentences.count(". ") <= 2 and "PyTreeSpec" not in sentences
