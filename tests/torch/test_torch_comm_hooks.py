"""Communication hooks of torch modules: torch's own against torch's wrapper, ours, and what is refused, on real processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs

pytestmark = pytest.mark.covers("torch-hooks")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

RANKS = case_jobs.SLOW_ALIKE


def results(name: str, n: int) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_hook_cases", name, n)


@pytest.mark.parametrize("n", RANKS)
def test_power_sgd_in_several_buckets(n):
    """Torch's own wrapper crashes there, with Gloo."""
    assert results("power_sgd_in_several_buckets", n) == [4] * n


@pytest.mark.parametrize("n", RANKS)
def test_buckets_as_hooks_see_them(n):
    first = [[0, False, ["first.bias"]], [1, False, ["first.weight"]], [2, False, ["scalar"]], [3, True, ["matrix"]]]
    rebuilt = [[0, False, ["scalar"]], [1, False, ["matrix"]], [2, False, ["first.weight"]], [3, True, ["first.bias"]]]
    for found in results("buckets_as_hooks_see_them", n):
        assert found == first + 2 * rebuilt


@pytest.mark.parametrize("n", RANKS)
def test_parameters_without_a_gradient_are_named_with_hooks_too(n):
    for text in results("unused_parameters", n):
        assert text.startswith("ModuleError: the backward pass computed no gradient of 'parts.1' on rank 0. Make every"), text


@pytest.mark.parametrize("n", RANKS)
def test_ours_by_name(n):
    for found in results("ours_by_name", n):
        assert found == ["all_reduce", "comm_hooks.float16", "comm_hooks.bfloat16", "comm_hooks.int8"]


@pytest.mark.parametrize("n", RANKS)
def test_refused_at_registration(n):
    once = "Register one hook, once, before the first backward pass."
    where = "DistributedDataParallel: communication hook"
    wanted = [
        f"ModuleError: register_comm_hook: hook comm_hooks.int8 was registered first. {once}",
        f"ModuleError: register_comm_hook: gradients were reduced first. {once}",
        *["ModuleError: register_comm_hook: gradients of 'weight' are sparse, and hooks take dense ones"] * 2,
        "ModuleError: register_comm_hook: comm_hooks.float16 is a function of the bucket alone.* given state is {'a': 1}",
        "ModuleError: register_comm_hook: comm_hooks.power_sgd is a function of the bucket alone",
        "ModuleError: register_comm_hook: 'fp16' is not the name of a hook. Names are 'all_reduce', 'float16'",
        "ModuleError: register_comm_hook: 16 is not a hook. Give a function",
        r"ModuleError: register_comm_hook: .*<lambda>\(\) takes neither \(state, bucket\)",
        "TraceError: comm_hooks.float16 makes a hook, and was called with a bucket: give comm_hooks.float16()",
        rf"VaryingError: {where} .*<lambda> returned a gradient .* for params\['4.bias'\], which varies over 'data'",
        f"TraceError: {where} .*<lambda> must return the bucket with other gradients",
        "ShapeError: bucket 0 has ",
        f"TraceError: {where} .*<lambda> returned a state of ",
        "ProgramMismatch: register_comm_hook: the hooks of the ranks differ: means, fp16_compress_hook",
    ]
    for found in results("refused_at_registration", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(words, text), text
            assert "torch_registration_cases.py" in text  # the user's line


@pytest.mark.parametrize("n", RANKS)
def test_wrong_results_name_hook_and_bucket(n):
    where = r"communication hook wrong_results.<locals>.<lambda>, bucket 0: it returned"
    wanted = [
        rf"ShapeError: {where} a tensor of shape \[244\], and the bucket's is \[245\]",
        rf"ShapeError: {where} a tensor of shape \[1, 245\]",
        f"DTypeError: {where} a tensor of torch.float64, and the gradients are of torch.float32",
        rf"ModuleError: {where} a tensor on meta \(torch.strided\)",
        rf"ModuleError: {where} a tensor on cpu \(torch.sparse_coo\)",
        f"ModuleError: {where} None. It must return a".replace("bucket 0", "bucket 1"),
        f"ModuleError: {where} 'text'. It must return a",
        "KeyError: 0$",
        "KeyError: 'last'$",
        r"ShapeError: GradBucket.set_buffer: bucket 0 has a buffer of shape \[245\], and was given \[244\]",
        "(?s)RuntimeError: Got the following error when running the callback: KeyError: None",
    ]
    for found in results("wrong_results", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(words, text), text


@pytest.mark.parametrize("n", RANKS)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(n):
    for rank, (early, late) in enumerate(results("failures_of_one_rank", n)):
        name = "communication hook failures_of_one_rank.<locals>"
        if rank == n - 1:
            assert early == "KeyError: 'one'"
            assert late.startswith(f"ShapeError: {name}.fails_late, bucket 3: it returned a tensor of shape")
        else:
            assert early.startswith(f"ModuleError: {name}.begins_nothing failed on rank {n - 1}: KeyError: 'one'. The back")
            assert late.startswith(f"ModuleError: {name}.fails_late failed on rank {n - 1}: ShapeError: {name}.fails_late,")
