"""Numba kernels: planned. The stream interpreter of the host and CUDA runtimes will live here."""
