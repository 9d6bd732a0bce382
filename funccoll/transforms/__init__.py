"""Transformations of functions: gradients (`autodiff`), batches, control flow, callbacks, users' own primitives.

They import `tracing` and `collectives`, and know nothing of execution.
"""
