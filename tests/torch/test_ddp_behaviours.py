"""The behaviours of DistributedDataParallel that make sense for functions: which test holds each, and the rest by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("data-parallel")

TESTS = Path(__file__).parents[1]

HELD = {
    "a model without a trainable parameter is an error": "test_parallel_model.py::test_misuse",
    "the state of device 0 is broadcast first": "test_parallel_model_jobs.py::test_processes_train_from_rank_0s_parameters",
    "structure, shapes, dtypes and order are compared": (
        "test_parallel_model_jobs.py::test_ranks_with_other_parameters_are_told_the_first_difference"
    ),
    "limits of the first and of other buckets": "test_buckets.py::test_assign_buckets",
    "buckets in the order of completion, dtypes apart": "test_data_parallel.py::test_buckets_stand_in_the_program",
    "gradients are averaged": "test_data_parallel.py::test_gradients_equal_one_device",
    "buffers come from device 0": "test_data_parallel_calls.py::test_buffers_are_equal_on_all_devices",
    "no_sync adds up, the next step reduces the sum": "test_parallel_model.py::test_gradients_of_no_sync_steps_are_added",
    "unused parameters do not hang": "test_data_parallel_calls.py::test_unused_and_frozen_parameters_need_no_communication",
    "communication hooks": "test_data_parallel_calls.py::test_a_hook_without_state_is_the_gradient",
    "hooks with state": "test_data_parallel_calls.py::test_a_hook_with_state_is_carried_from_call_to_call",
    "post-local SGD, a periodic average of models": "test_ddp_behaviours.py::test_post_local_sgd",
    "SyncBatchNorm": "test_batch_norm.py::test_values_and_gradients_are_those_of_the_whole_batch",
    "sizes of buckets can be read": "test_data_parallel_calls.py::test_unused_and_frozen_parameters_need_no_communication",
    "hooks fire when a gradient is complete": "test_data_parallel.py::test_hooks_fire_when_their_last_cotangent_is_complete",
    "ranks that run out of data join": "test_uneven_batches.py::test_processes_have_the_gradient_of_all_data_or_the_same_error",
    "throw_on_early_termination": "test_uneven_batches.py::test_processes_have_the_gradient_of_all_data_or_the_same_error",
    "clipping by the global norm": "test_optim.py::test_torchs_clipping",
}

NOT_FOR_FUNCTIONS = ("sparse embeddings", "static_graph", "rebuilt buckets", "gradient_as_bucket_view", "pickling")
"""Words of docs/status.md, which says why."""


@in_groups("behaviour", HELD)
def test_each_behaviour_has_its_test(behaviour):
    file, _, name = HELD[behaviour].partition("::")
    assert re.search(rf"^def {name}\(", next(TESTS.rglob(file)).read_text(), re.MULTILINE), HELD[behaviour]


def test_the_status_page_names_the_rest():
    rows = [row for row in (TESTS.parent / "docs/status.md").read_text().split("\n") if row.startswith("|")]
    for words in NOT_FOR_FUNCTIONS:
        assert any(words in row and "not for functions" in row for row in rows), words


@pytest.mark.parametrize("n", [2, 4])
def test_post_local_sgd(n):
    """Lin et al., ICLR 2020: after a start in step, each device goes on alone, and their models are averaged every 4 steps.

    Parameters live stacked under P("data") between averages, and it is not a communication hook.
    """

    def loss(w: Any, x: Any) -> Any:
        return np.mean((np.tanh(x @ w) - 1) ** 2)

    def alone(w: Any, x: Any) -> Any:
        return w - 0.1 * fc.grad(lambda w: loss(w[0], x))(w)

    def averaged(w: Any) -> Any:
        return fc.pvary(fc.all_reduce(w, "data", op="mean"), "data")

    rows, mesh = P("data"), fc.make_mesh({"data": n})
    step = fc.jit(alone, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    average = fc.jit(averaged, mesh=mesh, in_specs=rows, out_specs=rows)
    rng = np.random.default_rng(0)
    start, batches = rng.normal(size=(3, 2)), rng.normal(size=(8, 2 * n, 3))
    stacked, models = np.broadcast_to(start, (n, 3, 2)), [start] * n
    assert len(step.lower(stacked, batches[0]).collectives()) == 0
    for number, batch in enumerate(batches, 1):
        stacked = step(stacked, batch)
        models = [w - 0.1 * fc.grad(loss)(w, part) for w, part in zip(models, np.split(batch, n), strict=True)]
        if number % 4 == 0:
            stacked, models = average(stacked), [np.mean(models, axis=0)] * n
    np.testing.assert_allclose(stacked, models, rtol=1e-12)
    assert all(np.array_equal(w, np.asarray(stacked)[0]) for w in np.asarray(stacked))
