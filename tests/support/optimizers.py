"""Optimizers, parameters and steps for their tests."""

from __future__ import annotations

import numpy as np

import funccoll as fc
from funccoll import optim

OPTIMIZERS = {
    "sgd": lambda rate=0.1: optim.sgd(rate),
    "sgd_l2": lambda rate=0.1: optim.sgd(rate, weight_decay=0.1),
    "momentum": lambda rate=0.1: optim.sgd(rate, 0.9, dampening=0.2),
    "nesterov": lambda rate=0.1: optim.sgd(rate, 0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda rate=0.1: optim.adam(rate),
    "adam_l2": lambda rate=0.1: optim.adam(rate, weight_decay=0.1),
    "amsgrad": lambda rate=0.1: optim.adam(rate, amsgrad=True),
    "adamw": lambda rate=0.1: optim.adamw(rate, amsgrad=True),
    "chain": lambda rate=0.1: optim.chain(optim.clip_by_global_norm(1.0), optim.clip(0.1), optim.adamw(rate)),
    "scaled": lambda rate=0.1: optim.chain(optim.adam(rate), optim.scale_by_schedule(optim.exponential_decay(1.0, 3, 0.5))),
}
"""Names -> optimizers; the step of the last one is not fused."""


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "w": ((9, 7), np.float32),
        "b": ((130,), np.float32),
        "h": ((33,), np.float16),
        "z": ((17,), fc.bfloat16),
        "d": ((5, 1), np.float64),
        "s": ((), np.float32),
        "e": ((0, 4), np.float32),
    }
    return {k: np.asarray(rng.normal(size=shape)).astype(dtype) for k, (shape, dtype) in shapes.items()}


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in fc.tree.leaves(tree)]


def by_pair(optimizer):
    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def by_apply(optimizer):
    return lambda grads, state, params: optim.apply(optimizer, grads, state, params)


def clipped(axis, specs, mesh):
    """A jitted clip_by_global_norm of gradients that are split as `specs` say."""
    clip = optim.clip_by_global_norm(1.0, axis)
    return fc.jit(lambda g: clip.update(g, clip.init(g))[0], mesh=mesh, in_specs=(specs,), out_specs=specs)
