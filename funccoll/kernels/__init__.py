"""Numba kernels: the stream interpreter, written once for CPUs and GPUs, and the combines that it calls.

They import `schedules.streams` for the instruction set.
"""
