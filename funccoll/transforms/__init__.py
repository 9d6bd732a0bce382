"""Transformations of functions: gradients (`autodiff`), batches, control flow, callbacks, primitives of the user's own.

They import `tracing` and `collectives`, and know nothing of execution.
"""
