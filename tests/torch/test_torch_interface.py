"""Our DistributedDataParallel where code expects torch's class: subclass, signature, attributes, reductions begun by hand."""

from __future__ import annotations

from typing import Any

import pytest

import funccoll as fc
from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")


def results(name: str) -> list[Any]:
    """A case's results on all ranks."""
    return case_jobs.results("torch_interface_cases", name, 2)


def test_attributes_of_torch_are_ours_or_have_an_error():
    for found in results("every_attribute_of_torch"):
        assert "_run_ddp_forward" in found and "logger" in found


def test_meshes_of_torch_that_do_not_fit():
    for two, both in results("groups_and_meshes_of_torch"):
        assert two.startswith("MeshError: DistributedDataParallel: device_mesh has 2 dimensions"), two
        assert both.startswith("MeshError: DistributedDataParallel: process_group and device_mesh"), both


def test_a_module_given_to_the_class_for_functions_names_ours():
    import torch

    class WithParams(torch.nn.Linear):
        params = ()

    for kind in (torch.nn.Linear, WithParams):
        words = rf"^DataParallel: {kind.__name__} is a torch module\. Pass it to funccoll\.torch\.DistributedDataParallel"
        with pytest.raises(fc.errors.TraceError, match=words):
            fc.DataParallel(kind(3, 1), lambda params, x: 0.0, fc.optim.sgd(0.1), mesh=fc.make_mesh({"data": 2}))
