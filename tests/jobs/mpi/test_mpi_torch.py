"""Training of torch modules on two hosts: buckets travel during backward passes, by default."""

from __future__ import annotations

import sys

import pytest

from tests.jobs.mpi.test_mpi import run
from tests.support.lazy_modules import need

pytestmark = [pytest.mark.covers("torch-ddp", "mpi"), pytest.mark.slow]

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

SCRIPT = """
import os
import torch
import funccoll as fc
fc.init()
from funccoll.torch import DistributedDataParallel
from tests.support.cases import torch_ddp_cases, torch_overlap_cases
torch_ddp_cases.begin()
model = DistributedDataParallel(torch_overlap_cases.mlp())
assert model.overlap and model.bucket_bytes_cap == 1 << 20
large = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(600, 600)))
assert large._reducer.assignment.buckets == ((3, 2), (1, 0))  # a bias beside its weight of more than the limit
for name, case in torch_ddp_cases.CASES.items():
    if case.__module__ == torch_overlap_cases.__name__ or name in ("gradients_are_means", "uneven_inputs"):
        case()
os.write(1, f"rank {fc.rank()} is fine\\n".encode())
"""


@pytest.mark.parametrize(("vendor", "counts"), [("openmpi", (1, 1)), ("mpich", (2, 1))])
def test_buckets_travel_between_hosts(vendor, counts, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run(vendor, counts, [sys.executable, str(script)], TORCH_STORE=str(tmp_path / "store"))
