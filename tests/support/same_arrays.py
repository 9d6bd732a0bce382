"""Comparison of Arrays."""

import numpy as np

import funccoll as fc

MESH = fc.make_mesh({"data": 4, "model": 2})


def same(a, b):
    """Equal in dtype, shape and bits."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def identity(spec, mesh=MESH):
    return fc.jit(lambda x: x, mesh=mesh, in_specs=(spec,), out_specs=spec)
