"""Our DistributedDataParallel where code expects torch's class: subclass, signature, attributes, reductions begun by hand."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import case_jobs
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install 'funccoll[torch]'", allow_module_level=True)

CHECKED = [
    "libraries_recognize_the_class", "pipelining", "reductions_begun_by_hand", "a_backward_pass_within_the_module",
    "buffers_are_broadcast_where_torch_does", "hooks_of_torch_by_their_private_names", "every_argument_of_torch",
    "ranks_evaluate_on_other_numbers_of_batches",
]  # fmt: skip
"""Cases which check everything themselves."""


@pytest.fixture(autouse=True)
def store(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file by which torch's processes find each other."""
    monkeypatch.setenv("TORCH_STORE", str(tmp_path_factory.mktemp("torch") / "store"))


@pytest.mark.parametrize("name", CHECKED)
def test_a_case(name):
    case_jobs.results("torch_interface_cases", name, 2)


def test_every_case_is_looked_at():
    names = re.findall(r"^@case\ndef (\w+)", (Path(__file__).parent / "torch_interface_cases.py").read_text(), re.MULTILINE)
    assert len(names) > 6 and all(f'"{name}"' in Path(__file__).read_text() for name in names)


def test_attributes_of_torch_are_ours_or_have_an_error():
    for found in case_jobs.results("torch_interface_cases", "every_attribute_of_torch", 2):
        assert "_run_ddp_forward" in found and "logger" in found


def test_meshes_of_torch_that_do_not_fit():
    for two, both in case_jobs.results("torch_interface_cases", "groups_and_meshes_of_torch", 2):
        assert two.startswith("MeshError: DistributedDataParallel: device_mesh has 2 dimensions"), two
        assert both.startswith("MeshError: DistributedDataParallel: process_group and device_mesh"), both
