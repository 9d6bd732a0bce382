"""A GPU as a device: NumPy's functions by CuPy, cuBLAS and kernels of our own, and captured programs.

Only this folder, `transports.cuda` and `transports.nccl` import CuPy.
"""
