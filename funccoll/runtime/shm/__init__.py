"""Processes of one host: collective groups executed by Numba kernels over shared memory."""
