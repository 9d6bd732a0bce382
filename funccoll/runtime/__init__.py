"""Runtimes: the execution of compiled programs. `backend` is the seam; `local`, `shm`, `cuda` and `nccl` are its transports."""
