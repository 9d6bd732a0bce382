"""Transports, which move data between devices: `local`, `shm`, `mpi`, `nccl`, `cuda`, and `plans`, the code that they share.

They import `job`, `runtime`, `kernels` and `schedules`; nothing but `runtime.transport` loads them, by name.
"""
