"""Compiled functions of blocks, and collective groups, called with arrays of other types: an error, or the right values."""

from __future__ import annotations

import pytest

from tests.support.cases import block_call_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("fast-calls")


@pytest.fixture(params=[pytest.param("1", id="C"), pytest.param("0", id="python")])
def native(request, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_NATIVE", request.param)


@pytest.mark.parametrize("which", ["one group", "compute"])
def test_other_blocks_are_refused_on_this_rank_and_the_others_go_on(native, which):
    none, told = launch(cases.wrong_calls, 2, which)
    assert none == []
    assert [text.partition(":")[0] for text in told] == list(cases.WRONG)
    said = dict(text.split(": ", 1) for text in told)
    assert said["fewer"] == (
        "FunccollError: the blocks' function was called with 1 arrays, and was compiled for 2. Pass as many."
    )
    for name in ("None", "an object", "a list", "a str", "float64", "int32 of the same bytes", "another byte order"):
        assert said[name].startswith("DTypeError: argument 1 of the blocks' function is "), said[name]
        assert "and it was compiled for f32[2]. Pass an array of that shape and dtype" in said[name]
    for name, what in (("None", "of type NoneType"), ("float64", "float64[2]"), ("another byte order", ">f4[2]")):
        assert f"is {what}, and" in said[name], said[name]
    for name in ("another shape of the same size", "flat", "what broadcasts", "swapped"):
        assert said[name].startswith("ShapeError: argument 0 of the blocks' function is float32["), said[name]
    assert not any("was taken" in text for text in told)


def test_blocks_in_other_memory_have_the_same_results(native):
    launch(cases.equal_calls, 2)


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_a_group_reads_nothing_of_an_array_that_does_not_fit(native, nbytes):
    told, none = launch(cases.wrong_arguments_of_a_group, 2, nbytes)
    kind = "all_reduce" if nbytes == 64 else "broadcast"
    size = nbytes // 4
    assert none == [] and told == [
        *(f"all_reduce was called with {n} arrays, and was compiled for 2. Pass as many." for n in (0, 1, 3)),
        *(
            f"argument 1 of {kind} is {what}, and the call was compiled for f32[{size}]. Pass an array of that dtype and size."
            for what in ("of type NoneType", f"f32[{size - 1}]", f"f64[{size}]", f"i32[{size}]")
        ),
    ]
