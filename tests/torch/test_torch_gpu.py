"""DistributedDataParallel for modules on GPUs, over fakes: torch's device is one of the host's memory."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import case_jobs
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-gpu")

spec = importlib.util.find_spec("torch")  # to import it takes seconds
if spec is None or spec.origin is None:
    pytest.skip("torch is not installed: pip install 'funccoll[torch]'", allow_module_level=True)
if not Path(spec.origin).with_name("_C").joinpath("_acc").exists():
    pytest.skip("this torch has no devices that are written in Python", allow_module_level=True)

RANKS = case_jobs.ALIKE


def told(name: str, n: int) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_gpu_told", name, n)


@pytest.mark.parametrize("n", case_jobs.SLOW_ALIKE)
@pytest.mark.parametrize(
    "name",
    [
        "training_has_the_bits_of_the_cpu",
        "a_backward_pass_ends_in_the_devices_thread",
        "a_thread_is_known_where_torch_takes_the_callers_reference",
        "several_passes_and_no_sync",
        "kept_gradients_do_not_change",
        "communication_hooks",
        "uneven_inputs",
    ],
)
def test_a_case(name, n):
    case_jobs.results("torch_gpu_cases", name, n)


@pytest.mark.parametrize("n", RANKS)
def test_unused_parameters_are_found_or_named(n):
    for (text,) in told("unused_parameters", n):
        assert "computed no gradient of" in text and "on rank 0" in text and f"'parts.{n + 1}.weight'" in text, text


@pytest.mark.parametrize("n", RANKS)
def test_what_cannot_be_trained_is_refused_by_name(n):
    wanted = [
        r"ModuleError: '0.weight' is on fake:0 and '1.bias' on cpu: a process has one device. Move the whole module",
        r"ModuleError: device_ids=\[1\]: the module is on fake:0, and a process has one device. Give device_ids=\[0\]",
        r"ModuleError: device_ids=\[0, 0\]: the module is on fake:0",
        r"ModuleError: device_ids=\['cpu'\]: the module is on fake:0",
        "no error",
        "no error",
        "ModuleError: gradients of 'weight' are sparse, and on GPUs only dense ones are reduced",
        "ModuleError: the module is on meta, and was on cpu when it was wrapped. Move a module before",
        "ProgramMismatch: .*parameter 0.weight: float32.* on fake",
        "ModuleError: the wrapped module was called while a CUDA graph is captured",
        r"MissingPackageError: '0.weight' is on fake:0, and modules on GPUs need CuPy: pip install 'funccoll\[cuda13\]'",
        r"DeviceError: '0.weight' is on fake:0, and this process \(rank \d\) computes on GPU 3: each process has one",
    ]
    for texts in told("refusals", n):
        for text, pattern in zip(texts, wanted, strict=True):
            assert re.match(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("n", RANKS)
def test_another_thread_is_refused(n):
    for stranger, worker in told("backward_in_another_thread", n):
        assert stranger.startswith("ModuleError: the backward pass of a module on fake:0 was begun by a thread that has never")
        assert worker.startswith("FunccollError: thread 'worker' called a collective over a mesh whose collectives belong to")
        assert "thread 'MainThread', which called one before" in worker, worker


@pytest.mark.slow
def test_ranks_that_share_a_gpu_use_our_kernel():
    """Simulated, with the bits of the CPU; NCCL, which refuses that, is not called."""
    with Ranks("from tests.support.ranks import torch_gpu_shared\ntorch_gpu_shared.main()", range(2), imports=TORCH) as ranks:
        assert [ranks.end(rank) for rank in range(2)] == [(0, ["trained"], "")] * 2


FAILS = (
    JOIN
    + """
"""
    + """
import torch
from tests.support.cases import torch_gpu_cases as cases
from tests.support.fakes.fake_torch_device import DeviceTensor, move
from funccoll.torch import DistributedDataParallel
import funccoll as fc
cases.begin()
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        assert threading.current_thread() is not threading.main_thread()
        if rank == 1 and step == 2:
            {how}
        return g
module = DistributedDataParallel(move(cases.mlp()), bucket_cap_mb_list=[1e-6])
try:
    for step in range(4):
        module(Fails.apply(DeviceTensor(cases.batch(step)).requires_grad_())).sum().backward()
except fc.FunccollError as error:
    say(type(error).__name__, str(error).replace(chr(10), " "))
    sys.exit()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died without a word"),
        ("raise ValueError('a bad batch')", "rank 1 raised ValueError: a bad batch"),
    ],
)
def test_a_rank_that_fails_in_its_devices_thread_is_named(how, words):
    with Ranks(FAILS.replace("{how}", how), range(2), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        line = ranks.line(0)
        assert line.startswith("PeerFailure") and words in line, line
