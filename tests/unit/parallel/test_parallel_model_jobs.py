"""Data-parallel models in jobs of processes."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.cases.parallel_model_cases import X, error_feedback, params_of
from tests.support.parallel_models import parallel
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("parallel-model")

SCRIPT = """
import json, os, sys
import numpy as np
import funccoll as fc
from tests.support.cases.parallel_model_cases import Momentum, X, error_feedback, loss, params_of
rank = fc.rank()
own = lambda x: np.split(x, fc.world_size())[rank]
def tell(*values):
    print(json.dumps(values), flush=True)
def said(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
"""


def jobs(n: int, script: str, **environment: str) -> Ranks:
    return Ranks(SCRIPT + script, range(n), **environment)


@pytest.mark.processes
def test_processes_train_from_rank_0s_parameters(tmp_path):
    """Ranks begin with different values; what they save is what virtual devices save, with a hook's states."""
    script = """
dp = fc.DataParallel(params_of(rank), loss, Momentum(), comm_hook=error_feedback())
losses = [float(dp.step(own(X))) for _ in range(3)]
with dp.no_sync():
    dp.step(own(X))
losses.append(float(dp.step(own(X))))
dp.save(os.environ["FILE"])
state = dp.state_dict()
dp.step(own(X))
dp.load(os.environ["FILE"])
tell(losses, all(np.array_equal(v, state[k]) for k, v in dp.state_dict().items()))
tell(said(lambda: dp.save("/proc/no/such/file")))
assert [dp.skip_if(value) for value in (rank == 1, False, True, np.float32("nan"))] == [True, False, True, rank < 2]
fc.finalize()
tell(said(lambda: dp.step(own(X))))
"""
    file = tmp_path / "job.safetensors"
    with jobs(2, script, FILE=str(file)) as ranks:
        first, second, third = ([json.loads(ranks.line(rank)) for rank in range(2)] for _ in range(3))
        ranks.end_well()
    virtual = parallel(params_of(0), 2, comm_hook=error_feedback())
    losses = [float(virtual.step(X)) for _ in range(3)]
    with virtual.no_sync():
        virtual.step(X)
    losses.append(float(virtual.step(X)))
    assert first == [[losses, True]] * 2
    from funccoll.parallel.checkpoint import read_tensors

    found, wanted = read_tensors(file), virtual.state_dict()
    assert set(found) == set(wanted) and all(found[k].tobytes() == v.tobytes() for k, v in wanted.items())
    assert re.match("(FileNotFound|NotADirectory)Error", second[0][0])
    wanted = r"FunccollError: DataParallel.save: rank 0 could not write .*: (FileNotFound|NotADirectory)Error"
    assert re.match(wanted, second[1][0])
    assert all(re.match(r"\w+Error: .*(finalize|left|init)", told[0]) for told in third), third


@pytest.mark.processes
def test_ranks_with_other_parameters_are_told_the_first_difference():
    script = """
first, second, third = params_of(), params_of(), params_of()
first["goal"] = first["goal"][: 3 - rank]
second["layers"] = second["layers"][: 2 - rank]
third = {"other" if rank and k == "goal" else k: v for k, v in third.items()}
tell(*[said(lambda: fc.DataParallel(params, loss, Momentum())) for params in (first, second, third)])
"""
    with jobs(2, script) as ranks:
        told = [json.loads(ranks.line(rank)) for rank in range(2)]
        ranks.end_well()
    words = (
        r"number 0 is goal: f64\[3\] on rank 0, and goal: f64\[2\] on rank 1",
        r"number 2 is layers.1: f64\[3, 3\] on rank 0, and nothing on rank 1",
        r"number 0 is goal: f64\[3\] on rank 0, and layers.0: f64\[3, 3\] on rank 1",
    )
    for texts in told:
        for text, difference in zip(texts, words, strict=True):
            start = "ProgramMismatch: the parameters of DataParallel differ between ranks: "
            assert re.match(start + difference, text), text


@pytest.mark.processes
def test_a_rank_that_dies_in_a_step_is_named():
    script = """
dp = fc.DataParallel(params_of(), loss, Momentum())
dp.step(own(X))
tell("ready")
if rank == 1:
    input()
    os._exit(3)
tell(said(lambda: [dp.step(own(X)) for _ in range(1000)]))
"""
    with jobs(2, script) as ranks:
        ranks.lines()
        ranks.tell(1)
        told = json.loads(ranks.line(0))[0]
        assert re.match("PeerFailure: rank 1 (died|exited)", told), told
        assert ranks.end(1)[0] == 3


@pytest.mark.processes
def test_the_same_rows_on_all_processes_are_a_mistake():
    """The first step compares them, whatever it does, and rank 0 warns. Large arrays are read whole before it warns."""
    script = """
import warnings
rng = np.random.default_rng(0)
fit = lambda w, x, *more: np.mean((x @ w) ** 2)
def warned(*batches, mesh=None, **options):
    dp = fc.DataParallel(np.ones(2), fit, fc.optim.sgd(0.1), mesh=mesh, axis="d")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            dp.step(*batch, **options)
    assert all(w.category is fc.errors.EqualRowsWarning for w in found), found
    return [str(w.message) for w in found]
x, sparse = rng.normal(size=(4, 2)), np.zeros((100_000, 2))
sparse[40 + rank] = 1  # where the first hash does not read
line = fc.make_mesh({"d": 2})
tell(warned((x,), (x,)))
tell([warned(*batches) for batches in [
    [(x + rank,), (x,)],
    [(x, np.arange(4) + rank)],
    [(x[:1],)],
    [(fc.device_put(x, line, fc.P("d")),)],
    [(sparse,)],
]])
tell(warned((np.zeros_like(sparse),)))
tell(warned((x,), mesh=fc.make_mesh({"d": 1, "model": 2})), warned((x,), active=rank == 0))
"""
    with jobs(2, script) as ranks:
        told = [[json.loads(ranks.line(rank)) for _ in range(4)] for rank in range(2)]
        ranks.end_well()
    words = (
        r"all 2 processes passed the same rows to the first DataParallel\.step, .*, or fc\.device_put\(rows, mesh, P\('d'\)\)"
    )
    (first,), (nothing,), (whole,), none = told[0]
    assert len(first) == len(whole) == 1 and re.match(words, first[0]) and re.match(words, whole[0])
    assert nothing == [[]] * 5 and none == [[], []]
    assert told[1] == [[[]], [[[]] * 5], [[]], [[], []]]  # rank 1
