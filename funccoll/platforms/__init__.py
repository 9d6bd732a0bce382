"""Platforms: the memory in which arrays lie, and the array library that computes on them (NumPy, or CuPy in `gpu`).

They import `arrays`, `kernels` and `primitives`, and know neither transports nor jobs.
"""
