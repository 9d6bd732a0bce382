"""BLAS threads: the devices of a mesh compute with one each, virtual or processes, so that bits are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import MeshError
from funccoll.platforms.blas import threads
from tests.support.ranks.ranks import PRELUDE, STAY, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.covers("blas-bits")]
SHAPES = [(300, 500, 200), (1, 5000, 300), (256, 256, 256), (1000, 1000, 10)]  # OpenBLAS splits the sums of some of them

SCRIPT = f"""
import hashlib, json, os, sys
import numpy as np
import funccoll as fc
from funccoll import P
from threadpoolctl import threadpool_limits

def operands(shape):
    n, k, m = shape
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, k), np.float32), rng.standard_normal((k, m), np.float32)

def bits(x):
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()

def products(devices, fn=np.matmul):
    mesh = fc.make_mesh({{"d": devices}})
    step = fc.jit(fn, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    return [bits(step(*operands(shape))) for shape in {SHAPES}]

def plain(threads, fn=np.matmul):
    with threadpool_limits(threads, "blas"):
        return [bits(fn(*operands(shape))) for shape in {SHAPES}]
"""
VIRTUAL = (
    SCRIPT
    + """
contract = lambda x, y: np.einsum("ij,jk->ik", x, y, optimize=True)
given = "FUNCCOLL_BLAS_THREADS" in os.environ
found = {} if given else {"alone": products(1), "one": plain(1), "two": plain(2)}
found["several"] = products(2)  # from here on the number of threads is set
with threadpool_limits(2, "blas"):
    found["again"] = products(4)
if not given:
    found |= {"einsum": products(2, contract), "one einsum": plain(1, contract), "two einsum": plain(2, contract)}
print(json.dumps(found))
"""
)


def told(code, **environment):
    variables = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**variables, "FUNCCOLL_FUSE": "0", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_devices_compute_with_one_thread_and_one_device_is_left_alone():
    found = told(VIRTUAL, OPENBLAS_NUM_THREADS="2")
    assert found["one"] != found["two"], "this BLAS gives the same bits with one thread and with two: use other shapes"
    assert found["alone"] == found["two"]
    assert found["several"] == found["again"] == found["one"]
    assert found["einsum"] == found["one einsum"] != found["two einsum"]
    other = told(VIRTUAL, OPENBLAS_NUM_THREADS="2", FUNCCOLL_BLAS_THREADS="2")
    assert other["several"] == other["again"] == found["two"]


@pytest.mark.slow
@pytest.mark.parametrize(("fuse", "expected"), [("0", "plain(1)"), ("1", "products(2)")])
def test_processes_compute_with_one_thread(tmp_path, fuse, expected):
    """They have the bits of one thread of BLAS, and with kernels those of virtual devices."""
    one = told(SCRIPT + f"print(json.dumps({expected}))", OPENBLAS_NUM_THREADS="2", FUNCCOLL_FUSE=fuse)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "print(json.dumps(products(2)))")
    done = subprocess.run(
        [sys.executable, "-m", "funccoll", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2", "FUNCCOLL_FUSE": fuse},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and {line[4:] for line in lines} == {json.dumps(one)} and len(lines) == 2, done


def test_ranks_with_other_numbers_of_threads_do_not_join():
    with Ranks(STAY, [0], world=2) as ranks:
        ranks.start(1, PRELUDE + "job_context.init()", FUNCCOLL_BLAS_THREADS="2")
        for rank in range(2):
            code, _, error = ranks.end(rank)
            assert code == 1 and "FUNCCOLL_BLAS_THREADS=2, and rank 0 runs funccoll" in error, error


@pytest.mark.parametrize("text", ["0", "-1", " ", "two", "1.5"])
def test_a_number_of_threads_that_is_none(text):
    with pytest.raises(MeshError, match="must be a whole number of threads, 1 or more"):
        threads({"FUNCCOLL_BLAS_THREADS": text})
    assert threads({}) == 1 and threads({"FUNCCOLL_BLAS_THREADS": "3"}) == 3


def test_only_products_on_several_devices_set_threads(monkeypatch):
    asked = []
    monkeypatch.setattr("funccoll.compiler.codegen.program_builder.keep_threads", lambda: lambda: asked.append(True))
    x = np.ones((4, 4), np.float32)
    for devices, fn, times in ((2, np.tanh, 0), (1, np.transpose, 0), (1, lambda x: x @ x, 0), (2, lambda x: x @ x, 1)):
        mesh = fc.make_mesh({"d": devices})
        fc.jit(fn, mesh=mesh, in_specs=P(), out_specs=P())(x)
        assert len(asked) == times
