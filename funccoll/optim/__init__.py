"""Optimizers as pure (init, update) pairs, and `apply`, which takes a step for all parameters in one equation.

It imports `compiler`, for steps outside of traced functions.
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from .gradients import clip, clip_by_global_norm, global_norm, scale_by_schedule
from .learning_rates import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    warmup_cosine_decay_schedule,
)
from .state_layout import state_specs
from .steps import AdamState, SgdState, adam, adamw, sgd
from .transformation import GradientTransformation, apply, apply_updates, chain

__all__ = [
    "AdamState",
    "GradientTransformation",
    "SgdState",
    "adam",
    "adamw",
    "apply",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "global_norm",
    "join_schedules",
    "linear_schedule",
    "piecewise_constant_schedule",
    "scale_by_schedule",
    "sgd",
    "state_specs",
    "warmup_cosine_decay_schedule",
]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(
        globals(),
        {
            "Adam": "fc.optim.adam(learning_rate)",
            "AdamW": "fc.optim.adamw(learning_rate)",
            "SGD": "fc.optim.sgd(learning_rate)",
            "clip_grad_norm_": "fc.optim.clip_by_global_norm(max_norm), in fc.optim.chain before the optimizer",
            "clip_grad_value_": "fc.optim.clip(max_delta), in fc.optim.chain before the optimizer",
            "lr_scheduler": "a schedule in place of the learning rate, such as fc.optim.cosine_decay_schedule(1e-3, steps)",
        },
    )
