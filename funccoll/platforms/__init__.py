"""Platforms: the memory of arrays, and the array library that computes on them (NumPy, or CuPy in `gpu`).

They import `arrays`, `kernels` and `primitives`. They do not know transports or jobs.
"""
