"""Runtimes: what executes a compiled program. `local` is here; shm, mpi, nccl and cuda are planned."""
