"""A rank's part of a test: steps whose arrays, published gradients and results share one process with a free list."""

from __future__ import annotations

from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.platforms import free_list


def trained(devices: int, keeps: bool) -> list[bytes]:
    """Train a data-parallel model, with the results of every call kept or not. Return the bits of each step."""
    mesh = fc.make_mesh({"d": devices})

    def loss(w, x):
        h = np.tanh(x @ w[0])
        return np.mean(np.square(h @ w[1] - 1))

    def step(w, x):
        value, grads = fc.value_and_grad(fc.data_parallel(loss, axis="d", bucket_cap_mb=0.3))(w, x)
        shown = fc.all_gather(np.sum(np.sin(x), axis=1), "d")  # computed into shared memory, and read there
        return [a - np.float32(0.1) * g for a, g in zip(w, grads, strict=True)], value, shown, grads

    run = fc.jit(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=([P(), P()], P(), P(), [P(), P()]))
    rng = np.random.default_rng(3)
    w = [rng.standard_normal(s).astype(np.float32) * np.float32(0.1) for s in ((256, 256), (256, 256))]
    data = rng.standard_normal((1024, 256)).astype(np.float32)
    bits, kept = [], []
    for k in range(8):
        results: Any = run(w, data + k)
        w = results[0]
        bits.append(b"".join(np.asarray(x).tobytes() for x in fc.tree.leaves(results)))
        if keeps:
            kept.append([np.asarray(x) for x in fc.tree.leaves(results)])
        del results
    for before, arrays in zip(bits, kept, strict=False):
        assert before == b"".join(x.tobytes() for x in arrays)
    assert free_list.kept()[0] > 1 << 20
    fc.clear_caches()
    assert free_list.kept() == (0, 0)
    return bits
