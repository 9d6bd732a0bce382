"""Processes of one host: collectives by Numba kernels over shared memory.

It imports `plans`; other transports import it.
"""
