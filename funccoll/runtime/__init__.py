"""Runtimes: the execution of compiled programs. `transport` is the seam; `local`, `shm`, `cuda`, `nccl` are transports."""
