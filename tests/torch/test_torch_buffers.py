"""Buffers of torch modules: broadcast whatever they have become, without a trace in graphs, or refused on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

RANKS = case_jobs.ALIKE


def results(name: str, n: int = 2) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_buffer_cases", name, n)


@pytest.mark.parametrize("n", RANKS)
def test_ranks_with_other_buffers_are_told_the_first_difference(n):
    last = n - 1
    wanted = [
        *[rf"buffer 'cos' is \[12, 1\] on rank {last}, \[8, 1\] on rank 0\. They are broadcast before each"] * 2,
        rf"buffer 'cos' is float64\[8, 1\] on rank {last}, float32\[8, 1\] on rank 0",
        rf"buffer 'mask' is on rank {last}, and not on rank 0",
        rf"buffer 'mask' is on rank 0, and not on rank {last}",
        rf"buffer 'layer\.a' is on rank {last}, and not on rank 0",
        rf"buffers are in the order cos, b, a on rank {last}, cos, a, b on rank 0",
        rf"buffer 'cos' is \[12, 1\] on rank {last}, \[8, 1\] on rank 0",
    ]
    for found in results("ranks_with_other_buffers", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(f"ModuleError: {words}", text), text
            assert "broadcast_buffers=False" in text and re.search(r"at .*tests/support/cases/\w+\.py:\d+ in", text)


@pytest.mark.parametrize("n", RANKS)
def test_buffers_that_were_not_compared_at_first(n):
    for text in results("not_compared_at_first", n):
        assert re.match(r"ModuleError: buffer 'cos' is \[2\] on rank 1, \[1\] on rank 0", text), text


@pytest.mark.parametrize("n", RANKS)
def test_inputs_that_end(n):
    for equal, grown in results("inputs_that_end_with_other_buffers", n):
        assert equal == "no error", equal
        assert re.match(r"ModuleError: buffer 'cos' is \[\d\] on rank 1, \[\d\] on rank 0", grown), grown


@pytest.mark.parametrize("n", RANKS)
def test_kinds_of_tensors_are_named_with_the_remedy(n):
    wanted = [
        "'weight' is uninitialized: its Lazy module .* Before it is wrapped, call the module once",
        "'1.running_mean' is uninitialized",
        r"'kind' is a nested tensor.* Register torch\.nested\.to_padded_tensor\(x, 0\.0\)",
        "'kind' is a nested tensor",
        r"'kind' is a TwoTensor: its class keeps .*_set_params_and_buffers_to_ignore_for_model\(module, \['kind'\]\)",
        "'kind' is quantized, of dtype torch.quint8",
        r"'kind' is of layout sparse_coo, and only dense tensors are broadcast. Register x\.to_dense\(\)",
        "'kind' is of layout sparse_csr",
        r"'kind' was made in torch\.inference_mode\(\).* register x\.clone\(\), called outside of it",
        "'kind' is uninitialized",
    ]
    for found in results("refused_kinds", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(f"ModuleError: {words}", text), text
            assert "torch_buffer_cases.py" in text


@pytest.mark.parametrize("n", RANKS)
def test_kinds_that_come_later_are_named_on_all_ranks(n):
    wanted = [
        "'kind' is a nested tensor",
        "'kind' is of layout sparse_coo",
        "'kind' cannot be read: .*meta",
        "'kind' has dtype torch.float8_e4m3fn, which funccoll does not support",
    ]
    for found in results("kinds_that_come_later", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(f"ModuleError: on rank 1 the buffer {words}", text), text
