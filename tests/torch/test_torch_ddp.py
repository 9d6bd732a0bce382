"""DistributedDataParallel for torch modules: every behaviour of torch's that makes sense here, on real processes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.groups import in_groups
from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs
from tests.support.ranks.ranks import JOIN, TORCH, Ranks

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

RANKS = case_jobs.RANKS


def results(name: str, n: int = 2) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_ddp_cases", name, n)


@pytest.mark.parametrize("n", RANKS)
def test_misuse_is_refused_before_anything_is_sent(n):
    wanted = [
        "ModuleError: the module has no parameter that requires a gradient",
        r"ModuleError: device_ids=\[0\], output_device=None: the module is on the CPU",
        "ModuleError: the module has a DistributedDataParallel in it already",
        "ModuleError: the module has a DistributedDataParallel in it already",
        "ModuleError: 'weight' is on the device meta",
        "ModuleError: DistributedDataParallel: mixed_precision is planned",
        r"MeshError: DistributedDataParallel: abstract_mesh\(.* has no process for each of its 2 devices",
        "MeshError: DistributedDataParallel: process_group is 'gloo'. Give a mesh",
        "DTypeError: 'weight' has dtype torch.float8_e4m3fn",
    ]
    for found in results("refusals", n):
        for text, words in zip(found, wanted, strict=True):
            assert re.match(words, text), text
            assert "torch_ddp_cases.py" in text  # the user's line


@pytest.mark.parametrize("n", RANKS)
def test_ranks_with_other_parameters_are_told_the_first_difference(n):
    wanted = [
        r"number 0 is parameter weight: float32\[2, 2\] \(trained\) on rank 0, and parameter weight: float32\[3, 2\]",
        r"number 0 is parameter weight: float32.* on rank 0, and parameter weight: float64",
        r"number 1 is nothing on rank 0, and parameter bias: float32\[2\] \(trained\)",
        r"number 0 is parameter weight: float32\[2, 2\] \(trained\) on rank 0, and parameter weight: float32\[2, 2\] on rank",
        r"number 0 is parameter a.weight.* on rank 0, and parameter b.weight",
    ]
    for found in results("ranks_with_other_parameters", n):
        for text, words in zip(found, wanted, strict=True):
            assert text.startswith("ProgramMismatch") and re.search(words, text), text
            assert f"on rank {n - 1}. All ranks" in text


def test_limits_of_buckets():
    for found in results("limits_of_buckets"):
        assert found == [
            [[3, 2], [1, 0]],
            [[2], [1, 0]],
            [[2], [1], [0]],
            [[3], [2], [1, 0]],
            [[3], [2, 1, 0]],
        ]


@pytest.mark.parametrize("n", RANKS)
def test_parameters_without_a_gradient_are_named_on_all_ranks(n):
    for found in results("unused_parameters", n):
        for text in found:
            assert text.startswith("ModuleError: the backward pass computed no gradient of 'parts.0.weight'"), text
            assert "'parts.2.bias' on rank 0; 'parts.1.weight', 'parts.1.bias', 'parts.2.weight'" in text
            assert "find_unused_parameters=True" in text and "torch_gradient_cases.py" in text


@pytest.mark.parametrize("n", RANKS)
def test_sparse_embeddings_are_averaged_and_tied_ones_refused(n):
    for (text,) in results("sparse_embeddings", n):
        assert text.startswith("ModuleError: the gradient of 'words.weight' is dense, and its embedding has sparse=True")


@pytest.mark.parametrize("n", RANKS)
def test_checkpoints_of_shared_parameters_need_static_graph(n):
    for (text,) in results("checkpoints", n):
        assert re.match(r"ModuleError: the gradient of '\S+' was complete twice in one backward pass", text), text
        assert "static_graph=True" in text


@pytest.mark.parametrize("n", RANKS)
def test_parameters_that_are_thawed_are_refused(n):
    for text in results("frozen_and_tied", n):
        assert text.startswith("ModuleError: '1.bias' had no gradient when the module was wrapped"), text


COMPILED = (
    JOIN
    + """
from tests.support.cases import torch_ddp_cases
import warnings
torch_ddp_cases.begin()
warnings.simplefilter("ignore")  # dynamo's and inductor's own
say(torch_ddp_cases.compiled(hear()))
"""
)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_modules_have_one_graph_and_no_break(backend, tmp_path):
    """A compiled module in the wrapper, and the compiled wrapper; inductor takes 15 s for its C++."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    with Ranks(COMPILED, range(2), imports=TORCH, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        for rank in range(2):
            ranks.tell(rank, backend)
        assert set(ranks.lines().values()) == {"[[1, 0], [1, 0]]"}
        ranks.end_well()


@pytest.mark.parametrize("n", RANKS)
def test_another_thread_is_refused(n):
    for text in results("backward_in_another_thread", n):
        assert "thread 'MainThread', which called one before" in text and "torch_ddp_cases.py" in text, text


@pytest.mark.parametrize("n", RANKS)
def test_a_wrapper_after_the_end_of_the_job(n):
    for texts in results("use_after_finalize", n):
        assert all("this process has left the job" in text for text in texts), texts


@pytest.mark.parametrize("n", RANKS)
def test_uneven_inputs_join_or_end_on_all_ranks(n):
    for (text,) in results("uneven_inputs", n):
        assert text.startswith("UnevenBatchesError: the inputs of rank 0 have ended, and those of others have not"), text


def test_the_logged_data_have_torchs_fields():
    for rank, found in enumerate(results("logging_data")):
        assert found.pop("forward_compute_time") > 0 and found.pop("backward_comm_time") > 0
        assert found.pop("backward_compute_time") > 0
        assert found == {
            "world_size": 2,
            "rank": rank,
            "module_name": "Sequential",
            "backend_name": "funccoll",
            "iteration": 1,
            "bucket_cap_bytes": 104,
            "num_parameter_tensors": 6,
            "total_parameter_size_bytes": 480,
            "dtypes": "float64",
            "bucket_sizes": "32, 128, 32, 128, 32, 128",
            "rebuilt_bucket_sizes": "32, 128, 32, 128, 32, 128",
            "has_rebuilt_buckets": True,
            "num_buckets_reduced": 6,
            "broadcast_buffers": True,
            "find_unused_parameters": False,
            "gradient_as_bucket_view": False,
            "static_graph": False,
            "comm_hook": "",
        }


# ---------------------------------------------------------------- torch's behaviours, by the names of TORCH_DISTRIBUTED.md

HELD = {
    "G1 constructor, no trainable parameter": "test_torch_ddp.py::test_misuse_is_refused_before_anything_is_sent",
    "G1 parameters are compared": "test_torch_ddp.py::test_ranks_with_other_parameters_are_told_the_first_difference",
    "G2 initial broadcast, in parts": "state_in_parts",
    "G3 limits of buckets": "test_torch_ddp.py::test_limits_of_buckets",
    "G4 averages, dtypes apart": "torch_gradient_cases.py::dtypes_and_layouts",
    "G5 buffers come from rank 0": "buffers_of_rank_0",
    "G6 no_sync": "torch_gradient_cases.py::accumulation",
    "G7 unused parameters": "torch_gradient_cases.py::unused_parameters",
    "G7 or an error that names them": "test_torch_ddp.py::test_parameters_without_a_gradient_are_named_on_all_ranks",
    "G8 sparse gradients": "test_torch_ddp.py::test_sparse_embeddings_are_averaged_and_tied_ones_refused",
    "G9 pickling": "state_and_pickles",
    "G10 communication hooks": "torch_registration_cases.py::functions_of_a_bucket",
    "G11 post-local SGD, as torch's hook": "torch_hook_cases.py::torch_hooks",
    "G12 SyncBatchNorm": "test_torch_sync_batch_norm.py::test_it_is_batch_norm_of_all_rows",
    "G14 gradient_as_bucket_view": "torch_gradient_cases.py::kept_gradients_do_not_change",
    "G14 static_graph": "torch_gradient_cases.py::static_graph_knows_unused_parameters",
    "G15 logged data": "test_torch_ddp.py::test_the_logged_data_have_torchs_fields",
    "G16 hooks in any order": "torch_gradient_cases.py::hooks_in_another_order",
    "H1 join": "test_torch_ddp.py::test_uneven_inputs_join_or_end_on_all_ranks",
}


@in_groups("behaviour", HELD)
def test_each_behaviour_has_its_test(behaviour):
    file, _, name = HELD[behaviour].rpartition("::")
    text = next(Path(__file__).parents[1].rglob(file or "torch_ddp_cases.py")).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE), HELD[behaviour]


def test_the_status_page_names_the_rest():
    page = (Path(__file__).parents[2] / "docs/status.md").read_text()
    for words in ("`Join` of several objects", "`mixed_precision`", "delayed all_reduce", "for torch on GPUs"):
        assert any(words in row and "Planned" in row for row in page.split("\n") if row.startswith("|")), words


# ---------------------------------------------------------------- one process


def test_a_single_process_needs_no_job():
    import torch

    from funccoll.torch import DistributedDataParallel

    module = DistributedDataParallel(torch.nn.Linear(2, 2))
    with module.no_sync():
        module(torch.ones(1, 2)).sum().backward()
    assert module.module.weight.grad.eq(1).all() and module._get_ddp_logging_data()["world_size"] == 1


# ---------------------------------------------------------------- ranks that fail

FAILS = (
    JOIN
    + """
import torch
from funccoll.torch import DistributedDataParallel
import funccoll as fc
torch.set_num_threads(1)
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        if rank == 1 and step == 2:
            {how}
        return g
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
    def forward(self, x):
        x = self.parts[0](x)
        return self.parts[2](self.parts[1](Fails.apply(x)))
module = DistributedDataParallel(Model(), bucket_cap_mb_list={caps})
try:
    for step in range(4):
        if rank == 1 and step == 2 and {alone}:
            module.eval()
            module(torch.ones(2, 3))
            other = DistributedDataParallel(Model())
        module.zero_grad()
        module(torch.ones(2, 3)).sum().backward()
except fc.FunccollError as error:
    say(type(error).__name__, str(error).replace(chr(10), " "))
    {then}
"""
)


@pytest.mark.parametrize(
    ("how", "alone", "kind", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "PeerFailure", "rank 1 died without a word"),
        pytest.param(
            "raise ValueError('a bad batch')",
            False,
            "PeerFailure",
            "rank 1 raised ValueError: a bad batch",
            marks=pytest.mark.slow,
        ),
        pytest.param("pass", True, "P", "ranks wait for each other: rank", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("caps", [[1e-6], pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_rank_that_fails_is_named(how, alone, kind, words, caps):
    """In the backward pass, or by calling the wrapper alone: the other rank is told in its backward pass."""
    script = FAILS.format(how=how, alone=alone, caps=caps, then="sys.exit()")
    with Ranks(script, range(2), imports=TORCH) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        told = ranks.line(0)
        assert told.startswith(kind) and words in told and "rank_server.py" in told, told


@pytest.mark.parametrize("n", RANKS)
def test_what_is_written_in_flight_is_named_on_all_ranks(n):
    for found in results("what_is_written_in_flight", n):
        assert len(found) == 3
        for text in found:
            assert text.startswith(f"ModuleError: the backward pass wrote 'layers.3.weight' on rank {n - 1}, or took its"), text
