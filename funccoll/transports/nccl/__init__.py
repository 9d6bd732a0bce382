"""NCCL between the GPUs of a job, one for each process, through CuPy.

It imports `shm` and `mpi`, by whose ranks its communicators agree.
"""
