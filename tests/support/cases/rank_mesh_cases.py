"""The jobs of `test_meshes.py`: meshes that ranks make alike, or not."""

from __future__ import annotations

import pickle
import threading

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.errors import FunccollError


def other_meshes(way: str) -> tuple[str, str]:
    """(class, text) of the error of a rank whose mesh differs from that of another one."""
    rank, n = fc.rank(), fc.world_size()
    axes = [{"a": n, "b": 1}, {"b": 1, "a": n}] if way == "another order of axes" else [{"a": n}, {"b": n}]
    if way == "other sizes":
        axes = [{"a": n, "b": 1}, {"a": 1, "b": n}]
    fc.make_mesh({"d": n})
    try:
        if way == "another order of meshes" and rank:
            fc.make_mesh(axes[1])
            fc.make_mesh(axes[0])
        elif way == "another order of meshes":
            fc.make_mesh(axes[0])
            fc.make_mesh(axes[1])
        else:
            fc.make_mesh(axes[rank > 0])
    except FunccollError as error:
        return type(error).__name__, str(error)
    return "", ""


def equal_meshes() -> list[float]:
    """Sums along meshes, more than are noted: the first from another line on each rank, one which is too long to be noted."""
    rank, n = fc.rank(), fc.world_size()
    if rank:
        meshes = [fc.make_mesh({"a": n, "b": 1})]
    else:
        meshes = [fc.make_mesh({"a": n, "b": 1})]
    meshes += [fc.make_mesh({"a" * 300: n}), *(fc.make_mesh({f"a{i}": n}) for i in range(150))]
    if rank:
        fc.make_mesh({"c": n})  # a last one, which is never used

    def total(mesh):
        axis, x = mesh.axis_names[0], np.arange(float(n))
        return float(fc.jit(lambda x: fc.all_reduce(x[0], axis), mesh=mesh, in_specs=P(axis), out_specs=P())(x).local)

    return [total(meshes[i]) for i in (0, 1, -1)]


def threads_with_pickled_meshes() -> list[str | float]:
    """Results of threads which call collectives over meshes from pickles, each while those before it are alive.

    They differ in an axis of size 1, in a name, or not at all.
    """
    n, ended, found = fc.world_size(), threading.Event(), list[str | float]()
    meshes = [pickle.loads(pickle.dumps(fc.make_mesh(axes))) for axes in ({"a": n}, {"a": n, "b": 1}, {"b": n}, {"a": n})]

    def call(mesh, done):
        axis, x = mesh.axis_names[0], np.arange(float(n))
        function = fc.jit(lambda x: fc.all_reduce(x[0], axis), mesh=mesh, in_specs=P(axis), out_specs=P())
        try:
            found.append(float(function(x).local))
        except FunccollError as error:
            found.append(str(error))
        done.set()
        ended.wait(120)

    threads = []
    for mesh in meshes:
        done = threading.Event()
        threads.append(threading.Thread(target=call, args=(mesh, done)))
        threads[-1].start()
        done.wait(120)
    ended.set()
    for thread in threads:
        thread.join()
    return found
