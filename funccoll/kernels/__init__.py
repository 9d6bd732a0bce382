"""Numba kernels: the stream interpreter, written once, and the combines it calls. CUDA is planned."""
