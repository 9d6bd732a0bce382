"""Learning rates that depend on the step: functions from the number of steps taken to a factor. The names are optax's.

A schedule takes the step as an integer or an integer scalar, traced or not, and computes in float64. Step 0 is the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.types import is_inexact
from ..errors import DTypeError, ShapeError, TraceError
from ..ops.registry import as_traceable
from ..tracing.trace import value_type

__all__ = [
    "Schedule",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "nonnegative",
    "piecewise_constant_schedule",
    "rate_at",
    "warmup_cosine_decay_schedule",
]

Schedule = Callable[[Any], Any]
"""A function from the number of steps taken before this one to a scalar."""


def nonnegative(what: str, value: Any, below: float = math.inf) -> float:
    """Return a finite number of at least 0 and less than `below`, as a float. Raises ShapeError, a ValueError, for another."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)) or not 0 <= value < below:
        limit = "a finite number" if below == math.inf else f"a number less than {below:g}"
        raise ShapeError(f"{what} must be {limit}, and not negative; it is {value!r:.60}.")
    return float(value)


def rate_at(what: str, rate: Any, count: Any) -> Any:
    """Return a learning rate (a number, a scalar or a schedule) at a step, as a float or a float64 scalar."""
    if isinstance(rate, float):
        return rate
    value = rate(count) if callable(rate) else rate
    if isinstance(value, (int, float)):
        return float(value)
    value = as_traceable(value)
    found = value_type(value)
    if found.shape or not (is_inexact(found.dtype) or found.dtype.kind in "iu") or found.dtype.kind == "c":
        raise DTypeError(f"{what} is of type {found}: it must be a real scalar, or a function from the step to one.")
    return value.astype(np.float64)


def _steps(what: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ShapeError(f"{what} must be an integer of at least {least}; it is {value!r:.60}.")
    return int(value)


def _real(count: Any) -> Any:
    return as_traceable(count).astype(np.float64)


def constant_schedule(value: float) -> Schedule:
    """Return a schedule that is `value` at every step.

    Args:
        value: A finite number of at least 0.

    Returns:
        A function from the step to the value.

    Example:
        >>> print(fc.optim.constant_schedule(0.1)(7))
        0.1
    """
    value = nonnegative("constant_schedule: value", value)
    return lambda count: value


def linear_schedule(init_value: float, end_value: float, transition_steps: int) -> Schedule:
    """Return a schedule that goes from one value to another in a line.

    Args:
        init_value: The value at step 0, at least 0.
        end_value: The value at step `transition_steps`, and from then on.
        transition_steps: The number of steps, at least 1.

    Returns:
        A function from the step to a float64 scalar.

    Example:
        >>> schedule = fc.optim.linear_schedule(0.0, 1.0, 4)
        >>> print([float(schedule(step)) for step in range(6)])
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    start = nonnegative("linear_schedule: init_value", init_value)
    end = nonnegative("linear_schedule: end_value", end_value)
    steps = _steps("linear_schedule: transition_steps", transition_steps)
    return lambda count: start + (end - start) * (np.minimum(_real(count), steps) / steps)


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Return a schedule that decays along half a cosine.

    Source: Loshchilov and Hutter, "SGDR", ICLR 2017.

    Args:
        init_value: The value at step 0, at least 0.
        decay_steps: The number of steps, at least 1.
        alpha: The value at step `decay_steps`, and from then on, is `alpha * init_value`.

    Returns:
        A function from the step to a float64 scalar.

    Example:
        >>> schedule = fc.optim.cosine_decay_schedule(1.0, 4)
        >>> print([round(float(schedule(step)), 3) for step in range(5)])
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    start = nonnegative("cosine_decay_schedule: init_value", init_value)
    steps = _steps("cosine_decay_schedule: decay_steps", decay_steps)
    low = nonnegative("cosine_decay_schedule: alpha", alpha)

    def schedule(count: Any) -> Any:
        turned = 0.5 * (1.0 + np.cos(np.minimum(_real(count), steps) * (math.pi / steps)))
        return start * ((1.0 - low) * turned + low)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0
) -> Schedule:
    """Return a schedule that rises in a line, and then decays along half a cosine.

    Source: Loshchilov and Hutter, "SGDR", ICLR 2017, for the decay.

    Args:
        init_value: The value at step 0, at least 0.
        peak_value: The value at step `warmup_steps`.
        warmup_steps: The number of steps of the rise, at least 1.
        decay_steps: The step at which the decay ends. It counts from step 0, so it is more than `warmup_steps`.
        end_value: The value at step `decay_steps`, and from then on.

    Returns:
        A function from the step to a float64 scalar.

    Raises:
        ShapeError: If a number is out of range.

    Example:
        >>> schedule = fc.optim.warmup_cosine_decay_schedule(0.0, 1.0, 2, 6)
        >>> print([round(float(schedule(step)), 3) for step in range(7)])
        [0.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    name = "warmup_cosine_decay_schedule"
    warmup, total = _steps(f"{name}: warmup_steps", warmup_steps), _steps(f"{name}: decay_steps", decay_steps)
    if total <= warmup:
        raise ShapeError(f"{name}: decay_steps, {total}, counts from step 0: it must be more than warmup_steps, {warmup}.")
    peak = nonnegative(f"{name}: peak_value", peak_value)
    end = nonnegative(f"{name}: end_value", end_value)
    decay = cosine_decay_schedule(peak, total - warmup, end / peak if peak else 0.0)
    return join_schedules([linear_schedule(init_value, peak, warmup), decay], [warmup])


def exponential_decay(
    init_value: float, transition_steps: int, decay_rate: float, *, staircase: bool = False, end_value: float | None = None
) -> Schedule:
    """Return the schedule `init_value * decay_rate ** (step / transition_steps)`.

    Args:
        init_value: The value at step 0, at least 0.
        transition_steps: The number of steps in which the value changes by one factor `decay_rate`.
        decay_rate: The factor, at least 0.
        staircase: True takes the quotient's integer part, so the value changes every `transition_steps` steps.
        end_value: A limit: the least value if `decay_rate` is less than 1, and the greatest otherwise. None sets no limit.

    Returns:
        A function from the step to a float64 scalar.

    Example:
        >>> schedule = fc.optim.exponential_decay(1.0, 2, 0.5)
        >>> print([round(float(schedule(step)), 3) for step in range(5)])
        [1.0, 0.707, 0.5, 0.354, 0.25]
    """
    start = nonnegative("exponential_decay: init_value", init_value)
    steps = _steps("exponential_decay: transition_steps", transition_steps)
    factor = nonnegative("exponential_decay: decay_rate", decay_rate)
    bound = None if end_value is None else nonnegative("exponential_decay: end_value", end_value)

    def schedule(count: Any) -> Any:
        times = _real(count) / steps
        value = start * np.power(np.float64(factor), np.floor(times) if staircase else times)
        if bound is None:
            return value
        return np.maximum(value, bound) if factor < 1 else np.minimum(value, bound)

    return schedule


def piecewise_constant_schedule(init_value: float, boundaries_and_scales: Mapping[int, float]) -> Schedule:
    """Return a schedule that is multiplied by a scale at each boundary.

    Args:
        init_value: The value at step 0, at least 0.
        boundaries_and_scales: From each boundary, a step, to the scale of the value from that step on.

    Returns:
        A function from the step to a scalar.

    Example:
        >>> schedule = fc.optim.piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.1})
        >>> print([round(float(schedule(step)), 3) for step in range(6)])
        [1.0, 1.0, 0.5, 0.5, 0.05, 0.05]
    """
    start = nonnegative("piecewise_constant_schedule: init_value", init_value)
    scales = [
        (_steps("piecewise_constant_schedule: a boundary", step), nonnegative("piecewise_constant_schedule: a scale", scale))
        for step, scale in sorted(boundaries_and_scales.items())
    ]

    def schedule(count: Any) -> Any:
        value: Any = start
        for boundary, scale in scales:
            value = value * np.where(_real(count) >= boundary, scale, 1.0)
        return value

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return schedules one after another.

    Args:
        schedules: Functions from a step to a scalar, one more than boundaries.
        boundaries: The increasing steps at which the next schedule begins, at its own step 0.

    Returns:
        A function from the step to a scalar.

    Raises:
        TraceError: If the numbers of schedules and boundaries do not fit.
        ShapeError: If the boundaries do not increase.

    Example:
        >>> warmup, rest = fc.optim.linear_schedule(0.0, 1.0, 2), fc.optim.constant_schedule(0.5)
        >>> schedule = fc.optim.join_schedules([warmup, rest], [2])
        >>> print([float(schedule(step)) for step in range(4)])
        [0.0, 0.5, 0.5, 0.5]
    """
    if len(schedules) != len(boundaries) + 1 or not all(map(callable, schedules)):
        raise TraceError(
            f"join_schedules: {len(schedules)} schedule(s) for {len(boundaries)} boundaries: it takes functions of the step, "
            "one more than boundaries."
        )
    limits = [_steps("join_schedules: a boundary", b) for b in boundaries]
    if sorted(set(limits)) != limits:
        raise ShapeError(f"join_schedules: the boundaries {limits} must increase.")

    def joined(count: Any) -> Any:
        count = as_traceable(count)
        value = schedules[0](count)
        for boundary, schedule in zip(limits, schedules[1:], strict=True):
            value = np.where(count < boundary, value, schedule(count - boundary))
        return value

    return joined
