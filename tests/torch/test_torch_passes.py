"""Gradients are averaged, those of one step, before anything uses them: or an error says so on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")


def results(name: str, n: int = 2) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_pass_cases", name, n)


RANKS = case_jobs.SLOW_ALIKE
FILE = r"torch_(?:pass_cases|steps)\.py"
PLACE = rf"\({FILE}:\d+ \((square|<lambda>|\w+)\)\)"


@pytest.mark.parametrize("n", RANKS)
def test_a_backward_pass_around_the_wrapper_warns_once_with_the_users_line(n):
    for found in results("the_module_in_place_of_its_wrapper", n):
        assert len(found) == 6
        for text, name in zip(found, ["'2.", "'0.", "'2."] * 2, strict=True):
            assert text.startswith(f"torch_pass_cases.py:LINE RuntimeWarning: gradients of {name}"), text
            assert "are not averaged over ranks" in text and "no_sync()" in text
            assert "torch_pass_cases.py:LINE in <lambda>" in text
    for (text,) in results("a_forward_pass_that_is_never_followed", n):
        assert "are not averaged over ranks" in text


@pytest.mark.parametrize("n", RANKS)
def test_parameters_that_are_added_or_replaced_are_refused_by_name(n):
    wanted = [
        "'3.weight', '3.bias' were added after wrapping",
        "'1.weight', '1.bias' were added after wrapping",
        "'2.weight', '2.bias' were replaced after wrapping",
        *["'0.weight', '0.bias', '1.weight', '1.bias', '2.weight' and 1 more were replaced after wrapping"] * 2,
        "'0.weight' was replaced after wrapping",
        "'1.parametrizations.weight.original0', '1.parametrizations.weight.original1' were added after wrapping; '1.weight' "
        "was removed after wrapping",
        "'1.more' was added after wrapping",
    ]
    for found in results("changed_modules", n):
        for text, words in zip(found, wanted, strict=True):
            assert text.startswith(f"ModuleError: {words}: gradients of new parameters would not be averaged"), text
            assert "Wrap the module again" in text
    for found in results("a_parameter_that_only_others_see", n):
        assert all(text.startswith("ModuleError: '1.bias' was replaced after wrapping") for text in found), found
    for text in results("changes_that_do_no_harm", n):
        assert text.startswith("ModuleError: 'frozen' had no gradient when the module was wrapped, and requires one now"), text


@pytest.mark.parametrize("n", RANKS)
def test_parameters_that_only_some_ranks_freeze_are_named_on_all(n):
    for found in results("parameters_that_some_ranks_freeze", n):
        assert len(found) == 6
        for text in found:
            assert re.match(
                r"ModuleError: ranks have frozen different parameters after wrapping \(requires_grad_\(False\)\): "
                r"'0\.weight', '0\.bias' on rank 1\. Freeze the same ones on all ranks",
                text,
            ), text


@pytest.mark.parametrize("n", RANKS)
def test_an_optimizer_in_a_hook_is_refused_on_all_ranks(n):
    for found in results("optimizers_in_hooks", n):
        assert found.pop().startswith("ModuleError: the backward pass wrote '0.weight' on rank 1, or took its gradient away")
        assert len(found) == 8
        for number, text in enumerate(found):
            alone = number % 2 == 0
            name = "'noise'" if number % 4 == 0 else "'scale', 'noise'"
            assert text.startswith(f"ModuleError: the backward pass wrote {name}"), text
            assert ("on rank 0" in text) != alone and "on rank 1" in text
            assert "before that was averaged" in text and "_apply_optimizer_in_backward" in text


@pytest.mark.parametrize("n", RANKS)
def test_a_skipped_backward_pass_is_named_on_all_ranks(n):
    for found in results("a_skipped_backward_pass", n):
        assert len(found) == 8
        for text in found:
            assert re.match(rf"ModuleError: rank {n - 1} skipped the backward pass of its forward 2 {PLACE}", text), text
            assert "skip_if" in text
    wanted = {
        "twice": "went backward again after its forward 2",
        "validates_alone": "skipped the backward pass of its forward 2",
        "trains_in_evaluation_mode": "skipped the backward pass of its forward 3",
        "fails_in_the_backward_pass": "skipped the backward pass of its forward 2",
        "fails_in_the_forward_pass": "skipped the backward pass of its forward 2",
        "skips_two": f"skipped the backward pass of its forward 2 {PLACE} and of 1 later one",
        "by_hand": "skipped the backward pass of its forward 2",
    }
    for found in results("passes_that_do_not_belong_together", n):
        for text, (name, words) in zip(found, wanted.items(), strict=True):
            assert re.match(f"{name}: ModuleError: rank {n - 1} {words}", text) and re.search(FILE, text), text


@pytest.mark.parametrize("n", RANKS)
def test_a_backward_pass_too_many_is_named_at_its_line_when_it_meets_the_others_next_step(n):
    for found in results("a_backward_pass_too_many", n):
        assert len(found) == 6
        for number, text in enumerate(found):
            forward = 3 + 3 * (number % 2)
            wanted = rf"rank 0's backward pass of its forward {forward} {PLACE} added to gradients that were averaged before"
            assert re.match(f"ModuleError: {wanted}, and rank 1's of its forward {forward} {PLACE} began new ones", text), text


TRAINS_ALONE = (
    JOIN
    + """
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_pass_cases import mlp, trains, validates
model = DistributedDataParallel(mlp())
try:
    for step in range(3):
        trains(model)
        if {more} and rank == 0:
            model.zero_grad()
            validates(model)
    if not {more} and rank == 0:
        trains(model)
    say("done")
except RuntimeError as error:
    say(str(error).split("\\n")[0])
"""
)


@pytest.mark.parametrize("more", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_rank_that_goes_on_alone_is_not_taken_for_the_one_that_all_wait_for(more):
    """A pass too many which zeroes its gradients first is found when the other rank has ended."""
    with Ranks(TRAINS_ALONE.format(more=more), range(2), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        lines = ranks.lines()
        assert lines[1] == "done"
        forward = r"forward {} \(\S+:\d+ \({}\)\)"
        perhaps = f", perhaps that of its {forward.format(2, 'validates')}, averaged with another line's" if more else ""
        assert re.match(
            "rank 1 has skipped a backward pass or made fewer steps, or rank 0, now in the backward pass of its "
            rf"{forward.format(4, 'validates' if more else 'square')}, has made one too many{perhaps}\. Let all",
            lines[0],
        ), lines[0]
        ranks.end_well()


@pytest.mark.parametrize("n", RANKS)
def test_all_ranks_skip_a_step_together(n):
    for (text,) in results("steps_that_all_skip", n):
        assert text.startswith("ModuleError: in join, all ranks with inputs act in one order, and rank 0 begins a"), text
        assert "rank 1 calls skip_if()" in text


@pytest.mark.parametrize("n", RANKS)
def test_a_skipped_backward_pass_before_a_broadcast_of_buffers(n):
    for found in results("a_skipped_backward_pass_with_buffers", n):
        for number, text in enumerate(found):
            skipped = [[0], [1], [rank for rank in range(n) if rank != 1]][number // 2]
            texts = "; ".join(rf"rank {rank} skipped the backward pass of its forward 4 {PLACE}" for rank in skipped)
            assert re.match(f"ModuleError: {texts}, and the other ranks did not", text) and "skip_if" in text, text
        assert len(found) == 6
    for (text,) in results("without_the_others", n):
        assert re.match("ModuleError: rank 1 skipped the backward pass", text) and "skip_if" in text, text
